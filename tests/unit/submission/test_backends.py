"""Runs are started by their back-end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_ddp.submission import backends
from unit.fakes import raise_disk_full
from unit.submission.fakes import prepare_run


@pytest.mark.parametrize("is_new", [True, False])
def test_a_full_disk_leaves_no_new_run_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    prepared = prepare_run(tmp_path)
    monkeypatch.setattr(backends, "render", raise_disk_full)
    with pytest.raises(OSError, match="No space left"):
        backends.start(replace(prepared, is_new=is_new))
    assert prepared.run.path.exists() is not is_new


def test_the_submitit_task_looks_for_no_module_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Colleagues may write there, and Python would take their random.py."""
    monkeypatch.setattr("submitit.SlurmExecutor.affinity", lambda *_: 1)
    text = backends.SubmititBackend().script(prepare_run(tmp_path))
    (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
    assert "/submitit/core/_submit.py" in line
    assert " -m " not in line
    # What modules and set-up lines have put there stays, behind the run's own library.
    assert "/lib${PYTHONPATH:+:$PYTHONPATH} " in line
