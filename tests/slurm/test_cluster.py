"""The tests' own cluster leaves nothing behind, whatever becomes of the process that has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cluster_machine import available, folder_of

from tests.waiting import wait_until

HOLDER = """
import os, signal
from cluster import Cluster
print(Cluster.up().instance, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.more
@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_a_killed_holder_leaves_no_cluster() -> None:
    holder = subprocess.run(
        [sys.executable, "-c", HOLDER], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    folder = folder_of(int(holder.stdout))
    wait_until(lambda: not folder.with_suffix(".lock").exists(), "the end of the cluster")
    assert not folder.exists()
