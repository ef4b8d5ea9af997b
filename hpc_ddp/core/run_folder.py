"""Every path of a run, in one place.

::

    <runs>/<name>/<run id>/
        job.json job.sbatch          what was asked for, and the script that runs
        code/<n>/                    the snapshot of the n-th submit
        lib/hpc_ddp/                 the node-side part of hpc-ddp, so that no upgrade and no
                                     environment on the nodes can get in between
        journal/<writer>.jsonl
        logs/slurm.out
        logs/attempt-<k>/attempt.json, notice, failed, fabric
        logs/attempt-<k>/<node>/rank-<r>.log, agent.log, printed, notice, record.json,
                                (where each worker is a task: notice-<r>, record-<r>.json, …)
                                and of a hang stack-rank-<r>.txt, flight-rank-<r>
        checkpoints/step-<n>/
        tensorboard/
        export/model.safetensors, model.pt2
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError, UsageError
from hpc_ddp.core.journal.journal import Event, Journal, is_finished, node_seconds, read_events
from hpc_ddp.core.retry import patiently

_RANK_MARK = re.compile(r"^\[rank\d+\]: ?", re.M)


@dataclass(frozen=True)
class NodeFolder:
    """One node's part of an attempt, as the supervisor sees it that is a Slurm task there: of all
    the node's workers, or of `rank` alone."""

    path: Path
    rank: int | None = None

    @property
    def notice(self) -> Path:
        """Written by the supervisor, and only by it: the workers' signal was a notice."""
        return self.path / f"notice{self._task}"

    @property
    def record(self) -> Path:
        """How this node's torchrun, or this task's worker, ended, as JSON."""
        return self.path / f"record{self._task}.json"

    @property
    def failures(self) -> Path:
        """Which workers failed, as torchrun has told the supervisor; or why there are none."""
        return self.path / f"failures{self._task}.json"

    @property
    def printed(self) -> Path:
        """When which rank's log had which size: lines of unix seconds, rank and bytes."""
        return self.path / f"printed{self._task}"

    @property
    def _task(self) -> str:
        return "" if self.rank is None else f"-{self.rank}"

    def pids(self) -> list[Path]:
        """Return the files with the process ids of the workers that have started."""
        return list(self.path.glob(f"rank-{'*' if self.rank is None else self.rank}.pid"))

    def records(self) -> list[Path]:
        """Return what the node's tasks have recorded so far."""
        return sorted(self.path.glob("record*.json"))

    @property
    def agent_log(self) -> Path:
        return self.path / "agent.log"

    def rank_log(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.log"

    def stacks(self, rank: int) -> Path:
        """Where each thread of a rank was when it hung; empty if it ended otherwise."""
        return self.path / f"stack-rank-{rank}.txt"

    def flight(self, rank: int) -> Path:
        """The last collectives of a rank that hung; torch's ``torchfrtrace`` compares them."""
        return self.path / f"flight-rank-{rank}"


@dataclass(frozen=True)
class AttemptFolder:
    """One start of a run, ``logs/attempt-<k>``."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name.removeprefix("attempt-"))

    @property
    def info(self) -> dict[str, Any]:
        """The job of the attempt (``job_id``, ``restarts``), or its process (``host``, ``pid``);
        and the names of its nodes, ``nodes``."""
        return read_json(self.path / "attempt.json")

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of the attempt's nodes, in the order of the ranks.

        Raises OSError where the disk is away for longer than `patiently` waits.
        """
        return tuple(json.loads(patiently((self.path / "attempt.json").read_text))["nodes"])

    @property
    def notice(self) -> Path:
        """Holds a word once the batch shell has one to pass on; empty before.

        It exists from the start: opening a file that exists asks an NFS server for its
        newest content, while a look-up of a missing name may be answered from a cache.
        """
        return self.path / "notice"

    @property
    def end_time(self) -> Path:
        """Holds the end of the job's time in unix seconds, once Slurm has another one than at the
        attempt's start; empty before (see `notice`)."""
        return self.path / "end-time"

    @property
    def failed(self) -> Path:
        """Holds the name of a node whose workers failed; empty before (see `notice`)."""
        return self.path / "failed"

    @property
    def fabric(self) -> Path:
        """Holds the interconnect that the first node has found; empty before (see `notice`)."""
        return self.path / "fabric"

    @property
    def secret(self) -> Path:
        """Holds what the attempt's agents sign with; its owner alone may read it."""
        return self.path / "secret"

    @property
    def port_taken(self) -> Path:
        return self.path / "port-taken"

    def node(self, name: str, rank: int | None = None) -> NodeFolder:
        return NodeFolder(self.path / name, rank)

    def nodes(self) -> list[NodeFolder]:
        return [NodeFolder(path) for path in sorted(self.path.iterdir()) if path.is_dir()]

    def records(self) -> list[dict[str, Any]]:
        """Return what the nodes, or their tasks, have recorded of their ends so far."""
        records = [read_json(path) for node in self.nodes() for path in node.records()]
        return [record for record in records if "code" in record]


@dataclass(frozen=True)
class RunFolder:
    """One job's life on disk, stable across requeues. `path` is absolute."""

    path: Path

    @property
    def is_task(self) -> bool:
        """Whether it is one task's of an array, in the array's folder."""
        return self.path.name.startswith("task-")

    @property
    def whole(self) -> Path:
        """The array's folder for a task of it, else the run's own."""
        return self.path.parent if self.is_task else self.path

    @property
    def index(self) -> int:
        """A task's index in its array."""
        return int(self.path.name.removeprefix("task-"))

    def task(self, index: int) -> RunFolder:
        """The folder of one task of an array."""
        return RunFolder(self.path / f"task-{index}")

    @property
    def newest_code(self) -> Path | None:
        """The last snapshot that was taken of its code; a task's is that of the array."""
        snapshots = [p for p in RunFolder(self.whole).code.glob("*") if p.name.isdecimal()]
        return max(snapshots, key=lambda path: int(path.name), default=None)

    def tasks(self) -> list[RunFolder]:
        """Return the tasks of an array that have begun, by index; none for another run."""
        tasks = [RunFolder(path) for path in self.path.glob("task-*") if path.name[5:].isdecimal()]
        return sorted(tasks, key=lambda task: task.index)

    @property
    def id(self) -> str:
        return str(self.path.relative_to(self.whole.parent))

    @property
    def name(self) -> str:
        return self.whole.parent.name

    @property
    def root(self) -> Path:
        """``<runs>``, which this run and its index lie in."""
        return self.whole.parent.parent

    @property
    def job_json(self) -> Path:
        return self.path / "job.json"

    @property
    def limits_json(self) -> Path:
        """The operators' limits for a run, by key."""
        return self.path / "limits.json"

    @property
    def most_requeues(self) -> float:
        """How often the operators let this run be requeued, inf without such a limit."""
        most = read_json(RunFolder(self.whole).limits_json).get("max-requeues")
        return math.inf if most is None else most

    @property
    def script(self) -> Path:
        return self.path / "job.sbatch"

    @property
    def lib(self) -> Path:
        return self.path / "lib"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def journal_folder(self) -> Path:
        return self.path / "journal"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def slurm_out(self) -> Path:
        return self.logs / "slurm.out"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def cancelled(self) -> Path:
        """Exists once the user has cancelled the run: nothing may requeue it after that."""
        return self.path / "cancelled"

    @property
    def early_links(self) -> Path:
        """The jobs of a chain that ended in their set-up lines, each with the job it had queued."""
        return self.path / "early-links.json"

    def make(self, is_new: bool = False) -> RunFolder:
        """Create the folder, private to the user, and what must exist before the job starts.

        Raises
        ------
        FileExistsError
            `is_new`, and another submit has made the folder
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(exist_ok=not is_new, mode=0o700)
        self.path.chmod(0o700)
        for folder in (self.journal_folder, self.logs, self.checkpoints):
            folder.mkdir(exist_ok=True, mode=0o755)
        return self

    def journal(self, writer: str, attempt: int = 0) -> Journal:
        return Journal(self.journal_folder, writer, attempt)

    def events(self) -> list[Event]:
        return read_events(self.journal_folder)

    def job_ids(self, events: Sequence[Event]) -> list[str]:
        """Return all job ids of the run, oldest first, a chain's waiting link included.

        `events` is its journal, which whoever asks has read already, or reads for this.
        """
        ids = [event["job_id"] for event in events if event.get("job_id")]
        ids += [read_json(a.path / "next.json").get("job_id") for a in self.attempts()]
        ids += read_json(self.early_links).values()
        return list(dict.fromkeys(id for id in ids if id and isinstance(id, str)))

    def finished(self) -> bool:
        """Tell whether the run has reached its end, so that there is nothing to go on with."""
        return is_finished(self.events())

    def gpu_hours(self, gpus_per_node: int, now: float | None = None) -> float:
        """Return what the run, or all tasks of its array together, has used so far.

        Parameters
        ----------
        gpus_per_node
            GPUs of each node; workers, for a run without GPUs
        now
            unix time of the end of the attempts that go on; None: their last event
        """
        runs = RunFolder(self.whole).tasks() or [self]
        return sum(node_seconds(run.events(), now) for run in runs) * gpus_per_node / 3600

    def attempt(self, number: int) -> AttemptFolder:
        return AttemptFolder(self.logs / f"attempt-{number}")

    def attempts(self) -> list[AttemptFolder]:
        """Return the attempts so far, oldest first."""
        attempts = [
            AttemptFolder(path) for path in self.logs.glob("attempt-*") if _is_attempt(path)
        ]
        return sorted(attempts, key=lambda attempt: attempt.number)

    def claim_attempt(
        self, info: dict[str, Any], is_live: Callable[[dict[str, Any]], bool]
    ) -> AttemptFolder:
        """Take the next attempt's number for the caller, whoever else tries at the same time.

        Parameters
        ----------
        info
            who the caller is; kept in ``attempt.json``
        is_live
            tells from such an `info` whether that attempt still runs

        Raises
        ------
        HpcDdpError
            the newest attempt is still running: two at once would write over each other
        """
        while True:
            earlier = self.attempts()
            if earlier and is_live(earlier[-1].info):
                raise HpcDdpError(
                    f"run {self.path} is already being run: {_describe(earlier[-1])}",
                    hint="wait for it, or end it with `hpc-ddp cancel`",
                )
            number = earlier[-1].number + 1 if earlier else 0
            attempt = self.attempt(number)
            if self._create(attempt, info):
                return attempt

    def _create(self, attempt: AttemptFolder, info: dict[str, Any]) -> bool:
        """Put the attempt's folder in place in one step; False when somebody was faster."""
        self.logs.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".attempt-", dir=self.logs))
        try:
            (draft / "attempt.json").write_text(json.dumps(info))
            for name in ("notice", "failed", "fabric", "end-time"):
                (draft / name).touch()
            (draft / "secret").touch(mode=0o600)
            (draft / "secret").write_bytes(secrets.token_bytes(32))
            draft.rename(attempt.path)  # fails on a folder that isn't empty: ours never is
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            return False
        return True

    def is_newest(self, attempt: int) -> bool:
        """Tell whether no later attempt has started: only then may this one change the run."""
        # By listing the folder: a look-up of a missing name may be answered from an NFS cache.
        return all(later.number <= attempt for later in self.attempts())


