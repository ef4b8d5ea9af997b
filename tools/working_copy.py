"""A copy of the repository in which a tool may change files, and pytest processes run in it.

The copy is a clone in the cache folder, so an editor, git and other tools don't see the changes. It
has a .venv of its own, made by make, which shares the installed packages.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tools.store import CACHE, REPO, ToolError, git

# How the Makefile runs tests, for a tool that make has not started.
PYTEST = ".venv/bin/python -m pytest"  # relative to the copy
PARALLEL = "--numprocesses=5 --maxschedchunk=1"
POLL_S = 0.2
TEAR_DOWN_S = 20.0
END_S = 60.0  # for pytest to end once its last test has


def pytest_command() -> list[str]:
    return shlex.split(os.environ.get("PYTEST", PYTEST))


def environment(torch: str = "") -> str:
    """Return the name of the folder that make fills: that of this release of torch, or of the
    pinned one."""
    return f".venv-torch-{torch}" if torch else ".venv"


def parallel() -> list[str]:
    """Return the options with which pytest runs several tests at once."""
    return shlex.split(os.environ.get("PARALLEL", PARALLEL))


class WorkingCopy:
    """A clone at the commit of the checkout; a tool changes one file at a time in it. Making one
    updates the clone and its environment, and ends what an earlier tool has left running in it.
    Raises ToolError where another process uses the clone, or git or make fails."""

    def __init__(self, name: str, *, dirty: bool = False) -> None:
        self.path = CACHE / "copies" / f"{REPO.name}-{name}"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.path.with_suffix(".lock"))
        self._writes = 0
        self._end_earlier_runs()
        if not (self.path / ".git").exists():
            shutil.rmtree(self.path, ignore_errors=True)
            git("clone", "--quiet", "--no-checkout", str(REPO), str(self.path))
        head = git("rev-parse", "HEAD").strip()
        git("fetch", "--quiet", str(REPO), head, folder=self.path)
        git("checkout", "--quiet", "--force", "--detach", head, folder=self.path)
        git("clean", "--quiet", "-ffd", folder=self.path)
        if dirty:
            self._take_changes()
        self._clear_bytecode()
        self.make_environment()

    def make_environment(self, torch: str = "") -> None:
        """Install what the tests need, with this release of torch if one is given. Raise ToolError
        where make fails."""
        environ = {k: v for k, v in clean_environ().items() if not k.startswith("MAKE")}
        environ["TORCH"] = torch
        command = ["make", "--no-print-directory", f"{environment(torch)}/ready"]
        done = subprocess.run(command, cwd=self.path, env=environ, capture_output=True, text=True)
        if done.returncode:
            raise ToolError(
                f"no environment for {self.path}: {(done.stderr or done.stdout)[-500:]}"
            )

    @property
    def _mark(self) -> str:
        """The variable, ``NAME=value``, by which all that runs in this copy is found."""
        return f"TEST_TOOL_COPY={self.path}"

    def _end_earlier_runs(self) -> None:
        """Kill the processes and remove the folders that a killed tool has left."""
        kill_all_with(f"{self._mark}\0")
        for folder in Path(tempfile.gettempdir()).glob(f"hpc-ddp-{self.path.name}-????????"):
            shutil.rmtree(folder, ignore_errors=True)

    def test_run(self, *words: str, limit_s: float = 0.0) -> TestRun:
        """Return a pytest process, not started yet, with these words on its command line. `limit_s`
        is that of `TestRun`."""
        folder = Path(tempfile.mkdtemp(prefix=f"hpc-ddp-{self.path.name}-"))
        return TestRun(self.path, folder, list(words), self._mark, limit_s)

    def _take_changes(self) -> None:
        """Copy the files that differ from the commit, or are new, from the checkout; delete deleted
        ones."""
        for name in git("ls-files", "-mo", "--exclude-standard", "-z").split("\0"):
            if name and (REPO / name).is_file():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPO / name, self.path / name)
            elif name:
                (self.path / name).unlink(missing_ok=True)

    def _clear_bytecode(self) -> None:
        """Drop compiled files: a killed tool may have left those of a changed source."""
        for folder in ("hpc_ddp", "tests", "jobs", "tools"):
            for path in (self.path / folder).rglob("__pycache__"):
                shutil.rmtree(path, ignore_errors=True)

    def write(self, file: str, content: bytes) -> None:
        """Replace a file's content, in a way that Python sees even within the second of its last
        compilation."""
        path = self.path / file
        path.write_bytes(content)
        self._writes += 1
        stamp = time.time() - 1_000_000 + self._writes
        os.utime(path, (stamp, stamp))
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)

    def type_errors(self) -> list[str]:
        """Return mypy's errors, without line numbers, since a mutation moves these."""
        command = [".venv/bin/python", "-m", "mypy", "--no-error-summary", "--no-pretty"]
        folders = ["hpc_ddp", "jobs", "tools", "tests/unit", "tests/cli"]
        done = subprocess.run(
            [*command, *folders], cwd=self.path, env=clean_environ(), capture_output=True, text=True
        )
        lines = (done.stdout + done.stderr).strip().splitlines()
        errors = [re.sub(r":\d+:", ":", line, count=1) for line in lines if ": error: " in line]
        return errors or (["mypy failed"] if done.returncode else [])


