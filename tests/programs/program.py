"""What a public training program is, and how it is laid out to be run here."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.programs.edits import Edit, EditError, apply, new_lines

PROGRAMS_FOLDER = "HPC_DDP_PROGRAMS"  # the variable with the folder of the clones
OWN_LOOP_LINES, TRAINER_LINES = 10, 2  # that may be added or changed
# Packages that programs import and the tests' environment lacks, in SOURCES/packages, by
#   pip install --no-deps --target SOURCES/packages …
PACKAGES = (
    *("timm", "datasets", "evaluate", "pyarrow", "dill", "multiprocess", "pandas"),
    *("hydra-core", "omegaconf", "antlr4-python3-runtime==4.9.*"),
)
# The variable with the path to which a program writes its weights in the end, if `run.track` does
# not know them; else those of the run's last checkpoint are compared.
RESULT = "PROGRAM_RESULT"


def saved(weights: str) -> str:
    """Return the line by which rank 0 writes its weights in the end."""
    write = f"torch.save({weights}, os.environ['{RESULT}'])"
    return f"if os.environ['RANK'] == '0': {write}"


@dataclass(frozen=True)
class Program:
    """A training program of a public repository, and the edits by which it is adopted."""

    name: str
    repository: str  # owner/name, at GitHub
    commit: str  # of which the edits were written
    script: str
    args: str = ""
    folder: str = ""  # what is copied; the script's own, if none is named
    # To run on a CPU, without downloads, in seconds; and to write the weights (`RESULT`).
    here: Mapping[str, Sequence[Edit]] = field(default_factory=dict)
    # Its adoption. These lines are counted.
    adopted: Mapping[str, Sequence[Edit]] = field(default_factory=dict)
    limit: int = OWN_LOOP_LINES
    files: Mapping[str, str | bytes] = field(default_factory=dict)  # data that are made for it
    preempted_at: int = 20  # the step
    unequal_because: str = ""  # the library's reason, where the weights can't be equal
    shape: Sequence[str] = ("--nodes", "2", "--gpus-per-node", "2")

    def lay_out(self, sources: Path, target: Path) -> tuple[Path, list[str]]:
        """Copy the program into a new folder, with its edits; return its script there, and the
        lines that its adoption added or changed. Raise EditError where an edit does not fit."""
        source = sources / self.repository.partition("/")[2]
        folder = Path(self.folder) if self.folder else Path(self.script).parent
        shutil.copytree(source / folder, target, ignore=shutil.ignore_patterns(".git"))
        added: list[str] = []
        for name in sorted({*self.here, *self.adopted}):
            path = target / name
            try:
                runnable = apply(self.here.get(name, ()), path.read_text())
                text = apply(self.adopted.get(name, ()), runnable)
            except EditError as error:
                raise EditError(f"{self.name}, {name}: {error}") from error
            path.write_text(text)
            added += new_lines(runnable, text)
        for name, content in self.files.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            octets = content if isinstance(content, bytes) else content.encode()
            (target / name).write_bytes(octets)
        return target / Path(self.script).relative_to(folder), added
