"""Keeps the parcel of ``--stage``: a process of low priority beside the supervisor of a node.

``python <run>/lib/node.py workers.staging.keeper PARENT``, started by ``stage.sh``. On the first
node it packs what the processes have opened, once the first step is done, and then the compile
caches as they grow. On each node it removes what ended runs have left. It ends with the supervisor.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpc_ddp.core.attempt_env import FIRST_STEP, NEAR, OPENED_FILES
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.console.units import byte_count
from hpc_ddp.core.file_io import make_private, read_json, write_json, write_whole
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.net.place import node_index
from hpc_ddp.node.workers.staging.mirror import Mirror, mirror_of, written_in
from hpc_ddp.node.workers.staging.removal import call
from hpc_ddp.node.workers.worker import COMPILE_CACHE, die_with_parent

POLL_S = 0.5
QUIET_S = 300.0  # without another file, where no script says that a step is done: disks are slow
SOON_S = 60.0  # after the first step
EVERY_S = 600.0
MOST_MISSES = 50  # files, and their bytes, for which the parcel is not written anew
MOST_MISSED_BYTES = 16 << 20
MOST_BYTES = 20 << 30  # of a part
SETTLED_S = 60.0  # a compiler writes an entry of its cache in less
COMPILED = "part compiled"  # the beginning of a line of the label
DRAFT = ".draft"  # in the parcel
# The kind of a processor: its name, and the instructions that it has.
PROCESSOR = "grep -Em2 '^(model name|flags|Features)' /proc/cpuinfo | cksum"


@dataclass
class Keeper:
    """Writes the `parcel` of a run, a folder on the shared disk, by this node's `record` of opened
    files, which lies in the run's folder on the node. The parcel has parts, which are tars, and a
    text file ``label``, which describes them. Methods raise OSError where a disk refuses."""

    parcel: Path
    record: Path
    lines: set[str] = field(default_factory=set)  # of the record
    _offset: int = 0  # of the record: the end of the lines
    _packed_lines: int = 0  # the number of those that the parcel was compared with

    def read_record(self) -> None:
        """Add to `lines` what was appended to the record since the last call. Nothing without a
        record."""
        with suppress(FileNotFoundError), open(self.record, "rb") as file:
            file.seek(self._offset)
            for line in file:
                if line.endswith(b"\n"):
                    self._offset += len(line)
                    self.lines.add(line[:-1].decode(errors="surrogateescape"))

    def wait_for_first_step(self) -> None:
        """Wait until a rank has done its first step, or until files were opened, but no further one
        for `QUIET_S`."""
        grown_at, count = time.monotonic(), 0
        while not count or time.monotonic() < grown_at + QUIET_S:
            self.read_record()
            if FIRST_STEP in self.lines:
                return
            if len(self.lines) != count:
                grown_at, count = time.monotonic(), len(self.lines)
            time.sleep(POLL_S)

    def pack(self, checks_files: bool) -> None:
        """Write what the parcel lacks: the part with the environment, if too many files are not in
        it or, with `checks_files`, one of its files has changed; the part with the compile caches,
        if they have grown. Does nothing while another task of an array packs."""
        make_private(self.parcel, (), is_new=False)
        with open(self.parcel / "lock", "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            (self.parcel / DRAFT).unlink(missing_ok=True)  # of a keeper that was killed
            label = self._label()
            compiled = [line for line in label if line.startswith(COMPILED)]
            environment = [line for line in label if line not in compiled]
            environment = self._pack_environment(environment, checks_files)
            self._write_label([*environment, *compiled])
            self._write_label([*environment, *self._pack_compiled(compiled)])

    def _label(self) -> list[str]:
        """Return the lines of the parcel's label, [] where there is none, or it can't be read."""
        with suppress(OSError):
            return (self.parcel / "label").read_text(errors="surrogateescape").splitlines()
        return []

    def _write_label(self, label: list[str]) -> None:
        """Write `label`, and remove the parcel's files that it does not name. Do nothing where the
        parcel has the same label already."""
        if label == self._label():
            return
        write_whole(self.parcel / "label", "\n".join([*label, ""]))
        parts = {line.split()[1] for line in label if line.startswith("part ")}
        names = {"label", "lock", *parts, *(f"{part}.json" for part in parts)}
        for path in self.parcel.iterdir():
            if path.name not in names:
                path.unlink(missing_ok=True)

    def _pack_environment(self, label: list[str], checks_files: bool) -> list[str]:
        """Write a new part with the environment, unless the present one, which the lines `label`
        describe, is enough (see `pack`). Return the label's lines for the environment."""
        self.read_record()
        if label and not checks_files and len(self.lines) == self._packed_lines:
            return label
        self._packed_lines = len(self.lines)
        mirror = mirror_of(self.record, self.lines)
        packed: dict[str, tuple[int, ...]] = {}
        if is_current(label) and self._is_whole(label[0]):
            files = read_json(self.parcel / f"{label[0].split()[1]}.json")
            packed = {path: tuple(pair) for path, pair in files.items()}
        if NEAR in os.environ:  # of such an attempt the record does not tell
            mirror.leave_out(written_in(Path(os.environ[NEAR]), packed))
        if is_enough(mirror, packed, checks_files):
            return label
        for path in packed:
            mirror.add(path)
        rewritten: list[str] = []
        stamps, roots = mirror.stamps(), mirror.turnable()
        sizes = [size for size, _ in mirror.files.values()]
        part = self._write_part(
            *("environment", "Python", sizes), lambda draft: rewritten.extend(mirror.pack(draft))
        )
        # Its name is the part's: a label never comes with the files of another part.
        write_json(self.parcel / f"{part.split()[1]}.json", mirror.files)
        return [
            part,
            *(f"stamp {seconds} {path}" for path, seconds in stamps.items()),
            *roots,
            *mirror.programs(),
            *(f"rewrite {path}" for path in rewritten),
            *(f"direct {path}" for path in mirror.libraries()),
        ]

    def _pack_compiled(self, label: list[str]) -> list[str]:
        """Write a new part with the compile caches, if they have more files by now than the present
        part for this kind of processor; return its line of the label, in a list. Else return
        `label`, the lines for the present parts. A cache that the user has set is not packed."""
        folder = self.record.parent / "compile"
        if os.environ.get(COMPILE_CACHE) != str(folder):  # the user's own
            return label
        with suppress(FileNotFoundError):  # the compiler has just removed one
            files = settled_files(folder)
            name = f"compiled-{processor()}"  # and the number of files: tasks of an array share it
            parts = [line for line in label if f" {name}-" in line and self._is_whole(line)]
            if len(files) <= max((int(line.split("-")[2]) for line in parts), default=0):
                return label

            def pack(draft: Path) -> None:
                with tarfile.open(draft, "w", format=tarfile.GNU_FORMAT) as tar:
                    for path in sorted(files):
                        tar.add(path, os.path.relpath(path, folder))

            sizes = [status.st_size for status in files.values()]
            return [self._write_part(f"{name}-{len(files)}", "compile caches", sizes, pack)]
        return label

    def _is_whole(self, line: str) -> bool:
        """Return whether the part that a `line` of the label names is there, in its full size."""
        with suppress(OSError, ValueError):
            _, name, _, size = line.split()
            return str((self.parcel / name).stat().st_size) == size
        return False

    def _write_part(
        self, name: str, title: str, sizes: Sequence[int], pack: Callable[[Path], object]
    ) -> str:
        """Write a new part by `pack`, which gets a path, print its size, and return its line of the
        label. The part's file is named `name`-CHECKSUM; `sizes` are the bytes of the files that go
        into it, and `title` says in words what they are. Raises OSError for more than `MOST_BYTES`
        in all, and what `pack` raises."""
        if sum(sizes) > MOST_BYTES:
            raise OSError(f"its {title} have {byte_count(sum(sizes))}")
        draft = self.parcel / DRAFT
        try:
            pack(draft)
            with open(draft, "rb") as file:
                os.fsync(file.fileno())  # a quota may refuse only now
            checksum, size = checksum_of(draft)
            draft.rename(self.parcel / f"{name}-{checksum}")
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        text = f"{len(sizes)} files of its {title} as one of {byte_count(int(size))}"
        say(f"the next start reads {text}")
        return f"part {name}-{checksum} {checksum} {size}"


