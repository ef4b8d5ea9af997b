"""Keeps the parcel of ``--stage``: a process of low priority beside the supervisor of a node.

``python <run>/lib/node.py workers.staging.keeper PARENT``, started by ``stage.sh``. On the first
node it packs the files that the processes have opened, once the first step is done, and then the
compile caches as they grow. On each node it removes what ended runs have left. It ends with the
supervisor.
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
from hpc_ddp.node.workers.staging.mirror import Mirror, find_written, mirror_of
from hpc_ddp.node.workers.staging.removal import run_stage_script
from hpc_ddp.node.workers.worker import COMPILE_CACHE, die_with_parent

POLL_S = 0.5
QUIET_S = 300.0  # without another file, where no script says that a step is done: disks are slow
SOON_S = 60.0  # after the first step
EVERY_S = 600.0
MOST_MISSES = 50  # files, and their bytes, for which the parcel is not written anew
MOST_MISSED_BYTES = 16 << 20
MOST_BYTES = 20 << 30  # of a part
SETTLED_S = 60.0  # a compiler takes less time to write an entry of its cache
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
    _offset: int = 0  # in bytes: the end of those lines in the record
    _packed_lines: int = 0  # the number of lines when the parcel was last compared with them

    def read_record(self) -> None:
        """Add the whole lines that were appended to the record since the last call to `lines`. Do
        nothing where there is no record."""
        with suppress(FileNotFoundError), open(self.record, "rb") as file:
            file.seek(self._offset)
            for line in file:
                if line.endswith(b"\n"):
                    self._offset += len(line)
                    self.lines.add(line[:-1].decode(errors="surrogateescape"))

    def wait_for_first_step(self) -> None:
        """Read the record until a rank has done its first step, or until files were opened, and no
        further file for `QUIET_S`."""
        grown_at, count = time.monotonic(), 0
        while not count or time.monotonic() < grown_at + QUIET_S:
            self.read_record()
            if FIRST_STEP in self.lines:
                return
            if len(self.lines) != count:
                grown_at, count = time.monotonic(), len(self.lines)
            time.sleep(POLL_S)

    def pack(self, checks_files: bool) -> None:
        """Make the parcel if it is missing, and write what it lacks: the part with the environment,
        if too many files are not in it or, with `checks_files`, one of its files has changed; the
        part with the compile caches, if they have grown. Do nothing while another task of an array
        packs."""
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
        """Return the lines of the parcel's label, [] where there is no label or it can't be
        read."""
        with suppress(OSError):
            return (self.parcel / "label").read_text(errors="surrogateescape").splitlines()
        return []

    def _write_label(self, label: list[str]) -> None:
        """Write the lines `label` as the parcel's label, and remove the parcel's files that it does
        not name. Do nothing where the parcel has the same label already."""
        if label == self._label():
            return
        write_whole(self.parcel / "label", "\n".join([*label, ""]))
        parts = {line.split()[1] for line in label if line.startswith("part ")}  # part NAME …
        names = {"label", "lock", *parts, *(f"{part}.json" for part in parts)}
        for path in self.parcel.iterdir():
            if path.name not in names:
                path.unlink(missing_ok=True)

    def _pack_environment(self, label: list[str], checks_files: bool) -> list[str]:
        """Write a new part with the environment, unless the present part, which the lines `label`
        describe, is enough (see `pack`). Return the label's lines for the environment, of the new
        part or of the present one."""
        self.read_record()
        if label and not checks_files and len(self.lines) == self._packed_lines:
            return label
        self._packed_lines = len(self.lines)
        mirror = mirror_of(self.record, self.lines)
        packed: dict[str, tuple[int, ...]] = {}
        if is_current(label) and self._is_whole(label[0]):
            files = read_json(self.parcel / f"{label[0].split()[1]}.json")
            packed = {path: tuple(pair) for path, pair in files.items()}
        if NEAR in os.environ:  # an attempt from a copy: its record lacks the files that it writes
            mirror.leave_out(find_written(Path(os.environ[NEAR]), packed))
        if is_enough(mirror, packed, checks_files):
            return label
        for path in packed:
            mirror.add(path)
        rewritten: list[str] = []  # paths of files with new texts, as `Mirror.pack` returns them
        stamps, roots = mirror.stamps(), mirror.root_lines()
        sizes = [size for size, _ in mirror.files.values()]
        part = self._write_part(
            *("environment", "Python", sizes), lambda draft: rewritten.extend(mirror.pack(draft))
        )
        # The list of its files has the part's name: a label never comes with another part's list.
        write_json(self.parcel / f"{part.split()[1]}.json", mirror.files)
        return [
            part,
            *(f"stamp {seconds} {path}" for path, seconds in stamps.items()),
            *roots,
            *mirror.program_lines(),
            *(f"rewrite {path}" for path in rewritten),
            *(f"direct {path}" for path in mirror.libraries()),
        ]

    def _pack_compiled(self, label: list[str]) -> list[str]:
        """Write a new part with the compile caches if they have more files by now than the present
        part of this kind of processor has, or if there is no such part. Return its line of the
        label as the only one: the caller removes the present part, also one for another kind of
        processor.

        Return `label`, the lines of the present part, where nothing is written: also for a cache
        that the user has set, and where a file of the cache is removed meanwhile. Raise as
        `processor`, too.
        """
        folder = self.record.parent / "compile"
        if os.environ.get(COMPILE_CACHE) != str(folder):  # the user's own
            return label
        with suppress(FileNotFoundError):  # the compiler has just removed one
            files = settled_files(folder)
            # The part's name is this with the number of files: tasks of an array share the parcel.
            name = f"compiled-{processor()}"
            parts = [line for line in label if f" {name}-" in line and self._is_whole(line)]
            if len(files) <= max((int(line.split("-")[2]) for line in parts), default=0):
                return label

            def pack(draft: Path) -> None:
                """Write the caches' files to `draft` as a tar."""
                with tarfile.open(draft, "w", format=tarfile.GNU_FORMAT) as tar:
                    for path in sorted(files):
                        tar.add(path, os.path.relpath(path, folder))

            sizes = [status.st_size for status in files.values()]
            return [self._write_part(f"{name}-{len(files)}", "compile caches", sizes, pack)]
        return label

    def _is_whole(self, line: str) -> bool:
        """Return whether the part that a `line` of the label names exists, in its full size."""
        with suppress(OSError, ValueError):
            _, name, _, size = line.split()
            return str((self.parcel / name).stat().st_size) == size
        return False

    def _write_part(
        self, name: str, title: str, sizes: Sequence[int], pack: Callable[[Path], object]
    ) -> str:
        """Write a new part by `pack`, which gets the path to write to; print the part's size, and
        return its line of the label. The part's file is named `name`-CHECKSUM; `sizes` are the
        bytes of each file that goes into it, `title` the files' kind for the printed line. Raise
        OSError for more than `MOST_BYTES` in all, and what `pack` raises."""
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
    the folders to which the roots' links lead. False for a label without stamps, and where a stamp
    can't be compared. `stage.sh` compares the same."""
    stamps = [line.split(" ", 2)[1:] for line in label if line.startswith("stamp ")]
    spelled = [line.removeprefix("spelled ") for line in label if line.startswith("spelled ")]
    real = [line.removeprefix("real ") for line in label if line.startswith("real ")]
    with suppress(OSError):
        is_same = all(str(int(os.stat(path).st_mtime)) == seconds for seconds, path in stamps)
        return bool(stamps) and is_same and [*map(os.path.realpath, spelled)] == real
    return False


