"""Golden files are accepted by hand, never in CI."""

from __future__ import annotations

import pytest

from tests.accept import is_accepted


def test_golden_files_are_not_accepted_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_DDP_ACCEPT", "1")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(AssertionError, match="HPC_DDP_ACCEPT is set in CI"):
        is_accepted()
    monkeypatch.delenv("CI")
    assert is_accepted()
