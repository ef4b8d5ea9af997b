"""The batch script: a template with named blocks, filled from a `JobSpec`."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import jinja2

from hpc_ddp import __version__
from hpc_ddp.launch import container
from hpc_ddp.launch.fabric import fabric_env
from hpc_ddp.launch.resources import folder
from hpc_ddp.run.errors import UsageError
from hpc_ddp.run.folder import RunFolder
from hpc_ddp.run.spec import JobSpec, directives, point_args

T = TypeVar("T")

BASE = "job.sbatch.j2"
# No limit on how long srun waits for the other nodes once the first has ended well: rank 0 may
# evaluate and export for long. A site's own WaitTime would end it. Failed nodes end the others.
WAIT_S = 0

# What torchrun is told; the variables are exported by `batch begin`, or by the local back-end.
TORCHRUN_OPTIONS = (
    "--nnodes={nnodes}",
    "--nproc-per-node={workers}",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=$HPC_DDP_HEAD:$HPC_DDP_PORT",
    "--rdzv-id=$HPC_DDP_RDZV_ID",
    "--rdzv-conf={conf}",
    "--max-restarts={restarts}",
)
RENDEZVOUS = "join_timeout=600,read_timeout=120"
# How long an elastic start waits for late nodes, in s; after a loss it is `agent.LAST_CALL_S`.
LATE_S = 120


def torchrun_options(spec: JobSpec) -> list[str]:
    """Return torchrun's options, with ``$`` variables that are known only in the job.

    Unless the job is elastic, min = max nodes: a late node must not be shut out, nor a world of
    fewer nodes start.
    """
    least, late = "", ""
    if spec.elastic:
        least, late = "$HPC_DDP_LEAST_NODES:", f",last_call_timeout={LATE_S}"
    values = {
        "nnodes": f"{least}$HPC_DDP_NNODES",
        "workers": spec.workers_per_node,
        "conf": RENDEZVOUS + late,
        "restarts": spec.restarts,
    }
    return [*(word.format(**values) for word in TORCHRUN_OPTIONS), *spec.torchrun]


def srun_end(spec: JobSpec) -> list[str]:
    """Return the options of srun that say what becomes of a step of which a node has ended."""
    if spec.elastic:  # the supervisors end it, where it has to
        return ["--kill-on-bad-exit=0", "--no-kill", f"--wait={WAIT_S}"]
    return ["--kill-on-bad-exit=1", f"--wait={WAIT_S}"]


def node_command(spec: JobSpec, node: str, script: str) -> tuple[str, list[str]]:
    """Return the part of the node's code that is each task of the step, and what it is told before
    the script's arguments."""
    if spec.launcher == "srun":
        return "task", [spec.python, script]
    return "supervisor", [spec.python, node, "agent", *torchrun_options(spec), script]


def sbatch_line(name: str, value: str) -> str:
    """Return one ``#SBATCH`` line. sbatch splits it at blanks and knows both quotes and backslash.

    The value is free of line breaks: `JobSpec` has refused those.
    """
    if not value:
        return f"#SBATCH --{name}"
    plain = re.fullmatch(r"[\w./:,@%+=\[\]&|*()<>-]+", value)
    return f"#SBATCH --{name}={value}" if plain else f'#SBATCH --{name}="{_escaped(value)}"'


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"')


