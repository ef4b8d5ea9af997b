"""What the operators of a cluster have from hpc-ddp: a mark on its jobs, a site file, limits."""

from __future__ import annotations

import pytest

from hpc_ddp import __version__
from hpc_ddp.launch.operators import comment_pairs


def test_jobs_say_which_version_has_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert comment_pairs(["--network=x", "--commentary"]) == [("comment", f"hpc-ddp/{__version__}")]
    assert comment_pairs(["--comment=mine"]) == []
    monkeypatch.setenv("SBATCH_COMMENT", "mine")  # sbatch takes a script's option over it
    assert comment_pairs([]) == []