def settled_files(folder: Path) -> dict[str, os.stat_result]:
    """Return the files of the compile cache in `folder`, with their status by path; without the
    files of folders in which a file has changed in the last `SETTLED_S`, since an entry of the
    cache, a folder, must be whole. Raise FileNotFoundError if a file is removed meanwhile."""
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
    of `mirror`, no file that the job writes, and, with `checks_files`, none that has changed since.
    If this process runs from a copy of the environment, print how many have changed, if any."""
    misses = [size for path, (size, _) in mirror.files.items() if path not in packed]
    are_many = len(misses) > MOST_MISSES or sum(misses) > MOST_MISSED_BYTES
    if not packed or are_many or not mirror.written.isdisjoint(packed):
        return False
    if not checks_files:
        return True
    present = Mirror(mirror.roots, mirror.written)
    for path in packed:
        present.add(path)
    count = sum(present.files.get(path) != pair for path, pair in packed.items())
    if count and NEAR in os.environ:
        say(f"this attempt runs {count} files as they were before; a requeue takes the new ones")
    return not count


def checksum_of(path: Path) -> tuple[str, str]:
    """Return the checksum and the size in bytes of a file, as texts that cksum(1) prints:
    ``stage.sh`` computes the same without Python. Raise OSError where cksum fails, or the file
    can't be read."""
    with open(path, "rb") as file:
        shell = subprocess.run(["cksum"], stdin=file, check=False, capture_output=True, text=True)
    checksum, size = shell.stdout.split() if shell.returncode == 0 else ("", "")
    if not checksum:
        raise OSError(f"cksum has failed: {shell.stderr.strip()}")
    return checksum, size


def processor() -> str:
    """Return a number, as a text, for the kind of this node's processors; ``stage.sh`` computes the
    same number. Raise OSError or CalledProcessError of subprocess where the shell fails."""
    shell = subprocess.run(["sh", "-c", PROCESSOR], check=True, capture_output=True, text=True)
    return shell.stdout.split()[0]  # cksum prints the checksum and the size


def keep_parcel(keeper: Keeper, unstaged: Path) -> None:
    """Wait for the first step, then have `keeper` write the parcel, with a check of all files;
    write it again after `SOON_S`, and then each `EVERY_S`, without that check. Return once the file
    `unstaged` exists, or after an error while packing, which is printed unless the attempt has
    ended. Raise OSError where the record can't be read before the first step."""
    keeper.wait_for_first_step()
    pause_s = SOON_S
    while not unstaged.exists():
        try:
            keeper.pack(checks_files=pause_s == SOON_S)  # the first time
        except Exception as error:  # the job goes on, and a full disk is not filled again
            if keeper.record.parent.exists():  # the attempt has not ended, and removed the folder
                say(f"the parcel of the next start could not be written: {error}")
            return
        time.sleep(pause_s)
        pause_s = EVERY_S


def main(argv: Sequence[str]) -> int:
    """Remove what ended runs have left on this node; then, on the first node, keep the parcel
    (`keep_parcel`). Return 0, also where the supervisor, whose process id is ``argv[0]``, has ended
    already. This process dies with the supervisor; SIGTERM ends it with 0. Raise KeyError outside
    of a task of ``stage.sh``."""
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # an exit removes the draft of a part
    if os.getppid() != int(argv[0]):  # the supervisor has ended before the lines above
        return 0
    record, lib = Path(os.environ[OPENED_FILES]), Path(__file__).resolve().parents[4]
    run_stage_script("clean")
    with suppress(OSError, KeyError, ValueError):  # a host that is none of the job's nodes
        if node_index(os.environ) == 0:
            unstaged = RunFolder(Path(os.environ["HPC_DDP_RUN"])).unstaged
            keep_parcel(Keeper(RunFolder(lib.parent).parcel, record), unstaged)
    return 0