def header_pairs(spec: JobSpec, run: RunFolder, more: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return all (option, value) pairs of the job: the user's, `more` of the same, and ours."""
    warn_s = min(spec.warn_s, (spec.time_s or 3600) // 10)
    output = str(run.slurm_out).replace("%", "%%")
    if spec.array:
        output = f"{output.removesuffix('.out')}-%a.out"
    return [
        *directives(replace(spec, sbatch=(*spec.sbatch, *more))),
        # Of a range Slurm would then give the least, since it counts tasks.
        *([("ntasks-per-node", str(spec.tasks_per_node))] if isinstance(spec.nodes, int) else []),
        ("output", output),
        ("open-mode", "append"),
        *([("no-kill", "")] if spec.elastic else []),
        ("requeue" if spec.continue_by == "requeue" else "no-requeue", ""),
        ("signal", f"B:USR2@{warn_s}"),
    ]


def job_env(spec: JobSpec) -> dict[str, str]:
    """Return the variables written into the script: the fabric's, then the user's over them."""
    return {**fabric_env(spec.fabric), **spec.env}


class Rendering:
    """A job's script, whole or by block.

    Raises
    ------
    UsageError
        the user's template is missing or broken; names file and line
    """

    def __init__(self, spec: JobSpec, run: RunFolder, code: Path, script: Path) -> None:
        if {":", "\\"} & set(str(run.path)) or not str(run.path).isprintable():
            raise UsageError(
                f"the run folder {str(run.path)!r} has a colon, which PYTHONPATH can't hold,"
                " or a backslash or control character, which the name of Slurm's output can't",
                hint="--runs-dir, without them",
            )
        self._spec = spec
        self.entry = container.entry(spec, run.path, code)
        self.header = header_pairs(spec, run, self.entry.sbatch)
        self._context: dict[str, Any] = {
            "version": __version__,
            "directives": [sbatch_line(name, value) for name, value in self.header],
            "run": str(run.path),
            "code": str(code),
            "host_suffix": spec.host_suffix,
            "interface": spec.interface or "",
            "env": job_env(spec),
            "workdir": spec.workdir,
            "setup": spec.setup,
            "teardown": spec.teardown,
            "host_python": sys.executable,
            "python": spec.python,
            "workers": spec.workers_per_node,
            "launcher": spec.launcher,
            "starter": spec.starter,
            "srun": (*spec.srun, *self.entry.srun),
            "srun_end": srun_end(spec),
            "torchrun_options": torchrun_options(spec),
            "script": str(script),
            "args": spec.args,
            "points": [point_args(point) for point in spec.points],
            "preflight": spec.preflight,
            "container": self.entry.command,
            "container_srun": self.entry.srun,
        }

    def whole(self) -> str:
        """Return the whole script."""
        template = self._template()
        return _guarded(lambda: template.render(self._context))

    def block(self, name: str) -> str:
        """Return one named block."""
        template = self._template()
        context = template.new_context(self._context)
        return _guarded(lambda: "".join(template.blocks[name](context)))

    def _template(self) -> jinja2.Template:
        own = Path(self._spec.template).absolute() if self._spec.template else None
        environment = _environment(own.parent if own else None)
        return _guarded(lambda: environment.get_template(own.name if own else BASE))


@cache  # keeps compiled templates: a job is rendered once to check it, and once to run it
def _environment(own: Path | None) -> jinja2.Environment:
    paths = ([own] if own else []) + [folder("templates")]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.FileSystemLoader(path) for path in paths]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # no autoescape: this is no HTML; every value goes through `q` or `in_double_quotes`
    environment.filters["q"] = lambda value: shlex.quote(str(value))
    environment.filters["in_double_quotes"] = _in_double_quotes
    return environment


def _in_double_quotes(word: str) -> str:
    """Quote a word of ours in which variables are to be expanded: ``--x="$Y"``."""
    name, _, value = word.partition("=")
    return f'{name}="{value}"' if "$" in value else word


def _guarded(work: Callable[[], T]) -> T:
    try:
        return work()
    except jinja2.TemplateNotFound as error:
        raise UsageError(
            f"template {error.name!r} does not exist", hint="--template FILE"
        ) from None
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"the template is broken: {type(error).__name__}: {error}",
            hint=f"blocks and variables: {folder('templates') / BASE}",
        ) from None
    except jinja2.TemplateError as error:
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise UsageError(
            f"the template is broken{line}: {error.message}",
            hint=f"blocks and variables: {folder('templates') / BASE}",
        ) from None
