"""Facts are gathered also from damaged run folders."""

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
from unit.report.written_runs import GLOO_CLOSED, SYNTAX, Written

EXAMPLES = int(os.environ.get("HPC_DDP_SOAK", "30"))


def _whole(root: Path) -> Written:
    """Return a run in which about everything has happened."""
    written = Written(root).event("submitted", backend="slurm", first_attempt=0)
    written.attempt(0, steps=20, saved=12).event("stopped", step=20, reason="notice")
    written.verdict("preempted", "requeue")
    written.attempt(1, steps=40, saved=30)
    written.event("failed", 1, rank=3, node="n2", step=40, error="HangError: x", traceback="y")
    written.failure("HangError: no step for 9 s at step 20; stacks in x", number=1)
    written.run.attempt(1).node("n2").stacks(3).write_text(
        'Thread 0x1:\n  File "t.py", line 4 in f'
    )
    written.run.attempt(1).node("n2").rank_log(3).write_text(SYNTAX)
    return written.said(GLOO_CLOSED)


def _paths(folder: Path) -> Sequence[Path]:
    return sorted(path for path in folder.rglob("*"))


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32))
def test_a_damaged_run_folder_is_explained(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    if not (tmp_path / "whole").exists():
        _whole(tmp_path / "whole")
    # A failed example leaves its folder behind, and hypothesis runs it again.
    shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
    folder = shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
    run = RunFolder(next(folder.glob("*/*")))
    for _ in range(draw.randint(1, 6)):
        _damage(draw, draw.choice(_paths(run.path)))
    explanation = explain_run(run)
    assert explanation.kind
    assert paragraph(explanation)
    json.dumps(explanation.to_dict())


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
        content = path.read_bytes()
        at = draw.randrange(len(content) + 1)
        if way == 0:
            path.write_bytes(content[:at])
        elif way == 1:
            path.write_bytes(content[:at] + draw.randbytes(3) + content[at + 3 :])
        elif way == 2:
            path.unlink()
        elif way == 3:
            path.unlink()
            path.mkdir()
        else:
            _change_a_value(draw, path, content)


def _change_a_value(draw: random.Random, path: Path, content: bytes) -> None:
    lines = content.decode(errors="replace").splitlines()
    try:
        is_one_value = path.suffix != ".jsonl"
        at = 0 if is_one_value or not lines else draw.randrange(len(lines))
        value = json.loads("\n".join(lines) if is_one_value else lines[at])
        value[draw.choice(list(value))] = draw.choice(_VALUES)
    except (ValueError, TypeError, IndexError, AttributeError):
        return
    lines[at : len(lines) if is_one_value else at + 1] = [json.dumps(value)]
    path.write_text("\n".join(lines) + "\n")


def test_a_foreign_folder_is_explained(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("[1]")
    assert explain_run(RunFolder(tmp_path)).kind == "rendered"
