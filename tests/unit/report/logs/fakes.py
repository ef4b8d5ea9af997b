"""Logs of a run, line by line."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hpc_ddp.core.run_folder import RunFolder

NOW = time.time()


class Logs:
    """A run's logs, written line by line as its ranks and supervisors would; one second each."""

    def __init__(self, root: Path, name: str = "run") -> None:
        self.run = RunFolder(root / "n" / name).make()
        self.run.job_json.write_text("{}")
        self.second = 0

    def attempt(self, number: int) -> Logs:
        self.number = number
        self.run.attempt(number).path.mkdir()
        (self.run.attempt(number).path / "attempt.json").write_text("{}")
        return self.event("started", nodes=["a", "b"], job_id="7")

    def event(self, name: str, **fields: Any) -> Logs:
        line = {"time": NOW + self.second, "event": name, "attempt": self.number, **fields}
        with open(self.run.journal_folder / "batch.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        return self

    def say(self, text: str, *ranks: int, indexed: bool = True) -> Logs:
        """Have ranks (two a node) print a text, in the next second."""
        self.second += 1
        for rank in ranks:
            node = self.run.attempt(self.number).node("ab"[rank // 2])
            node.path.mkdir(exist_ok=True)
            with open(node.rank_log(rank), "a") as file:
                file.write(text)
            if indexed:
                size = node.rank_log(rank).stat().st_size
                with open(node.printed, "a") as file:
                    file.write(f"{NOW - 1000 + self.second:.3f} {rank} {size}\n")
        return self