def is_current(label: list[str]) -> bool:
    """Return whether the environment is as it was when `label` was written: by its stamps, and by
    the folders to which the roots' links lead. False for a label without stamps. `stage.sh`
    compares the same."""
    stamps = [line.split(" ", 2)[1:] for line in label if line.startswith("stamp ")]
    spelled = [line[8:] for line in label if line.startswith("spelled ")]
    real = [line[5:] for line in label if line.startswith("real ")]
    with suppress(OSError):
        is_same = all(str(int(os.stat(path).st_mtime)) == seconds for seconds, path in stamps)
        return bool(stamps) and is_same and [*map(os.path.realpath, spelled)] == real
    return False


def settled_files(folder: Path) -> dict[str, os.stat_result]:
    """Return the files of a compile cache, with their status by path; without those of folders in
    which a file has changed in the last `SETTLED_S`, since an entry of the cache, a folder, must be
    whole. Raises FileNotFoundError if a file is removed meanwhile."""
    files: dict[str, os.stat_result] = {}
    for place, _, names in os.walk(folder):
        statuses = {path: os.lstat(path) for path in (os.path.join(place, name) for name in names)}
        if all(status.st_mtime < time.time() - SETTLED_S for status in statuses.values()):
            files |= statuses
    return files


def is_enough(
    mirror: Mirror, packed: Mapping[str, tuple[int, ...]], checks_files: bool = True
) -> bool:
    """Return whether a parcel with the files `packed` (size and time by path) has nearly all files
    of `mirror`, none that the job writes, and, with `checks_files`, none that has changed since.
    Print how many have changed, if this process runs from a copy of the environment."""
    misses = [size for path, (size, _) in mirror.files.items() if path not in packed]
    are_many = len(misses) > MOST_MISSES or sum(misses) > MOST_MISSED_BYTES
    if not packed or are_many or not mirror.written.isdisjoint(packed):
        return False
    now = Mirror(mirror.roots, mirror.written)
    if checks_files:
        for path in packed:
            now.add(path)
    count = checks_files and sum(now.files.get(path) != pair for path, pair in packed.items())
    if count and NEAR in os.environ:
        say(f"this attempt runs {count} files as they were before; a requeue takes the new ones")
    return not count


