"""`JobSpec`: what the user asked for, as one frozen value that every layer takes unchanged."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace

from hpc_ddp.run.errors import UsageError, closest

BACKENDS = ("slurm", "submitit", "local", "allocation")
CONTINUE_BY = ("requeue", "resubmit")
LAUNCHERS = ("torchrun", "srun")
STARTERS = ("srun", "ibrun", "mpirun")
GPU_REQUESTS = ("gpus-per-node", "gres", "gpus-per-task", "none")
# What the workers may be told a notice by. Those that use hpc_ddp.training understand each.
SIGNALS = ("TERM", "INT", "USR1", "USR2")

# The fields that are sbatch options of the same name, and need nothing but to be passed on.
SBATCH_FIELDS = (
    *("nodes", "cpus_per_task", "time", "partition", "account", "qos"),
    *("constraint", "mem", "nodelist", "exclude", "reservation", "array", "dependency"),
    *("mail_type", "mail_user"),
)

# torchrun's own options that are settled by ours, or by what the job finds out itself.
_SETTLED = {
    **dict.fromkeys(
        ("rdzv-", "node-rank", "master-addr", "master-port", "local-addr", "role"),
        "nothing: the job finds its nodes and a free port itself",
    ),
    **dict.fromkeys(("nnodes", "standalone"), "--nodes"),
    "nproc-per-node": "--nproc-per-node, or --gpus-per-node",
    "max-restarts": "--max-restarts",
    "start-method": "nothing: workers are processes of their own",
    **dict.fromkeys(
        ("log-dir", "redirects", "tee", "logs-specs", "local-ranks-filter"),
        "nothing: each rank has a log, see `hpc-ddp logs --rank`",
    ),
    **dict.fromkeys(("module", "m", "no-python", "run-path"), "SCRIPT"),
    **dict.fromkeys(("help", "print-completion"), "torchrun --help, in a shell"),
    "signals-to-handle": "nothing: signals are looked after",
}
_SRUN_SETTLED = (
    *("nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "distribution", "output", "label"),
    *("kill-on-bad-exit", "no-kill", "wait", "overlap"),
)
# Of an array: a site's MaxArraySize is mostly 1,001, and never above 4,000,001.
MOST_TASKS = 100_000
ELASTIC_RESTARTS = 3  # what is left of a group fails too when a peer is gone: that takes one

_TIME = re.compile(r"(?:(?P<d>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?")
_NAME = re.compile(r"\w[\w .+=,@-]{0,99}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A part of a name, in any case, by which its value is taken for a secret.
SECRET_NAME = (
    r"TOKEN(?!IZER|S)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTHORIZATION|COOKIE"
    r"|(?<![^\W_])(?:API|ACCESS|PRIVATE)?_?KEY(?![^\W_])"
)
_TORCHRUN = re.compile(r"--?(?P<name>[a-z][a-z_-]*)(=[\w./:,@%+=-]+)?")
_INDEXES = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+)(?::(?P<step>[1-9]\d*))?)?", re.A)
_PARAMETER = re.compile(r"[A-Za-z_][\w.-]*")
_GPUS = re.compile(r"(?:(?P<type>[\w.-]+):)?(?P<count>\d+)")
_SIGNAL = re.compile(r"(?:[BR]{1,2}:)?(?:SIG)?(?P<name>[A-Z0-9]+)(?:@(?P<seconds>\d{1,5}))?")


@dataclass(frozen=True)
class JobSpec:
    """A job. Field names are Slurm's option names; `validate` has run on every instance.

    Units: `time` is in Slurm's format (``minutes``, ``h:m:s``, ``d-h`` …), and so is `signal`,
    ``NAME@SECONDS`` before the time limit. None leaves a value to the site's Slurm.
    """

    script: str
    args: tuple[str, ...] = ()
    name: str = "job"
    backend: str = "slurm"
    nodes: int | str = 1
    gpus_per_node: str | None = None
    gpu_request: str = "gpus-per-node"
    nproc_per_node: int | None = None
    cpus_per_task: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    mem: str | None = None
    exclusive: bool = False
    nodelist: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    array: str | None = None
    dependency: str | None = None
    mail_type: str | None = None
    mail_user: str | None = None
    sbatch: tuple[str, ...] = ()
    launcher: str = "torchrun"
    starter: str = "srun"
    srun: tuple[str, ...] = ()
    fabric: str = "auto"
    interface: str | None = None
    host_suffix: str = ""
    setup: tuple[str, ...] = ()
    container: str | None = None
    image: str | None = None
    container_tool: str | None = None
    container_options: tuple[str, ...] = ()
    teardown: tuple[str, ...] = ()
    template: str | None = None
    python: str = "python3"
    env: Mapping[str, str] = field(default_factory=dict)
    env_names: tuple[str, ...] = ()
    workdir: str = "."
    signal: str = "TERM@60"
    continue_by: str = "requeue"
    max_requeues: int | None = None
    max_failures: int = 3
    max_restarts: int | None = None
    elastic: bool = False
    torchrun: tuple[str, ...] = ()
    preflight: bool = False
    sweep: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    budget_gpu_hours: float | None = None

    def __post_init__(self) -> None:
        lists = (
            *("args", "sbatch", "srun", "torchrun", "setup", "teardown", "env_names"),
            "container_options",
        )
        for name in lists:  # JSON and TOML have lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.nodes, str) and re.fullmatch(r"\d{1,6}", self.nodes, re.A):
            object.__setattr__(self, "nodes", int(self.nodes))
        sweep = {name: tuple(values) for name, values in self.sweep.items()}
        object.__setattr__(self, "sweep", sweep)
        validate(self)

    @property
    def node_range(self) -> tuple[int, int]:
        """The least and the most nodes that an attempt may start with."""
        if isinstance(self.nodes, int):
            return self.nodes, self.nodes
        least, _, most = self.nodes.partition("-")
        return int(least), int(most)

    @property
    def least_nodes(self) -> int:
        """How many nodes must be left for an attempt to go on; below its own number if elastic."""
        least, most = self.node_range
        return 1 if self.elastic and least == most else least

    @property
    def restarts(self) -> int:
        """torchrun's ``--max-restarts``: as said, else none, or some where nodes may be lost."""
        if self.max_restarts is not None:
            return self.max_restarts
        return ELASTIC_RESTARTS if self.elastic else 0

    @property
    def workers_per_node(self) -> int:
        """torchrun's ``--nproc-per-node``: as said, else one per GPU, else one."""
        return self.nproc_per_node or self.gpu_count or 1

    @property
    def tasks_per_node(self) -> int:
        """Slurm tasks of the training step per node: torchrun, or each worker by itself."""
        return self.workers_per_node if self.launcher == "srun" else 1

    @property
    def gpu_count(self) -> int:
        """GPUs per node; ``gpus_per_node`` may hold a type as well (``a100:4``)."""
        match = _GPUS.fullmatch(self.gpus_per_node or "")
        return int(match["count"]) if match else 0

    @property
    def gpu_type(self) -> str | None:
        """What stands before the number in ``gpus_per_node``."""
        match = _GPUS.fullmatch(self.gpus_per_node or "")
        return match["type"] if match else None

    @property
    def notice_signal(self) -> str:
        """What the workers are told a notice by, as ``TERM``."""
        return parse_signal(self.signal)[0]

    @property
    def warn_s(self) -> int:
        """How long before the time limit they are told, in seconds."""
        return parse_signal(self.signal)[1]

    @property
    def gpus_in_use(self) -> int:
        """What a node of the job takes of a budget: its GPUs, or its workers without any."""
        return self.gpu_count or self.workers_per_node

    @property
    def points(self) -> list[dict[str, str]]:
        """The sweep's combinations of values by name, in the order of the array's indexes.

        Empty for a job that is no sweep.
        """
        if not self.sweep:
            return []
        return [
            dict(zip(self.sweep, each, strict=True))
            for each in itertools.product(*self.sweep.values())
        ]

    def indexes(self, begun: Iterable[int]) -> list[int]:
        """Return the indexes of all tasks of the array, of which some have `begun`.

        Its last submit may have been of some of them only.
        """
        if self.sweep:
            return list(range(len(self.points)))
        return sorted({*begun, *array_indexes(self.array or "")})

    def task(self, index: int) -> JobSpec:
        """Return one task of the array as a job of its own: a sweep's has its point in `args`."""
        args = (*self.args, *point_args(self.points[index])) if self.sweep else self.args
        return replace(self, args=args, sweep={}, array=str(index))

    @property
    def time_s(self) -> int | None:
        """The time limit in seconds, None when it is left to the site."""
        return None if self.time is None else parse_time(self.time)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> JobSpec:
        """Read what `to_json` wrote; unknown fields of a newer version are passed over.

        Raises
        ------
        UsageError
            it is something else
        """
        known = {spec_field.name for spec_field in fields(cls)}
        try:
            return cls(**{key: value for key, value in json.loads(text).items() if key in known})
        except (ValueError, AttributeError, TypeError) as error:
            raise UsageError(f"the run's job.json is broken: {error}") from None


