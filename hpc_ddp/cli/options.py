"""The options that `submit`, `render` and `dry-run` share. Names are Slurm's where it has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from hpc_ddp.run.spec import BACKENDS, CONTINUE_BY, GPU_REQUESTS, LAUNCHERS, STARTERS

Command = Callable[..., Any]

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_GPUS = click.option(
    "--gpus-per-node", metavar="[TYPE:]N", help="GPUs per node; a worker for each."
)

# Where and in what a job runs.
_SCENE = [
    click.option("--site", metavar="NAME", help="A site file of templates/sites or yours."),
    click.option(
        "--fabric", metavar="NAME", help="The interconnect (default: looked up on the nodes)."
    ),
    click.option("--interface", metavar="NAME", help="Network interface (default: looked up)."),
    click.option(
        "--setup",
        multiple=True,
        metavar="LINE",
        help="A shell line to run before the job, as 'module load cuda'; repeatable.",
    ),
    click.option(
        "--container",
        metavar="COMMAND",
        help="What enters a container, as 'apptainer exec --nv image.sif'.",
    ),
    click.option("--image", metavar="IMAGE", help="A container, by the site's tool."),
    click.option("--python", metavar="PATH", help="The Python that has torch."),
    click.option(
        "--env",
        multiple=True,
        metavar="NAME[=VALUE]",
        help="NAME: taken from here (secrets too). NAME=VALUE: written into the script.",
    ),
    click.option("--runs-dir", metavar="DIR", help="Where run folders are made."),
]

_OPTIONS = [
    click.option(
        "-N", "--nodes", metavar="N|MIN-MAX", help="Number of nodes (default 1), or what will do."
    ),
    _GPUS,
    click.option(
        "--nproc-per-node", type=int, help="Workers per node (default: one per GPU, or 1)."
    ),
    click.option("-c", "--cpus-per-task", type=int, help="CPUs per node, for all its workers."),
    click.option("-t", "--time", metavar="TIME", help="Time limit of one attempt, as 12:00:00."),
    click.option("-p", "--partition"),
    click.option("-A", "--account"),
    click.option("-q", "--qos"),
    click.option("-C", "--constraint"),
    click.option("--mem", metavar="SIZE", help="Memory per node."),
    click.option("--exclusive", is_flag=True, default=None, help="Share the nodes with nobody."),
    click.option("-w", "--nodelist"),
    click.option("-x", "--exclude"),
    click.option("--reservation"),
    click.option("-a", "--array", metavar="INDEXES", help="One run for each index."),
    click.option("-d", "--dependency"),
    click.option("-J", "--job-name", metavar="NAME", help="Default: the script's name."),
    click.option("-D", "--chdir", metavar="DIR", help="Working directory (default: this one)."),
    click.option(
        "--signal",
        metavar="SIGNAL[@S]",
        help="Tell the script that the end is near, S seconds before (default TERM@60).",
    ),
    click.option(
        "--gpu-request",
        metavar="|".join(GPU_REQUESTS),
        help="The option of sbatch that --gpus-per-node becomes.",
    ),
    click.option("--mail-type"),
    click.option("--mail-user"),
    click.option(
        "--sbatch",
        multiple=True,
        metavar="OPTION",
        help="Any other option of sbatch, as --sbatch=--network=…; may be repeated.",
    ),
    click.option(
        "--launcher",
        metavar="|".join(LAUNCHERS),
        help="What starts the workers (default torchrun); srun: each is a Slurm task.",
    ),
    click.option(
        "--starter",
        metavar="|".join(STARTERS),
        help="What starts torchrun on each node (default srun).",
    ),
    click.option(
        "--srun",
        multiple=True,
        metavar="OPTION",
        help="Any option of srun for the training's step, as --srun=--cpu-bind=none; repeatable.",
    ),
    click.option(
        "--backend", metavar="|".join(BACKENDS), help="How it is started (default slurm)."
    ),
    *_SCENE,
    click.option("--template", metavar="FILE", help="A template that extends job.sbatch.j2."),
    click.option("--no-snapshot", is_flag=True, help="Run the live code, not a copy of it."),
    click.option(
        "--preflight", is_flag=True, default=None, help="Look at the nodes first; avoid bad ones."
    ),
    click.option("--max-requeues", type=int, help="Bound on requeues (default: none)."),
    click.option(
        "--max-restarts", type=int, help="Restarts of all workers within an attempt (default 0)."
    ),
    click.option(
        "--elastic", is_flag=True, default=None, help="Go on with the other nodes if one is lost."
    ),
    click.option(
        "--torchrun",
        multiple=True,
        metavar="OPTION",
        help="Any other option of torchrun, as --torchrun=--numa-binding=node; may be repeated.",
    ),
    click.option("--max-failures", type=int, help="Retries after failures (default 3)."),
    click.option(
        "--budget-gpu-hours",
        type=float,
        metavar="HOURS",
        help="Start and requeue no more once this is spent.",
    ),
    click.option(
        "--continue-by",
        metavar="|".join(CONTINUE_BY),
        help="How a job goes on: requeue, or a chain of jobs where that is refused.",
    ),
    click.option(
        "--run", "run_text", metavar="RUN", help="Go on with a run: folder, id, name or job id."
    ),
    _JSON,
]


# Those that mean something for processes of this machine, with nothing submitted or gone on with.
_HERE = (
    *(
        "nodes",
        "gpus_per_node",
        "nproc_per_node",
        "launcher",
        "python",
        "env",
        "runs_dir",
        "no_snapshot",
    ),
    *("as_json", "script", "args"),
)


# The help of a command shows its options under these headings, in this order.
GROUPS = {
    "What to ask Slurm for": (
        *("nodes", "gpus_per_node", "cpus_per_task", "time", "partition", "account", "qos"),
        *("constraint", "mem", "exclusive", "nodelist", "exclude", "reservation", "array"),
        *("dependency", "job_name", "mail_type", "mail_user", "gpu_request", "sbatch"),
    ),
    "The cluster, and the scene of the job": (
        *("site", "fabric", "interface", "setup", "image", "container", "python", "env", "chdir"),
        *("runs_dir", "template", "no_snapshot"),
    ),
    "Starting the workers": (
        *("backend", "nproc_per_node", "launcher", "starter", "srun", "torchrun", "preflight"),
    ),
    "Going on": (
        *(
            "run_text",
            "fresh",
            "signal",
            "continue_by",
            "max_requeues",
            "max_failures",
            "max_restarts",
        ),
        *("elastic", "budget_gpu_hours"),
    ),
}


class Grouped(click.Command):
    """A command of many options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        records = {p.name: r for p in options if (r := p.get_help_record(ctx))}
        for heading, names in GROUPS.items():
            found = [records.pop(name) for name in names if name in records]
            if found:
                with formatter.section(heading):
                    formatter.write_dl(found)
        with formatter.section("Others"):
            formatter.write_dl(list(records.values()))


