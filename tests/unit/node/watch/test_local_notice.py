"""Workers read their supervisor's word from its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_ddp.node.watch.local_notice import LocalNotice

READ = "import sys; print(open(sys.argv[1]).read())"


def test_another_process_reads_what_was_written_last() -> None:
    notice = LocalNotice()
    path = notice.env()["HPC_DDP_LOCAL_NOTICE"]
    assert Path(path).read_text() == ""
    notice.write(end_time=1234567.0)
    notice.write(source="preemption")
    notice.write(end_time=12.0)
    read = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, check=True)
    assert json.loads(read.stdout) == {"end_time": 12.0, "source": "preemption"}


def test_other_systems_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    notice = LocalNotice()
    notice.write(source="preemption")
    assert notice.env() == {}
