"""The tables of docs/troubleshooting.md are those that `hpc-ddp explain` uses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hpc_ddp.report.explain.patterns import FAILURES, PENDING_REASONS
from tests.accept import is_accepted

PAGE = Path(__file__).parents[4] / "docs" / "troubleshooting.md"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _filled(text: str, name: str, table: str) -> str:
    pattern = rf"(<!-- {name}: [^>]*-->\n).*?(<!-- /{name} -->)"
    new, count = re.subn(pattern, lambda match: f"{match[1]}{table}{match[2]}", text, flags=re.S)
    assert count == 1, f"the page has {count} places for the table of {name}"
    return new


def _words(text: str) -> str:
    """Fill in what `explain` would of a run."""
    known = {"again": "`hpc-ddp submit --run RUN`", "logs": "`hpc-ddp logs RUN --rank 3`"}
    known |= {"python": "the job's Python", "job": "JOB"}
    text = re.sub(r"\{(\w+)\}", lambda match: known.get(match[1], "…"), text)
    return text.replace("<", "&lt;").replace("*", "\\*")


def _reason(pattern: str) -> str:
    """Return a pattern of Slurm's reasons for a reader."""
    pattern = re.sub(r"\(\?P<\w+>|\)|\$$", "", pattern).replace(r"\w+?", "…").replace(r"\w*", "…")
    pattern = re.sub(r"\(\w+\??$|\(|\?|\.\*", "", pattern.partition("|$")[0])
    return ", ".join(f"`{each}`" for each in pattern.split("|") if each)


def test_the_tables_are_true() -> None:
    """To accept a change, run with ``HPC_DDP_ACCEPT=1``."""
    causes = [(cause.kind, _words(cause.words), _words(cause.hint)) for cause in FAILURES]
    reasons = [
        (_reason(row.pattern), _words(row.words), _words(row.hint)) for row in PENDING_REASONS
    ]
    text = PAGE.read_text()
    new = _filled(text, "causes", _table(("kind", "what happened", "what to do"), causes))
    new = _filled(new, "reasons", _table(("Slurm's reason", "it is", "what to do"), reasons))
    if is_accepted():
        PAGE.write_text(new)
    assert new == PAGE.read_text()
