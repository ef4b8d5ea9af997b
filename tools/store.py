"""Results that outlive the machine: a text file in docs/results, one JSON object on each line.

Each result has a row (what was run) and a commit (what it was run on). The newest result of a row
counts. Lines are appended and synced one by one, so a kill loses the line that was being written,
and that line is ignored when the file is read.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
RESULTS = REPO / "docs" / "results"
# What outlives a checkout: installed packages, other versions of Slurm, working copies.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpc-ddp"
# A commit that changes none of these (of docs, of results) leaves results valid.
RESULTS_DEPEND_ON = (
    *("hpc_ddp", "templates", "jobs", "tests", "tools"),
    *("pyproject.toml", "Makefile", "constraints.txt"),
)
MISSING_SHOWN = 5

Line = dict[str, Any]


class ToolError(Exception):
    """A tool can't do what it was asked for; the error's text is printed as it is."""


def git(*words: str, folder: Path = REPO) -> str:
    """Return what a git command prints; raise ToolError where it fails."""
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)
    if done.returncode:
        raise ToolError(f"git {words[0]} failed: {done.stderr.strip()}")
    return done.stdout


def current_commit(folder: Path = REPO) -> str:
    """Return the last commit, in 12 digits, that changed something on which results depend."""
    paths = [path for path in RESULTS_DEPEND_ON if (folder / path).exists()]
    # Of a fixed length: git's own choice differs between clones.
    words = ("log", "-1", "--abbrev=12", "--format=%h", "--", *paths)
    return git(*words, folder=folder).strip()


def uncommitted_changes(folder: Path = REPO) -> list[str]:
    """Return the files on which results depend and which differ from the commit."""
    paths = [path for path in RESULTS_DEPEND_ON if (folder / path).exists()]
    status = git(
        "status", "--porcelain", "-z", "--untracked-files=all", "--", *paths, folder=folder
    )
    return [entry[3:] for entry in status.split("\0") if entry]


def require_clean_tree(folder: Path = REPO) -> None:
    """Raise ToolError where there are uncommitted changes, so that a result would belong to no
    commit."""
    if changes := uncommitted_changes(folder):
        raise ToolError(
            f"{len(changes)} files have uncommitted changes ({', '.join(changes[:3])}, …), so a "
            "result would belong to no commit: commit first, or keep none (of make: DIRTY=1)"
        )


@dataclass
class Store:
    """The results of one tool, in a file. Without a path they are kept only as long as the process
    runs."""

    path: Path | None

    def __post_init__(self) -> None:
        self._lines = list(_read(self.path)) if self.path and self.path.exists() else []

    def lines(self) -> list[Line]:
        """Return all results, oldest first."""
        return list(self._lines)

    def newest(self) -> dict[str, Line]:
        """Return the newest result of each row."""
        return {line["row"]: line for line in self._lines}

    def append(self, line: Line) -> None:
        """Add a result, which has a ``row`` and a ``commit``; it is on the disk when this
        returns."""
        assert {"row", "commit"} <= line.keys()
        self._lines.append(line)
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a kill cut the last line short
                    file.write(b"\n")
            file.write(f"{_text(line)}\n".encode())
            file.flush()
            os.fsync(file.fileno())

    def retain(self, wanted: Callable[[Line], bool]) -> None:
        """Keep, of each row, only the newest of the results for which `wanted` is true. The file is
        written anew where that drops any."""
        newest = {line["row"]: index for index, line in enumerate(self._lines) if wanted(line)}
        kept = [self._lines[index] for index in sorted(newest.values())]
        if kept != self._lines:
            self.rewrite(kept)

    def rewrite(self, lines: Sequence[Line]) -> None:
        """Replace all results; the file is replaced by a rename."""
        self._lines = list(lines)
        if self.path is not None:
            replace_text(self.path, "".join(f"{_text(line)}\n" for line in lines))


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.new")
    draft.write_text(text)
    draft.replace(path)


def _text(line: Line) -> str:
    return json.dumps(line, ensure_ascii=False, separators=(", ", ": "))


def _read(path: Path) -> Iterable[Line]:
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # cut short by a kill
        if isinstance(line, dict) and {"row", "commit"} <= line.keys():
            yield line


@dataclass
class Completeness:
    """How many of the wanted rows have a result of `commit`, or of an older one, and which have
    none."""

    current: int
    older: int
    missing: list[str]
    commit: str

    @property
    def is_whole(self) -> bool:
        return not self.missing and not self.older and self.current > 0

    def __str__(self) -> str:
        total = self.current + self.older + len(self.missing)
        if self.is_whole:
            return f"{total} of {total} rows, all of commit {self.commit}"
        parts = [f"{self.current} of {total} rows at commit {self.commit}"]
        if self.older:
            parts.append(f"{self.older} of an older commit")
        if self.missing:
            more = len(self.missing) - MISSING_SHOWN
            names = ", ".join(self.missing[:MISSING_SHOWN])
            parts.append(f"missing: {names}{f' and {more} more' if more > 0 else ''}")
        return "; ".join(parts)


def completeness(
    wanted: Iterable[str],
    results: dict[str, Line],
    commit: str,
    done: Callable[[Line], bool] | None = None,
) -> Completeness:
    """Compare the rows that are wanted with `results`. A result for which `done` is false counts as
    missing."""
    current = older = 0
    missing = []
    for row in wanted:
        line = results.get(row)
        if line is None or (done and not done(line)):
            missing.append(row)
        elif line["commit"] == commit:
            current += 1
        else:
            older += 1
    return Completeness(current, older, missing, commit)