def _is_attempt(path: Path) -> bool:
    return path.name.removeprefix("attempt-").isdecimal()


def _describe(attempt: AttemptFolder) -> str:
    info = attempt.info
    process = f"job {info['job_id']}" if info.get("job_id") else f"process {info.get('pid')}"
    return f"attempt {attempt.number}, {process} on {info.get('host')}"


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an absent, torn or foreign one reads as empty."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


@contextlib.contextmanager
def written_by_owner() -> Iterator[None]:
    """Let nobody but the owner write what is made meanwhile, also with the umask 002 of a project's
    group: an owner may open a run to be read, and what is in it is executed and believed.

    Not for a whole process: a job gets the umask of who submits it, and so do the files of its
    script.
    """
    umask = os.umask(0o022)
    os.umask(umask | 0o022)
    try:
        yield
    finally:
        os.umask(umask)


def close_to_others(top: Path) -> None:
    """Let nobody but the owner write what is there: a copy has its original's mode, whatever the
    umask."""
    for path in (top, *top.rglob("*")):
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode) and mode & 0o022:
            path.chmod(stat.S_IMODE(mode) & ~0o022)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file so that a reader sees all of it or none."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file by a draft and a rename; a link that lies there is replaced, and not followed.

    The draft has a random name and is new: others may write to the folder.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(draft, "x", encoding="utf-8") as file:  # x: it follows no link
            file.write(text)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read_word(path: Path) -> str:
    """Return what a `notice` or `failed` file holds, '' when it is empty or can't be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def read_seconds(path: Path) -> float | None:
    """Return the number that a file like `end-time` holds, None where there is none."""
    try:
        return float(read_word(path))
    except ValueError:
        return None


def read_tail(path: Path, size: int) -> str:
    """Return the last `size` bytes of a log, without torch's and our own mark of the rank in
    front of its lines; '' when it can't be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            text = file.read(size).decode(errors="replace")
    except (OSError, ValueError):
        return ""
    return _RANK_MARK.sub("", text)


