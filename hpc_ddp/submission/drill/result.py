"""The result of a drill, as a table and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_ddp.submission.drill.compare import Difference


@dataclass(frozen=True)
class Row:
    """A row of the table: a disturbance, as text (`done`), and the outcome of the attempt after it.

    `survived`: the attempt went as it has to. `resumed_from` is the step of the checkpoint that it
    loaded, None where it loaded none; `passed_over` are damaged checkpoints that it did not load,
    as ``NAME: problem``. `difference` is the first one to the undisturbed run, None without any.
    """

    done: str
    survived: bool
    resumed_from: int | None = None
    passed_over: tuple[str, ...] = ()
    difference: Difference | None = None


@dataclass
class DrillResult:
    """The result of a drill of `script`, a path; `folder` has the drill's runs, and `steps` is the
    number of steps of the undisturbed one.

    `verdict` is ``right``, ``sums`` (right but for the order of sums), ``wrong``, ``unsteady`` (two
    undisturbed runs differ already), or ``broken`` (the run did not go on). `why` and `hint`
    explain the verdict; `notes` are sentences on what was not tried.
    """

    script: str
    folder: Path
    steps: int = 0
    verdict: str = "right"
    why: str = ""
    hint: str = ""
    notes: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the script resumes right; a difference by rounding counts as right."""
        return self.verdict in ("right", "sums")

    def text(self) -> str:
        """Return the result as lines of text: a table of the disturbances, the notes, the verdict
        and, if there is one, a hint."""
        lines = [" ".join(cells).rstrip() for cells in _pad_cells([HEAD, *map(_cells, self.rows)])]
        lines += [f"note: {note}" for note in self.notes]
        name = Path(self.script).name
        verdict = {
            "right": f"{name} resumes right: every step is equal, bit for bit, and so are the final"
            " weights",
            "sums": f"{name} resumes right, up to rounding: {self.why}",
            "wrong": f"{name} does NOT resume right. {self.why}",
            "unsteady": f"{name} is not reproducible: {self.why}",
            "broken": f"{name} does NOT go on. {self.why}",
        }[self.verdict]
        lines += ["", verdict]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON, with the attributes and ``ok``. ``folder`` is None for a good
        result, after which the folder is removed."""
        return {**asdict(self), "ok": self.ok, "folder": str(self.folder) if not self.ok else None}


HEAD = ["done", "survived", "went on from", "state"]


def _cells(row: Row) -> list[str]:
    """Return the cells of a row, in the order of `HEAD`; the last two are '' without a resume."""
    if row.resumed_from is None:
        return [row.done, "yes" if row.survived else "NO", "", ""]
    damaged = ", ".join(text.partition(":")[0] for text in row.passed_over)
    difference, state = row.difference, "equal"
    if difference is not None:
        judgement = "rounding" if difference.is_rounding else "DIFFERS"
        state = f"{judgement}: {difference.label} from step {difference.step}"
    return [
        row.done,
        "yes" if row.survived else "NO",
        f"step {row.resumed_from}" + (f", past {damaged}" if damaged else ""),
        state,
    ]


def _pad_cells(rows: Sequence[list[str]]) -> list[list[str]]:
    """Return the rows with each cell padded by blanks to one more than its column's width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [[cell.ljust(n + 1) for cell, n in zip(row, widths, strict=True)] for row in rows]