def checksum_of(path: Path) -> tuple[str, str]:
    """Return the checksum and the size in bytes of a file, as cksum(1) prints them: ``stage.sh``
    computes the same without Python. Raises OSError where cksum fails, or the file can't be
    read."""
    with open(path, "rb") as file:
        text = subprocess.run(["cksum"], stdin=file, check=False, capture_output=True, text=True)
    checksum, size = text.stdout.split() if text.returncode == 0 else ("", "")
    if not checksum:
        raise OSError(f"cksum has failed: {text.stderr.strip()}")
    return checksum, size


def processor() -> str:
    """Return a number, as a text, for the kind of this node's processors, the one that ``stage.sh``
    computes. Raises OSError or CalledProcessError of subprocess where the shell fails."""
    done = subprocess.run(["sh", "-c", PROCESSOR], check=True, capture_output=True, text=True)
    return done.stdout.split()[0]


def keep(keeper: Keeper, unstaged: Path) -> None:
    """Wait for the first step, then pack, with a check of all files; pack again after `SOON_S`, and
    then each `EVERY_S`, without that check. Return once the file `unstaged` exists, or after an
    error while packing, which is printed unless the attempt has ended. Raises OSError where the
    record can't be read before the first step."""
    keeper.wait_for_first_step()
    pause_s = SOON_S
    while not unstaged.exists():
        try:
            keeper.pack(checks_files=pause_s == SOON_S)
        except Exception as error:  # the job goes on, and a full disk is not filled again
            if keeper.record.parent.exists():  # else the attempt ends
                say(f"the parcel of the next start could not be written: {error}")
            return
        time.sleep(pause_s)
        pause_s = EVERY_S


def main(argv: Sequence[str]) -> int:
    """Remove what ended runs have left on this node; then, on the first node, `keep` the parcel.
    Return 0 on other nodes, after `keep`, and where the supervisor, whose process id is
    ``argv[0]``, has ended already. This process dies with the supervisor. Raises KeyError outside
    of a task of ``stage.sh``."""
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that its draft is removed
    if os.getppid() != int(argv[0]):  # it has ended already
        return 0
    record, lib = Path(os.environ[OPENED_FILES]), Path(__file__).resolve().parents[4]
    call("clean")
    with suppress(OSError, KeyError, ValueError):  # a host that is none of the job's nodes
        if node_index(os.environ) == 0:
            unstaged = RunFolder(Path(os.environ["HPC_DDP_RUN"])).unstaged
            keep(Keeper(RunFolder(lib.parent).parcel, record), unstaged)
    return 0