def point_args(point: Mapping[str, str]) -> list[str]:
    """Return a sweep's point as arguments of the script, ``--name=value``."""
    return [f"--{name}={value}" for name, value in point.items()]


def array_indexes(array: str) -> list[int]:
    """Return the indexes of a Slurm array such as ``0-5%2`` or ``1,3,10-20:5``.

    Raises
    ------
    UsageError
        it is something else
    """
    found: list[int] = []
    for part in array.partition("%")[0].split(","):
        match = _INDEXES.fullmatch(part)
        if not match:
            raise UsageError(
                f"array {array!r} is no list of indexes; accepted: numbers and ranges, with commas",
                hint="--array 0-5, or --array 1,3,10-20:5%2",
            )
        first = int(match["first"])
        indexes = range(first, int(match["last"] or first) + 1, int(match["step"] or 1))
        if len(found) + len(indexes) > MOST_TASKS:
            raise UsageError(
                f"array {array!r} has more than {MOST_TASKS:,} tasks",
                hint="what the site takes: scontrol show config | grep MaxArraySize",
            )
        found += indexes
    return found


def parse_time(text: str) -> int:
    """Return the seconds of a Slurm time: ``m``, ``m:s``, ``h:m:s``, ``d-h``, ``d-h:m``, …"""
    match = _TIME.fullmatch(text)
    if not match:
        raise UsageError(
            f"time {text!r} is not a Slurm time; accepted: minutes, h:mm:ss, d-hh, d-hh:mm:ss",
            hint="for twelve hours: --time 12:00:00",
        )
    a, b, c = (int(match[group] or 0) for group in "abc")
    if match["d"] is not None:
        return int(match["d"]) * 86400 + a * 3600 + b * 60 + c
    if match["c"] is not None:
        return a * 3600 + b * 60 + c
    return a * 60 + b


