"""The time that an undisturbed run may take, and the scripts that a drill refuses early."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.journal.events import FirstStep, WorkerStarted
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.submission.drill import drill as runs
from hpc_ddp.submission.drill.result import DrillResult


def test_steps_without_start_are_refused_while_the_script_runs(tmp_path: Path) -> None:
    drill = runs._Drill.__new__(runs._Drill)
    drill._result = DrillResult("finetune.py", tmp_path)
    run = RunFolder(tmp_path / "undisturbed" / "1").make()
    assert drill._start_limit_s(run) == runs.START_S
    journal = run.journal("rank-0", 0)
    journal.write(FirstStep(1, 1, ["local-0"]))
    with pytest.raises(UsageError, match=r"finetune\.py has not called start\(\)") as refusal:
        drill._start_limit_s(run)
    assert "docs/other-libraries.md" in str(refusal.value.hint)
    journal.write(WorkerStarted(None, 1.0, None, None))
    assert drill._start_limit_s(run) == math.inf