def job_options(command: Command) -> Command:
    """Add the shared options, SCRIPT and ARGS to a command."""
    command = click.argument("args", nargs=-1, type=click.UNPROCESSED)(command)
    command = click.argument("script", required=False)(command)
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def local_options(command: Command) -> Command:
    """Add those of the shared options that count on this machine, SCRIPT and ARGS."""
    own = list(vars(command).get("__click_params__", ()))
    params = vars(job_options(command))["__click_params__"]
    params[:] = [each for each in params if each in own or each.name in _HERE]
    return command


def again_options(command: Command) -> Command:
    """Add the options of a job whose script and arguments are known already."""
    for option in reversed(_OPTIONS):
        command = option(command)
    params = vars(command)["__click_params__"]
    params[:] = [each for each in params if each.name not in ("run_text", "site")]
    return command


def node_options(command: Command) -> Command:
    """Add the options that say what a job's nodes have to be like."""
    for option in reversed([_GPUS, *_SCENE, _JSON]):
        command = option(command)
    return command


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Return what was said on the command line, under the keys that a project file has."""
    values = {
        name.replace("_", "-"): list(value) if isinstance(value, tuple) else value
        for name, value in options.items()
        if not (value is None or value is False or value == ())
        and name not in ("env", "no_snapshot", "script", "args")
    }
    pairs = [text.partition("=") for text in options["env"]]
    values |= {"env": {n: v for n, eq, v in pairs if eq}} if any(p[1] for p in pairs) else {}
    names = [n for n, eq, _ in pairs if not eq]
    values |= {"env-names": names} if names else {}
    if options.get("no_snapshot"):
        values["snapshot"] = False
    if options.get("script"):
        values |= {"script": options["script"], "args": list(options["args"])}
    return values
