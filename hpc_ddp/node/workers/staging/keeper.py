"""Keeps the parcel of ``--stage``: a process of low priority beside the supervisor of a node.

``python <run>/lib/node.py workers.staging.keeper PARENT``, started by ``stage.sh``. On the first
node it packs what the processes have opened, once the first step is done, and then the compile
caches as they grow. On each node it removes what runs have left that are over. It ends with the
supervisor.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_ddp.core.attempt_env import FIRST_STEP, OPENED_FILES
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.console.units import byte_count
from hpc_ddp.core.file_io import make_private, read_json, write_json, write_whole
from hpc_ddp.node.workers.staging.mirror import Mirror, mirror_of
from hpc_ddp.node.workers.staging.removal import PARCEL, remove_leftovers
from hpc_ddp.node.workers.worker import COMPILE_CACHE, die_with_parent

POLL_S = 0.5
QUIET_S = 300.0  # without another file, where no script says that a step is done: disks are slow
SOON_S = 60.0  # after the first step
EVERY_S = 600.0
MOST_MISSES = 50  # files, and their bytes, for which the parcel is not written anew
MOST_MISSED_BYTES = 16 << 20
COMPILED = "part compiled"  # the beginning of a line of the label


@dataclass
class Keeper:
    """The parcel of a run, a folder on the shared disk, and one node's `record` of opened files,
    which lies in the run's folder on this node. Methods raise OSError where a disk refuses."""

    parcel: Path
    record: Path

    def wait_for_first_step(self) -> None:
        """Return once a rank has done its first step, or no file was opened for `QUIET_S`."""
        grown_at, size = time.monotonic(), 0
        while not size or time.monotonic() < grown_at + QUIET_S:
            with suppress(OSError):
                text = self.record.read_text(errors="replace")
                if FIRST_STEP in text:
                    return
                if len(text) != size:
                    grown_at, size = time.monotonic(), len(text)
            time.sleep(POLL_S)

    def pack(self, checks_files: bool) -> None:
        """Write what the parcel lacks: the environment, if too many files are not in it or, with
        `checks_files`, one of its files has changed; the compile caches, if they have changed."""
        label = self._label()
        environment = [line for line in label if not line.startswith(COMPILED)]
        compiled = [line for line in label if line.startswith(COMPILED)]
        environment = self._pack_environment(environment, checks_files)
        new_label = environment + self._pack_compiled(compiled)
        if new_label != label:
            write_whole(self.parcel / "label", "\n".join([*new_label, ""]))
            self._remove_others(new_label)

    def _label(self) -> list[str]:
        with suppress(OSError):
            return (self.parcel / "label").read_text(errors="surrogateescape").splitlines()
        return []

    def _pack_environment(self, label: list[str], checks_files: bool) -> list[str]:
        """Return the lines of the label for the environment: `label`, those that are there, or of a
        new part."""
        mirror = mirror_of(self.record)
        files = {path: tuple(pair) for path, pair in read_json(self._files).items()}
        packed = files if is_current(label) else {}
        if is_enough(mirror, packed, checks_files):
            return label
        for path in packed:
            mirror.add(path)
        rewritten: list[str] = []
        stamps = mirror.stamps()
        part = self._write_part("environment", lambda draft: rewritten.extend(mirror.pack(draft)))
        write_json(self._files, mirror.files)
        size = byte_count(int(part.split()[-1]))
        say(f"the next start reads {len(mirror.files)} files of its Python as one of {size}")
        return [
            part,
            *(f"stamp {seconds} {path}" for path, seconds in stamps.items()),
            *(f"rewrite {path}" for path in rewritten),
            *(f"direct {path}" for path in mirror.libraries()),
        ]

    def _pack_compiled(self, label: list[str]) -> list[str]:
        """Return the lines of the label for the compile caches, as `_pack_environment`."""
        folder = self.record.parent / "compile"
        if os.environ.get(COMPILE_CACHE) != str(folder):  # the user's own
            return label
        times = [path.lstat().st_mtime_ns for path in folder.rglob("*")]
        name = f"compiled-{processor()}-{len(times)}x{max(times, default=0)}"
        if not times or any(f" {name}-" in line for line in label):
            return label

        def pack(draft: Path) -> None:
            with tarfile.open(draft, "w", format=tarfile.GNU_FORMAT) as tar:
                tar.add(folder, ".")

        return [self._write_part(name, pack)]

    @property
    def _files(self) -> Path:
        return self.parcel / "files.json"

    def _write_part(self, name: str, pack: Callable[[Path], object]) -> str:
        """Return the line of the label of a new file, which `pack` writes."""
        make_private(self.parcel, (), is_new=False)
        draft = self.parcel / f".draft-{secrets.token_hex(8)}"
        try:
            pack(draft)
            checksum, size = checksum_of(draft)
            part = f"{name}-{checksum}"
            draft.rename(self.parcel / part)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        return f"part {part} {checksum} {size}"

    def _remove_others(self, label: list[str]) -> None:
        """Remove parts that the label does not name, and drafts of keepers that were killed."""
        names = {line.split()[1] for line in label if line.startswith("part ")}
        for path in self.parcel.iterdir():
            if path.name not in {"label", self._files.name, *names}:
                path.unlink(missing_ok=True)


