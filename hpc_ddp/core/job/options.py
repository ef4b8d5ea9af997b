"""The options of a job: `JobSpec` declares each once, and every layer takes it unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_io import parse_object
from hpc_ddp.core.job import option_checks
from hpc_ddp.core.job.option_declaration import (
    COMMON,
    CONTINUATION,
    ENVIRONMENT,
    WORKERS,
    option,
    options_of,
)
from hpc_ddp.core.job.resource_options import ResourceOptions
from hpc_ddp.core.job.slurm_values import array_indexes, limit_seconds, parse_signal, parse_time
from hpc_ddp.core.job.sweep import trial_args, trials

LAUNCHERS = ("torchrun", "srun", "ibrun", "mpirun")
STEP_LAUNCHERS = ("srun", "ibrun", "mpirun")
CONTINUE_BY = ("requeue", "resubmit")

# When an elastic job loses a node, the workers of the others fail too: that takes a restart.
ELASTIC_RESTARTS = 3


@dataclass(frozen=True)
class JobSpec(ResourceOptions):
    """A job. Fields that Slurm has options for have the options' names. Making a job checks it: a
    value that is refused raises UsageError.

    `time` is in Slurm's format (``minutes``, ``h:m:s``, ``d-h`` …), and so is `signal`,
    ``NAME@SECONDS`` before the time limit. None leaves a value to the site's Slurm.
    """

    launcher: str = option(
        "torchrun",
        "The launcher of the workers (default torchrun); with another one each is a task of it.",
        group=WORKERS,
        accepted=LAUNCHERS,
        is_local=True,
    )
    step_launcher: str = option(
        "srun",
        "The command that starts torchrun on each node (default srun).",
        group=WORKERS,
        accepted=STEP_LAUNCHERS,
    )
    srun: tuple[str, ...] = option(
        (),
        "Any option of srun for the training's step, as --srun=--cpu-bind=none; repeatable.",
        group=WORKERS,
        metavar="OPTION",
        is_joined=True,
    )
    mpirun: tuple[str, ...] = option(
        (),
        "Any options of mpirun or ibrun, as --mpirun='--mca pml ob1'; repeatable.",
        group=WORKERS,
        metavar="OPTIONS",
        is_joined=True,
    )
    fabric: str = option(
        "auto",
        "The interconnect (default: looked up on the nodes).",
        group=ENVIRONMENT,
        metavar="NAME",
    )
    interface: str | None = option(
        None, "Network interface (default: looked up).", group=ENVIRONMENT, metavar="NAME"
    )
    host_suffix: str = option(
        "",
        "Suffix of a node's name on the fast network, as -ib.",
        group=ENVIRONMENT,
        is_file_only=True,
    )
    setup: tuple[str, ...] = option(
        (),
        "A shell line to run before the job, as 'module load cuda'; repeatable.",
        group=COMMON,
        metavar="LINE",
        is_joined=True,
    )
    node_setup: tuple[str, ...] = option(
        (),
        "A shell line to run on each node, in the container, before its workers; repeatable.",
        group=ENVIRONMENT,
        metavar="LINE",
        is_joined=True,
        is_local=True,
    )
    worker_setup: tuple[str, ...] = option(
        (),
        "A shell line to run in each worker, which has its RANK, before the program; repeatable.",
        group=ENVIRONMENT,
        metavar="LINE",
        is_joined=True,
        is_local=True,
    )
    container: str | None = option(
        None,
        "The command that enters a container, as 'apptainer exec --nv image.sif'.",
        group=ENVIRONMENT,
        metavar="COMMAND",
    )
    image: str | None = option(
        None, "A container image, for the site's tool.", group=ENVIRONMENT, metavar="IMAGE"
    )
    container_tool: str | None = option(
        None,
        "The site's tool for --image: a file of templates/containers.",
        group=ENVIRONMENT,
        is_file_only=True,
    )
    gpu_vendor: str | None = option(
        None,
        "The make of the GPUs, for the option that brings them into a container.",
        group=ENVIRONMENT,
        accepted=("nvidia", "amd"),
        is_file_only=True,
    )
    container_options: tuple[str, ...] = option(
        (),
        "A further option of the container's tool, as --container-options=--nv; repeatable.",
        group=ENVIRONMENT,
        metavar="OPTION",
    )
    teardown: tuple[str, ...] = option(
        (), "Shell lines to run after the training.", group=ENVIRONMENT, is_file_only=True
    )
    template: str | None = option(
        None, "A template that extends job.sbatch.j2.", group=ENVIRONMENT, metavar="FILE"
    )
    notify: str | None = option(
        None,
        "A file (mode 0600) with mail, webhook or command, for messages of the run's end.",
        group=CONTINUATION,
        metavar="FILE",
        is_local=True,
    )
    python: str = option(
        "python3", "The Python that has torch.", group=COMMON, metavar="PATH", is_local=True
    )
    env: Mapping[str, str] = option(
        {},
        "NAME: passed on from this shell (secrets too). NAME=VALUE: written into the script.",
        group=COMMON,
        metavar="NAME[=VALUE]",
        is_local=True,
    )
    expand: tuple[str, ...] = option(
        (),
        "$NAME in arguments, env, image and container is the job's value of this variable;"
        " repeatable. 'NAME[@]': all elements of an array, in arguments. All else is literal.",
        group=ENVIRONMENT,
        metavar="NAME",
        is_local=True,
        is_joined=True,
    )
    without: tuple[str, ...] = option(
        (),
        "What a site or hpc-ddp adds and the job is not to have: --requeue, a variable, a set-up"
        " line.",
        group=ENVIRONMENT,
        is_file_only=True,
        is_joined=True,
    )
    env_names: tuple[str, ...] = option(
        (),
        "Variables to pass on from the shell that submits, as --env NAME.",
        group=ENVIRONMENT,
        is_file_only=True,
    )
    chdir: str = option(
        ".", "Working directory (default: this one).", group=ENVIRONMENT, letter="D", metavar="DIR"
    )
    signal: str = option(
        "TERM@60",
        "Signal the script S seconds before the time limit (default TERM@60).",
        group=CONTINUATION,
        metavar="SIGNAL[@S]",
    )
    continue_by: str = option(
        "requeue",
        "How a job continues: requeue, or a chain of jobs where that is refused.",
        group=CONTINUATION,
        accepted=CONTINUE_BY,
    )
    resume_args: str = option(
        "",
        "Arguments that SCRIPT gets in addition from the second start on, as '--resume last.pt'.",
        group=CONTINUATION,
        metavar="ARGS",
    )
    resume_if: str = option(
        "",
        "With --resume-args: they are left out unless this file exists, which may be a pattern.",
        group=CONTINUATION,
        metavar="PATH",
    )
    max_requeues: int | None = option(
        None, "Bound on requeues; 0: start once (default: none).", group=CONTINUATION, least=0
    )
    max_failures: int = option(
        3, "Retries since the newest save (default 3).", group=CONTINUATION, least=0
    )
    max_restarts: int | None = option(
        None, "Restarts of all workers within an attempt (default 0).", group=CONTINUATION, least=0
    )
    elastic: bool = option(False, "Continue without a node that is lost.", group=CONTINUATION)
    stage: bool = option(
        False,
        "From the second attempt on, start Python from a copy on each node.",
        group=ENVIRONMENT,
        is_local=True,
    )
    warm_start: bool = option(  # the help is that of --no-warm-start
        True, "Have each worker import torch by itself.", group=WORKERS, is_local=True
    )
    torchrun: tuple[str, ...] = option(
        (),
        "Any other option of torchrun, as --torchrun=--numa-binding=node; repeatable.",
        group=WORKERS,
        metavar="OPTION",
    )
    preflight: bool = option(False, "Check the nodes first, and avoid bad ones.", group=WORKERS)
    sweep: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    submit_dir: str = ""  # the folder of the first submit
    budget_gpu_hours: float | None = option(
        None, "Start and requeue no more once these are used.", group=CONTINUATION, metavar="HOURS"
    )

    def __post_init__(self) -> None:
        """Turn lists into tuples, and digits for `nodes` into a number; then check all values.

        Raise UsageError for the first bad one. A value of another type than its field's may raise
        another error, such as TypeError.
        """
        for key, declared in OPTIONS.items():
            if declared.kind.is_list:  # a tuple, and JSON and TOML have lists
                name = key.replace("-", "_")
                object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "args", tuple(self.args))
        if isinstance(self.nodes, str) and re.fullmatch(r"\d{1,6}", self.nodes, re.A):
            object.__setattr__(self, "nodes", int(self.nodes))
        sweep = {name: tuple(values) for name, values in self.sweep.items()}
        object.__setattr__(self, "sweep", sweep)
        option_checks.check(self)

    @property
    def program(self) -> Path:
        """The script's path; for a module or a command a path in the working directory."""
        return Path(self.chdir) / self.script

    @property
    def module_file(self) -> Path | None:
        """The file of the module in the working directory; None for another program, and for a
        module that is not there, which has to be installed on the nodes."""
        path = Path(self.chdir, *self.script.split("."))
        files = (path.with_suffix(".py"), path / "__main__.py")
        return next((file for file in files if self.module and file.is_file()), None)

    @property
    def node_range(self) -> tuple[int, int]:
        """The smallest and the largest number of nodes with which an attempt may start."""
        if isinstance(self.nodes, int):
            return self.nodes, self.nodes
        least, _, most = self.nodes.partition("-")
        return int(least), int(most)

    @property
    def least_nodes(self) -> int:
        """The fewest nodes with which an attempt goes on; 1 if it is elastic, without a range."""
        least, most = self.node_range
        return 1 if self.elastic and least == most else least

    @property
    def restarts(self) -> int:
        """torchrun's ``--max-restarts``; by default 0, `ELASTIC_RESTARTS` for an elastic job."""
        if self.max_restarts is not None:
            return self.max_restarts
        return ELASTIC_RESTARTS if self.elastic else 0

    @property
    def workers_per_node(self) -> int:
        """torchrun's ``--nproc-per-node``; its default is one per GPU, or one."""
        return self.nproc_per_node or self.gpu_count or 1

    @property
    def tasks_per_node(self) -> int:
        """Slurm tasks of the training step per node: torchrun, or each worker by itself."""
        return 1 if self.launcher == "torchrun" else self.workers_per_node

    @property
    def step_command(self) -> str:
        """The command that starts the tasks of the training's step: srun, ibrun or mpirun."""
        return self.step_launcher if self.launcher == "torchrun" else self.launcher

    @property
    def task_cpus(self) -> int | None:
        """CPUs of each Slurm task; None leaves them to the site."""
        if self.cpus_per_node is None:
            return self.cpus_per_task
        return self.cpus_per_node // self.tasks_per_node

    @property
    def gpu_count(self) -> int:
        """GPUs per node, 0 without any; ``gpus_per_node`` may hold a type as well (``a100:4``)."""
        match = option_checks.GPUS.fullmatch(self.gpus_per_node or "")
        return int(match["count"]) if match else 0

    @property
    def gpu_type(self) -> str | None:
        """The GPUs' type in ``gpus_per_node``, None without one."""
        match = option_checks.GPUS.fullmatch(self.gpus_per_node or "")
        return match["type"] if match else None

    @property
    def notice_signal(self) -> str:
        """The name of the signal by which the workers get a notice, as ``TERM``."""
        return parse_signal(self.signal)[0]

    @property
    def warn_s(self) -> int:
        """The seconds before the time limit at which the workers get a notice."""
        return parse_signal(self.signal)[1]

    @property
    def gpus_in_use(self) -> int:
        """The number of GPUs of a node that count against a budget; without GPUs the workers of a
        node."""
        return self.gpu_count or self.workers_per_node

    @property
    def trials(self) -> list[dict[str, str]]:
        """The sweep's trials, as `sweep.trials` returns them."""
        return trials(self.sweep)

    def indexes(self, begun: Iterable[int]) -> list[int]:
        """Return the indexes of all tasks of the array, sorted: those of `array`, which the last
        submit may have cut down, and those that have `begun`. A sweep has an index for each trial.
        Raise UsageError for a job that is neither."""
        if self.sweep:
            return list(range(len(self.trials)))
        return sorted({*begun, *array_indexes(self.array or "")})

    def task(self, index: int) -> JobSpec:
        """Return task `index`, from 0, of the array as a job of its own; in a sweep its `args` have
        the trial. Raise IndexError beyond the last trial."""
        args = (*self.args, *trial_args(self.trials[index], self.args)) if self.sweep else self.args
        return replace(self, args=args, sweep={}, array=str(index))

    @property
    def time_s(self) -> int | None:
        """The time limit in seconds; None when it is left to the site, and for no limit."""
        return None if self.time is None else limit_seconds(self.time)

    @property
    def time_min_s(self) -> int | None:
        """The least limit that an attempt may get, in seconds; None where only `time` is a
        limit."""
        return None if self.time_min is None else parse_time(self.time_min)

    @property
    def parts_of_time(self) -> int:
        """The number of attempts of the least limit that last as long as an attempt of the time
        limit, rounded up; 1 without one of the limits."""
        whole_s, part_s = self.time_s or 0, self.time_min_s or self.time_s or 1
        return -(-whole_s // part_s) or 1  # -(-a // b) is a / b, rounded up

    def to_json(self) -> str:
        """Return the job as the text of a ``job.json``."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> JobSpec:
        """Return the job of a text that `to_json` has made; unknown fields of a newer version are
        ignored. Raise UsageError where it is no JSON object, lacks a field, or has a value that is
        refused."""
        try:
            return cls(**{key: value for key, value in parse_object(text).items() if key in FIELDS})
        except UsageError:
            raise
        except Exception as error:  # a value of another type fails in many ways
            raise UsageError(f"the run's job.json is broken: {error}") from None


FIELDS = {field.name for field in fields(JobSpec)}
OPTIONS = options_of(JobSpec)