def parse_signal(text: str) -> tuple[str, int]:
    """Return the name and the seconds of a signal in sbatch's form: ``USR1@90``, ``SIGUSR1``, …

    Its ``B:`` and ``R:`` are passed over: a notice always goes to the workers.
    """
    match = _SIGNAL.fullmatch(text.upper())
    name = {"10": "USR1", "12": "USR2", "15": "TERM", "2": "INT"}.get(
        match["name"] if match else ""
    )
    name = name or (match["name"] if match else "")
    if not match or name not in SIGNALS:
        raise UsageError(
            f"signal {text!r} is not of the form NAME@SECONDS;"
            f" accepted names: {', '.join(SIGNALS)}",
            hint="--signal USR1@90",
        )
    return name, int(match["seconds"] or 60)


def validate(spec: JobSpec) -> None:
    """Check each value of a job.

    Raises
    ------
    UsageError
        names the first bad value, what is accepted, and a hint
    """
    _check_texts(spec)
    _check_numbers(spec)
    _choice("backend", spec.backend, BACKENDS)
    _choice("continue-by", spec.continue_by, CONTINUE_BY)
    _choice("launcher", spec.launcher, LAUNCHERS)
    _choice("starter", spec.starter, STARTERS)
    _choice("gpu-request", spec.gpu_request, GPU_REQUESTS)
    parse_signal(spec.signal)
    if not _NAME.fullmatch(spec.name):
        raise UsageError(
            f"job name {spec.name!r} can't be the name of a folder; accepted: up to 100 letters,"
            " digits, spaces and any of . _ + = , @ -, with a letter or digit first",
            hint="--job-name my-training",
        )
    if spec.gpus_per_node is not None and not _GPUS.fullmatch(spec.gpus_per_node):
        raise UsageError(
            f"gpus-per-node {spec.gpus_per_node!r} is neither a number nor type:number",
            hint="--gpus-per-node 4, or --gpus-per-node a100:4",
        )
    if spec.time is not None and parse_time(spec.time) <= 0:
        raise UsageError(f"time {spec.time!r} is no time at all", hint="--time 1:00:00")
    _check_env(spec)
    _check_container(spec)
    _check_torchrun(spec)
    _check_tasks(spec)
    if spec.array:
        array_indexes(spec.array)
        if spec.continue_by == "resubmit":
            raise UsageError(
                "a chain of jobs can't be an array, nor a sweep", hint="--continue-by requeue"
            )
    _check_sweep(spec)