def link_job(job_id: str, run: RunFolder) -> None:
    """Note below ``<runs>/.jobs`` which run a job id belongs to, so that a look-up is one step.

    The job does as well without the note, so a disk that takes none is reported, and no error.
    """
    index = run.root / ".jobs"
    try:
        index.mkdir(parents=True, exist_ok=True)
        link = index / job_id
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(run.path, index))
    except OSError as error:
        say(f"job {job_id} can't be found by its id: {error}")


def find_run(root: Path, text: str) -> RunFolder:
    """Return the run that a person means: a folder, a run id, a run's name (newest), a job id.

    A folder in the working directory comes first, whichever user made it. It is read as data;
    `ownership.check_executable` keeps what is in it from being started.

    Raises
    ------
    UsageError
        there is no such run
    """
    candidates = [Path(text).absolute()] if text else []
    if text and not set(text) & {"/", "\0"}:
        name = glob.escape(text)
        job, _, task = text.partition("_")  # as Slurm names a task of an array
        linked = [root / ".jobs" / job / f"task-{task}", root / ".jobs" / text]
        candidates += [
            *(path for path in linked if _has_job(path, job)),
            *_newest(root.glob(f"[!.]*/{name}")),  # a plain start's are all called `local`
        ]
        # One that was only rendered means less than one that somebody has started.
        named = _newest(root.glob(f"{name}/*"))
        candidates += sorted(named, key=lambda run: not any(run.glob("journal/*.jsonl")))
    if re.fullmatch(r"[^/\0]+/task-\d+", text):  # an id, as `hpc-ddp status` shows it
        candidates += root.glob(f"[!.]*/{glob.escape(text)}")
    for path in candidates:
        if "\0" not in text and (path / "job.json").is_file():
            return RunFolder(path.resolve())
    raise UsageError(
        f"no run {text!r}: not a run folder, and no run id, run name or job id in {root}",
        hint="list the runs with `hpc-ddp status`",
    )


def _has_job(path: Path, job_id: str) -> bool:
    """Return whether the run behind a link of ``.jobs`` had this job: others may write links."""
    if not (path / "job.json").is_file():
        return False
    run = RunFolder(path.resolve())
    runs = {run.path: run, run.whole: RunFolder(run.whole)}.values()
    return any(job_id in part.job_ids(part.events()) for part in runs)


def all_runs(root: Path) -> list[RunFolder]:
    """Return the runs below `root`, newest first."""
    paths = (path.parent for path in root.glob("[!.]*/*/job.json"))
    return [RunFolder(path) for path in _newest(paths)]


def _newest(runs: Iterable[Path]) -> list[Path]:
    return sorted(runs, key=_begun, reverse=True)


def _begun(run: Path) -> tuple[str, float, str]:
    """Return what sorts runs by when they began: their id has it, or else their job.json."""
    if re.match(r"\d{8}-\d{6}-", run.name):
        return run.name[:15], 0.0, run.name
    try:
        when = (run / "job.json").stat().st_mtime
    except OSError:
        return "", 0.0, run.name
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(when)), when, run.name
