from __future__ import annotations

from pathlib import Path

import pytest

from unit.report.written_runs import Written


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path).event("submitted", backend="slurm", first_attempt=0)
