"""The facts of damaged run folders."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.report.explain.explain import explain_run
from hpc_ddp.report.explain.explanation import paragraph
from unit.report.written_runs import (
    GLOO_CLOSED,
    SYNTAX,
    Written,
)

EXAMPLES = int(os.environ.get("HPC_DDP_SOAK", "30"))


def _whole(root: Path) -> Written:
    """Return a run in which about everything has happened."""
    whole = Written(root).event("submitted", backend="slurm", first_attempt=0)
    whole.attempt(0, steps=20, saved=12).event("stopped", step=20, reason="notice")
    whole.verdict("preempted", "requeue")
    whole.attempt(1, steps=40, saved=30)
    whole.event("failed", 1, rank=3, node="n2", step=40, error="HangError: x", traceback="y")
    whole.failure("HangError: no step for 9 s at step 20; stacks in x", number=1)
    whole.run.attempt(1).node("n2").stacks(3).write_text('Thread 0x1:\n  File "t.py", line 4 in f')
    whole.run.attempt(1).node("n2").rank_log(3).write_text(SYNTAX)
    return whole.said(GLOO_CLOSED)


def _paths(folder: Path) -> Sequence[Path]:
    return sorted(path for path in folder.rglob("*"))


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32))
def test_it_never_raises_on_a_damaged_folder(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    if not (tmp_path / "whole").exists():
        _whole(tmp_path / "whole")
    folder = shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
    run = RunFolder(next(folder.glob("*/*")))
    for _ in range(draw.randint(1, 6)):
        _damage(draw, draw.choice(_paths(run.path)))
    found = explain_run(run)
    assert found.kind
    assert paragraph(found)
    json.dumps(found.to_dict())
    shutil.rmtree(folder)


_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    1e300,
    float("nan"),
    "",
    "x",
    "../..",
    [],
    [1],
    {},
    {"rank": "x"},
)


def _damage(draw: random.Random, path: Path) -> None:
    """Cut a file short, change its bytes or a value in it, or put something else in its place."""
    if path.is_dir():
        (path / draw.choice(["attempt-x", "attempt-9", "task-z", "step-5", "a.jsonl"])).mkdir(
            exist_ok=True
        )
    elif path.exists():
        way = draw.randrange(5)
        data = path.read_bytes()
        at = draw.randrange(len(data) + 1)
        if way == 0:
            path.write_bytes(data[:at])
        elif way == 1:
            path.write_bytes(data[:at] + draw.randbytes(3) + data[at + 3 :])
        elif way == 2:
            path.unlink()
        elif way == 3:
            path.unlink()
            path.mkdir()
        else:
            _change_a_value(draw, path, data)


def _change_a_value(draw: random.Random, path: Path, data: bytes) -> None:
    lines = data.decode(errors="replace").splitlines()
    try:
        whole = path.suffix != ".jsonl"
        at = 0 if whole or not lines else draw.randrange(len(lines))
        value = json.loads("\n".join(lines) if whole else lines[at])
        value[draw.choice(list(value))] = draw.choice(_VALUES)
    except (ValueError, TypeError, IndexError, AttributeError):
        return
    lines[at : len(lines) if whole else at + 1] = [json.dumps(value)]
    path.write_text("\n".join(lines) + "\n")


def test_a_foreign_folder(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("[1]")
    assert explain_run(RunFolder(tmp_path)).kind == "rendered"