def _check_sweep(spec: JobSpec) -> None:
    for name, values in spec.sweep.items():
        good = all(value and value.isprintable() for value in values)
        if not (_PARAMETER.fullmatch(name) and values and good) or len({*values}) < len(values):
            raise UsageError(
                f"{name}={','.join(values)!r} is no parameter with values that differ and are not"
                " empty",
                hint="hpc-ddp sweep --set lr=1e-3,1e-4 --set seed=0,1,2 train.py",
            )
    count = math.prod(map(len, spec.sweep.values())) if spec.sweep else None
    if count and spec.array and max(array_indexes(spec.array)) >= count:
        raise UsageError(
            f"array {spec.array} goes beyond the sweep; accepted: indexes from 0 to {count - 1}",
            hint="hpc-ddp status SWEEP lists them",
        )
    if spec.sweep and spec.backend == "allocation":
        raise UsageError(
            "a sweep is an array of jobs, and an allocation is one job",
            hint="--backend slurm, or local to play it here",
        )
    hours = spec.budget_gpu_hours
    if hours is not None and not (isinstance(hours, (int, float)) and hours > 0):
        raise UsageError(
            f"budget-gpu-hours is {hours!r}; accepted: a number above 0",
            hint="--budget-gpu-hours 100",
        )


def _check_tasks(spec: JobSpec) -> None:
    """Refuse what srun could not start; `cpus_per_task` is for all workers of a node."""
    for raw in spec.srun:
        name, _ = _split_raw(raw, "srun", "--gpu-bind=closest")
        if name in _SRUN_SETTLED:
            raise UsageError(
                f"srun option --{name} is set by hpc-ddp; accepted: others of srun's",
                hint="nodes, workers and CPUs: --nodes, --nproc-per-node, --cpus-per-task",
            )
    if spec.launcher == "srun" and not isinstance(spec.nodes, int):
        raise UsageError(
            f"nodes is {spec.nodes}, and with --launcher srun Slurm has to know how many tasks"
            " there are; accepted: a whole number",
            hint="--nodes 2, or --launcher torchrun",
        )
    if spec.starter != "srun" and (spec.launcher == "srun" or spec.elastic or spec.srun):
        raise UsageError(
            f"without srun, by {spec.starter}, there are no --launcher srun, --elastic and --srun",
            hint="--starter srun",
        )
    if spec.starter != "srun" and (spec.preflight or spec.backend == "submitit"):
        raise UsageError(
            f"the preflight and submitit need srun, and the starter is {spec.starter}",
            hint="--starter srun, or without --preflight and with --backend slurm",
        )
    if spec.cpus_per_task is not None and spec.cpus_per_task < spec.tasks_per_node:
        raise UsageError(
            f"cpus-per-task {spec.cpus_per_task} is too few for {spec.tasks_per_node} tasks"
            " per node: it counts all CPUs of a node, and each needs one",
            hint=f"--cpus-per-task {spec.tasks_per_node}",
        )


def _check_container(spec: JobSpec) -> None:
    if spec.container and spec.image:
        raise UsageError(
            f"container {spec.container!r} and image {spec.image!r} are two ways to say one thing",
            hint="--image alone, or --container with the whole command",
        )
    try:
        shlex.split(spec.container or "")
    except ValueError as error:
        raise UsageError(
            f"container {spec.container!r} can't be split into words: {error}",
            hint="--container 'apptainer exec --nv image.sif'",
        ) from None


def _check_torchrun(spec: JobSpec) -> None:
    if spec.launcher == "srun" and (spec.torchrun or spec.restarts or spec.elastic):
        raise UsageError(
            "without torchrun there are no --max-restarts, --elastic and --torchrun",
            hint="--launcher torchrun",
        )
    if spec.elastic and spec.restarts < 1:
        raise UsageError(
            "an elastic job restarts its workers when a node is lost, and max-restarts is 0",
            hint="--elastic, without --max-restarts",
        )
    for word in spec.torchrun:
        match = _TORCHRUN.fullmatch(word)
        if not match:
            raise UsageError(
                f"torchrun option {word!r} is not of the form --name or --name=value",
                hint="--torchrun=--numa-binding=node",
            )
        name = match["name"].replace("_", "-")
        for settled, ours in _SETTLED.items():
            if settled.startswith(name) or name.startswith("rdzv-"):  # torchrun takes beginnings
                raise UsageError(
                    f"torchrun option --{name} is set by hpc-ddp; accepted: others of torchrun's",
                    hint=f"in its place: {ours}",
                )