def is_current(label: list[str]) -> bool:
    """Return whether the environment has not changed since a label was written; False for [].
    `stage.sh` compares the same."""
    stamps = [line.split(" ", 2)[1:] for line in label if line.startswith("stamp ")]
    with suppress(OSError):
        return bool(stamps) and all(str(int(os.stat(p).st_mtime)) == s for s, p in stamps)
    return False


def is_enough(
    mirror: Mirror, packed: Mapping[str, tuple[int, ...]], checks_files: bool = True
) -> bool:
    """Return whether a parcel with the files `packed` (size, time) has nearly all of a mirror, and,
    with `checks_files`, as they are now."""
    misses = [size for path, (size, _) in mirror.files.items() if path not in packed]
    if not packed or len(misses) > MOST_MISSES or sum(misses) > MOST_MISSED_BYTES:
        return False
    now = Mirror(mirror.roots)
    for path in packed if checks_files else ():
        now.add(path)
    return not checks_files or all(now.files.get(path) == pair for path, pair in packed.items())


def checksum_of(path: Path) -> tuple[str, str]:
    """Return checksum and size of a file, as cksum(1) prints them: ``stage.sh`` has no Python."""
    with open(path, "rb") as file:
        text = subprocess.run(["cksum"], stdin=file, check=False, capture_output=True, text=True)
    checksum, size = text.stdout.split() if text.returncode == 0 else ("", "")
    if not checksum:
        raise OSError(f"cksum has failed: {text.stderr.strip()}")
    return checksum, size


def processor() -> str:
    """Return a number for the make of this node's processors, as ``stage.sh`` computes it."""
    lines = Path("/proc/cpuinfo").read_bytes().splitlines(keepends=True)
    model = next((line for line in lines if b"model name" in line), b"")
    text = subprocess.run(["cksum"], input=model, check=True, capture_output=True)
    return text.stdout.split()[0].decode()


def main(argv: Sequence[str]) -> int:
    """Keep the parcel until the supervisor ends, the process `argv`; on other nodes than the first
    return 0 after a look at what is left there. Raise KeyError outside of a task of ``stage.sh``.
    """
    die_with_parent()
    if os.getppid() != int(argv[0]):  # it has ended already
        return 0
    record, run = Path(os.environ[OPENED_FILES]), Path(__file__).resolve().parents[5]
    remove_leftovers(record.parent)
    index = os.environ.get("HPC_DDP_NODE_INDEX") or os.environ.get("SLURM_NODEID")
    if index not in (None, "0"):
        return 0
    keeper = Keeper(run / PARCEL, record)
    keeper.wait_for_first_step()
    pause_s = SOON_S
    while True:
        try:
            keeper.pack(checks_files=pause_s == SOON_S)
        except Exception as error:  # the job goes on, whatever the disk has
            say(f"the parcel of the next start could not be written: {error}")
        time.sleep(pause_s)
        pause_s = EVERY_S
