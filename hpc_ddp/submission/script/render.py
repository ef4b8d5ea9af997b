"""The batch script: a template with named blocks, filled from a `JobSpec`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_ddp import __version__
from hpc_ddp.core.attempt_env import AWAY_S, installed_python, options_of_variables
from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.option_checks import mpirun_words
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.slurm_options import NODE_BY_NODE, as_pairs
from hpc_ddp.core.job.sweep import trial_args
from hpc_ddp.core.job.variables import (
    OF_FIRST_JOB,
    SECRET_NAME_OF_BASH,
    URL_WITH_PASSWORD_OF_BASH,
    array_exports,
    is_of_worker,
    names_in,
)
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.slurm_text import parse_options
from hpc_ddp.submission.script import container, template_sandbox
from hpc_ddp.submission.script.directives import header_pairs, output_file, output_word, sbatch_line
from hpc_ddp.submission.script.overridden_options import (
    check_effect,
    check_inherited,
    find_unused_words,
    keep_options,
)
from hpc_ddp.submission.script.shell_lines import check_shell_lines
from hpc_ddp.submission.script.torchrun import torchrun_options
from hpc_ddp.submission.settings.fabric_profiles import fabric_env

# No limit on how long srun waits for the other nodes once the first has ended well: rank 0 may
# evaluate and export for long. A site's own WaitTime would end it. Failed nodes end the others.
WAIT_S = 0


def step_options(spec: JobSpec, header: Sequence[tuple[str, str]]) -> list[str]:
    """Return the options of srun for the step, ``--name=value``, without those for its size.

    Where each task is a worker, ranks go node by node, as under torchrun: by the job's own
    ``--distribution``, of `header`, if it does that, since an option of srun goes before it.

    With ``--overlap`` the step shares the job's CPUs with steps that run already (a `srun --pty
    bash`, a preflight whose end Slurm is still cleaning up): else srun would wait for them without
    end. Under torchrun srun sets up no MPI: its settings are for one task of a node, and must not
    reach all workers that torchrun starts on the node.
    """
    # A failed task must not end an elastic step: the supervisors end it, where it has to end.
    end = ["--kill-on-bad-exit=0", "--no-kill"] if spec.elastic else ["--kill-on-bad-exit=1"]
    mpi = ["--mpi=none"] if spec.launcher == "torchrun" else []
    of_job = dict(header).get("distribution", "")
    distribution = of_job if NODE_BY_NODE.fullmatch(of_job) else "block"
    order = [] if spec.launcher == "torchrun" else [f"--distribution={distribution}"]
    return [*order, *end, f"--wait={WAIT_S}", "--overlap", *mpi]


def program_words(spec: JobSpec, run: RunFolder, script: Path) -> list[str]:
    """Return the words behind the job's Python that start its program, without the program's
    arguments. `script` is the path of the script as the job sees it. For a module only its folder
    is used, which is searched first for the module; for a command it is not used."""
    starter = str(run.lib / "hpc_ddp" / "node" / "workers" / "program.py")
    if spec.module:
        return [starter, "module", str(script.parent), spec.script]
    return [starter, "command", spec.script] if spec.no_python else [str(script)]


def node_command(spec: JobSpec, run: RunFolder, script: Path) -> tuple[str, list[str]]:
    """Return what the supervisor of a task starts: the kind of launch (``worker`` or ``torchrun``),
    and the command's words, without the arguments of the program. `script` is that of
    `program_words`."""
    words = program_words(spec, run, script)
    if spec.launcher != "torchrun":
        return "worker", [spec.python, *words]
    node = str(run.lib / "node.py")
    return "torchrun", [spec.python, "-u", node, "elastic_agent", *torchrun_options(spec), *words]


def job_env(spec: JobSpec) -> dict[str, str]:
    """Return the variables that the script sets for the job, by name: those of the fabric, and
    those of ``env``, which go first. Variables that ``without`` names are left out.

    A job of one node gets none of the fabric's: it needs none, and some fabrics are not set up for
    such a job (Slingshot on Frontier). Raise UsageError for an unknown fabric, and for a broken
    profile.
    """
    fabric = fabric_env(spec.fabric)
    env = {**(fabric if spec.node_range[1] > 1 else {}), **spec.env}
    return {name: text for name, text in env.items() if name not in spec.without}


def node_env(spec: JobSpec) -> dict[str, str]:
    """Return the variables, by name, from which supervisors and workers learn what to do before the
    program: their set-up lines, the names of ``--expand``, and `names_filled_by_workers`. An empty
    variable is left out."""
    texts = {
        "HPC_DDP_NODE_SETUP": _setup_text(spec.node_setup, spec),
        "HPC_DDP_WORKER_SETUP": _setup_text(spec.worker_setup, spec),
        "HPC_DDP_EXPAND": " ".join(spec.expand),
        "HPC_DDP_EXPAND_ENV": " ".join(names_filled_by_workers(spec)),
    }
    return {name: text for name, text in texts.items() if text}


def _setup_text(lines: Sequence[str], spec: JobSpec) -> str:
    """Return the text of a node's or a worker's set-up `lines`, without those that ``without``
    takes out, and with lines behind them that pass on the arrays of ``--expand``. Return '' where
    none of `lines` remains."""
    remaining = [line for line in lines if line not in spec.without]
    return "\n".join([*remaining, array_exports(spec.expand)] if remaining else []).rstrip("\n")


def names_filled_by_workers(spec: JobSpec) -> list[str]:
    """Return the names of those variables of ``env`` whose texts each worker fills in, in place of
    the batch script: the texts contain a variable that differs between workers."""
    return [
        name
        for name, text in spec.env.items()
        if any(map(is_of_worker, names_in(text, spec.expand)))
    ]


class Rendering:
    """A job's script, whole or by block; `code` and `script` are the paths of the code and of the
    program that the job runs.

    Attributes
    ----------
    environment, entry
        the variables of `job_env`, and the job's `container.Entry`
    header
        all (option, value) pairs for sbatch that ``without`` does not take out; also options that
        variables of sbatch in this shell set (SBATCH_…)
    srun
        the user's raw options of srun that ``without`` does not take out

    Raises
    ------
    UsageError
        the run's path, or one to mount, has a character that the script can't hold; an option or a
        variable is refused, or would have no effect (`check_effect`); bash can't read a set-up
        line; or there is no such fabric or container tool, or its file is broken. The methods raise
        it where the user's template is missing or broken (with file and line), or may not act for
        the user
    """

    def __init__(self, spec: JobSpec, run: RunFolder, code: Path, script: Path) -> None:
        if {":", "\\"} & set(str(run.path)) or not str(run.path).isprintable():
            raise UsageError(
                f"the run folder {str(run.path)!r} has a colon, which PYTHONPATH can't hold,"
                " or a backslash or control character, which the name of Slurm's output can't",
                hint="--runs-dir, without them",
            )
        self._spec = spec
        self.environment = job_env(spec)
        self.entry = container.make_entry(spec, run.whole, code)
        header = header_pairs(spec, run, self.entry.sbatch)
        self.header = keep_options(spec, header)
        self.header += options_of_variables(os.environ, dict(self.header))
        of_step = as_pairs(step_options(spec, self.header))
        srun = [*of_step, *as_pairs((*spec.srun, *self.entry.srun))]
        check_effect(spec, header, srun)
        check_inherited(spec, self.header, srun)
        check_shell_lines(spec)
        self.srun = [word for word in spec.srun if keep_options(spec, as_pairs([word]))]
        env = (*fabric_env(spec.fabric), *spec.env)
        self._unused_words = find_unused_words(spec, [*header, *as_pairs(spec.srun)], env)
        self._context = self._make_context(run, code, script)

    def _make_context(self, run: RunFolder, code: Path, script: Path) -> dict[str, Any]:
        """Return the template's variables, by name (docs/templates.md). Raise UsageError where
        `_names_of_step` does."""
        spec = self._spec
        return {
            "version": __version__,
            "directives": [sbatch_line(name, value) for name, value in self.header],
            "run": str(run.path),
            "whole": str(run.whole),
            "code": str(code),
            "host_suffix": spec.host_suffix,
            "interface": spec.interface or "",
            "env": {**self.environment, **node_env(spec)},
            "batch_env": self.environment.keys() - names_filled_by_workers(spec),
            "expand": spec.expand,
            "exports": [name for name in spec.expand if not name.endswith("]")],
            "array_exports": array_exports(spec.expand),
            "step_names": self._names_of_step(),
            "workdir": spec.chdir,
            "output": output_word(output_file(spec, run), spec.chdir),
            "outputs": [
                output_word(pattern, spec.chdir)
                for pattern in dict.fromkeys(filter(None, (spec.output, spec.error)))
            ],
            "setup": [line for line in spec.setup if line not in spec.without],
            "setup_names": [
                name for name in OF_FIRST_JOB if any(name in line for line in spec.setup)
            ],
            "away_s": int(AWAY_S),
            "secret_names": SECRET_NAME_OF_BASH,
            "secret_urls": URL_WITH_PASSWORD_OF_BASH,
            "teardown": spec.teardown,
            "host_python": installed_python(),
            "python": spec.python,
            # A Python that exists here is on a disk that the nodes share, and not in a container:
            # the script waits for it.
            "awaits_python": os.path.isabs(spec.python) and os.access(spec.python, os.X_OK),
            "workers": spec.workers_per_node,
            "tasks_per_node": spec.tasks_per_node,
            "launcher": spec.launcher,
            "continue_by": spec.continue_by,
            "step_launcher": spec.step_command,
            "mpirun": mpirun_words(spec.mpirun),
            "srun": container.join_lists((*self.srun, *self.entry.srun)),
            "without": spec.without,
            "step_options": step_options(spec, self.header),
            "torchrun_options": torchrun_options(spec),
            "script": str(script),
            "program": program_words(spec, run, script),
            "args": spec.args,
            "is_array": bool(spec.array),
            "trials": [trial_args(trial, spec.args) for trial in spec.trials],
            "preflight": spec.preflight,
            # The launch has to wait for the preflight there; submitit's line does not, and a user's
            # template may not.
            "agents_take_part": spec.preflight
            and spec.launcher == "torchrun"
            and not (spec.backend == "submitit" or spec.template),
            "stage": spec.stage,
            "container": self.entry.command,
            "container_srun": self.entry.srun,
        }

    def _names_of_step(self) -> list[str]:
        """Return the names of ``--expand`` in the command of the step, where the batch script fills
        them in: in options of srun, and in the container's words. Raise UsageError for a variable
        there that only a worker knows, and for any in the container's options of sbatch."""
        entry, expand = self.entry, self._spec.expand
        words = (*self._spec.srun, *entry.srun, *entry.command)
        names = [name for word in words for name in names_in(word, expand)]
        of_sbatch = [name for word in entry.sbatch for name in names_in(word, expand)]
        if of_sbatch:
            raise UsageError(
                f"the options of sbatch can't have ${of_sbatch[0]}: sbatch fills in no variable of"
                " --expand; accepted: an image and container options without variables",
                hint=f"write the value in place of ${of_sbatch[0]}",
            )
        if bad := next((name for name in names if is_of_worker(name)), None):
            raise UsageError(
                f"the image, the container and the options of srun can't have ${bad}: it is not"
                " known before the step starts; accepted: a variable of the batch script",
                hint="--expand SLURM_JOB_ID, or one that a set-up line sets",
            )
        return list(dict.fromkeys(names))

    def text(self) -> str:
        """Return the text of the whole script; raise UsageError for a user's template that can't be
        used."""
        return template_sandbox.render(self._spec.template, self._context)

    def warnings(self) -> list[str]:
        """Return sentences on the words of ``without`` that name nothing of the job, and on what a
        user's template leaves out, with the consequences. Raise UsageError where `text` does."""
        sentences = [
            f"without has {word!r}, and the job has no such thing" for word in self._unused_words
        ]
        if not self._spec.template:
            return sentences
        text = self.text()
        options = parse_options(text)
        missing = [
            sbatch_line(*pair).removeprefix("#SBATCH ")
            for pair in self.header
            if pair[0] not in options
        ]
        if missing:
            sentences.append(
                f"the template leaves out {' '.join(missing)}; {{{{ super() }}}} has them"
            )
        return [*sentences, *template_sandbox.find_missing_words(text)]

    def block(self, name: str) -> str:
        """Return the text of the script's block `name`. Raise UsageError where `text` does, and
        for a template that has no such block."""
        return template_sandbox.render_block(name, self._spec.template, self._context)