def _check_texts(spec: JobSpec) -> None:
    """Refuse in ``#SBATCH`` values what ends or splits such a line, and NUL everywhere."""
    for name, value in directives(spec):
        if not value.isprintable():
            raise UsageError(
                f"{name} {value!r} has a character that an #SBATCH line can't hold",
                hint=f"leave out line breaks and control characters in --{name}",
            )
    swept = [value for values in spec.sweep.values() for value in values]
    lines = (*spec.setup, *spec.teardown)
    texts = (spec.script, spec.workdir, *spec.args, *lines, *spec.env.values(), *swept)
    for text in texts:
        if "\0" in text or not _is_unicode(text):
            raise UsageError(
                f"{text!r} holds a NUL or bytes that are no UTF-8, which a script can't",
                hint="rename it, or leave those characters out",
            )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # Python's stand-ins for bytes that it could not decode
        return False
    return True


def directives(spec: JobSpec) -> list[tuple[str, str]]:
    """Return the (option, value) pairs that go to sbatch as they are; flags have value ''."""
    pairs = [("job-name", spec.name)]
    for name in SBATCH_FIELDS:
        value = getattr(spec, name)
        if value is not None and name == "cpus_per_task":
            value //= spec.tasks_per_node  # ours counts a node's, and so Slurm's, with one task
        if value is not None:
            pairs.append((name.replace("_", "-"), str(value)))
        if name == "nodes":
            pairs += _gpu_request(spec)
    if spec.exclusive:
        pairs.append(("exclusive", ""))
    return pairs + [_split_raw(raw, "sbatch", "--network=x") for raw in spec.sbatch]


def _gpu_request(spec: JobSpec) -> list[tuple[str, str]]:
    """Return how the site wants to be asked for a node's GPUs."""
    if spec.gpus_per_node is None or spec.gpu_request == "none":
        return []
    if spec.gpu_request == "gres":
        return [("gres", f"gpu:{spec.gpus_per_node}")]
    if spec.gpu_request == "gpus-per-task":
        of_task = str(max(1, spec.gpu_count // spec.tasks_per_node))
        return [("gpus-per-task", f"{spec.gpu_type}:{of_task}" if spec.gpu_type else of_task)]
    return [("gpus-per-node", spec.gpus_per_node)]


def _split_raw(raw: str, command: str, example: str) -> tuple[str, str]:
    if not re.match(r"--[a-z]", raw) or not raw.isprintable():
        raise UsageError(
            f"{command} option {raw!r} is not of the form --name or --name=value",
            hint=f"--{command}={example}",
        )
    name, _, value = raw[2:].partition("=")
    return name, value


def _check_nodes(nodes: int | str) -> None:
    match = re.fullmatch(r"(\d{1,6})-(\d{1,6})", nodes, re.A) if isinstance(nodes, str) else None
    if match and 1 <= int(match[1]) <= int(match[2]):
        return
    if not isinstance(nodes, int) or isinstance(nodes, bool) or not 1 <= nodes < 10**6:
        raise UsageError(
            f"nodes is {nodes}; accepted: a whole number from 1, or a range of them, as 1-4",
            hint="--nodes 1, or --nodes 1-4",
        )


def _check_numbers(spec: JobSpec) -> None:
    _check_nodes(spec.nodes)
    least = {"nproc_per_node": 1, "cpus_per_task": 1}
    least |= {"max_requeues": 0, "max_failures": 0, "max_restarts": 0}
    for name, low in least.items():
        value = getattr(spec, name)
        if value is None:
            continue
        option = name.replace("_", "-")
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise UsageError(
                f"{option} is {value!r}; accepted: a whole number from {low}",
                hint=f"--{option} {max(low, 1)}",
            )


def _choice(name: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise UsageError(
            f"{name} {value!r} is unknown; accepted: {', '.join(accepted)}"
            + closest(value, accepted),
            hint=f"--{name} {accepted[0]}",
        )


def _check_env(spec: JobSpec) -> None:
    for name in (*spec.env, *spec.env_names):
        if not _ENV_NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is not a name of an environment variable",
                hint="--env NAME, or --env NAME=VALUE",
            )
    for name in spec.env:
        if re.search(SECRET_NAME, name, re.I):
            raise UsageError(
                f"the value of {name} looks like a secret and would stand in the job's script",
                hint=f"export {name} in your shell, then --env {name}",
            )