def clean_environ() -> dict[str, str]:
    """Return the environment without the variables of hpc-ddp, pytest, Python and make."""
    dropped = re.compile(
        r"(HPC_DDP_|PYTEST|PYTHONPATH$|VIRTUAL_ENV$|MAKEFLAGS$|MFLAGS$|MAKELEVEL$)"
    )
    return {name: value for name, value in os.environ.items() if not dropped.match(name)}


def _lock(path: Path) -> IO[str]:
    file = open(path, "w")  # noqa: SIM115  # held until the process ends
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ToolError(f"another process uses {path.with_suffix('')}: wait for it") from None
    return file


# --- a pytest process ----------------------------------------------------------------------------

Event = dict[str, Any]


@dataclass
class TestRun:
    """One pytest process, and its events. At its end all processes that it has started are
    killed."""

    __test__ = False  # no test class, though its name begins like one

    copy: Path
    folder: Path  # of what it writes
    words: list[str]
    mark: str  # NAME=value, for the environment
    limit_s: float = 0.0  # for a test beyond ten times of what is expected; 0: without a limit
    environ: dict[str, str] = field(default_factory=dict)
    expected: dict[str, float] = field(default_factory=dict)
    torch: str = ""  # the release whose environment is taken; ours, if none is named
    hung: str = ""  # the test that ran for too long, or what else did
    code: int = -1  # of pytest, once it has ended by itself

    def events(self) -> Generator[Event, None, None]:
        """Run pytest, and yield the events that its plugin writes, as they come. Afterwards `hung`
        or `code` is set."""
        path = self.folder / "events"
        program, *words = pytest_command()
        program = program.replace(environment(), environment(self.torch), 1)
        command = [program, *words, "-p", "tools.events", f"--events={path}", *self.words]
        command += [f"--basetemp={self.folder / 't'}", "-p", "no:cacheprovider"]
        # The variables mark all that the tests start, wherever it goes.
        name, _, value = self.mark.partition("=")
        environ = (
            clean_environ() | self.environ | {"TEST_TOOL_FOLDER": str(self.folder), name: value}
        )
        with open(self.folder / "output", "wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.copy,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield from self._follow(process, path)
            if not self.hung:
                self.code = process.wait()
        finally:
            self._end(process)

    def _follow(self, process: subprocess.Popen[bytes], path: Path) -> Iterator[Event]:
        deadlines = {"the start": time.monotonic() + self.limit_s}
        offset = 0
        while True:
            over = process.poll() is not None
            content = path.read_bytes()[offset:] if path.exists() else b""
            complete = content[: content.rfind(b"\n") + 1]
            offset += len(complete)
            for text in complete.splitlines():
                event: Event = json.loads(text)
                deadlines.pop("the start", None)
                if "start" in event:
                    deadlines[event["start"]] = time.monotonic() + self._limit(event["start"])
                elif "test" in event:
                    deadlines.pop(event["test"], None)
                    deadlines["the end"] = time.monotonic() + max(END_S, self.limit_s)
                yield event
            if over:
                return
            late = [test for test, deadline in deadlines.items() if time.monotonic() > deadline]
            if self.limit_s and late and (late != ["the end"] or len(deadlines) == 1):
                self.hung = late[0]
                return
            time.sleep(POLL_S)

    def _limit(self, test: str) -> float:
        """Return how many seconds a test may take: `limit_s`, and ten times what it took before,
        since the machine is shared."""
        return self.limit_s + 10 * self.expected.get(test, 0.0)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the processes that are left: those of the session, and those that tests have started
        elsewhere.

        A pytest that still runs is interrupted first, so that it takes down its Slurm cluster.
        """
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(TEAR_DOWN_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        kill_all_with(str(self.folder))

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def kill_all_with(word: str) -> None:
    """Kill the processes that have a word in their environment or their command line."""
    for _ in range(50):
        pids = _processes_with(word)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return
        time.sleep(0.1)


def _processes_with(word: str) -> list[int]:
    """Return the processes that have a word in their environment or their command line."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if path.name == str(os.getpid()) or " Z " in (path / "stat").read_text():
                continue
            content = (path / "environ").read_bytes() + (path / "cmdline").read_bytes()
            if word.encode() in content:
                pids.append(int(path.name))
    return pids
