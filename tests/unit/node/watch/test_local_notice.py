"""Workers read their supervisor's word from its memory."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_ddp.node.watch.local_notice import LocalNotice


def refuse(name: bytes, flags: int) -> int:
    return -1


READ = "import sys; print(open(sys.argv[1]).read())"


def test_another_process_reads_what_was_written_last(monkeypatch: pytest.MonkeyPatch) -> None:
    notice = LocalNotice()
    path = notice.env()["HPC_DDP_LOCAL_NOTICE"]
    assert Path(path).read_text() == ""
    notice.write(end_time=1234567.0)
    notice.write(source="preemption")
    notice.write(end_time=12.0)
    read = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, check=True)
    monkeypatch.delattr(os, "memfd_create")  # conda's Python has no such function
    assert LocalNotice().env()
    assert json.loads(read.stdout) == {"end_time": 12.0, "source": "preemption"}


@pytest.mark.parametrize("library", [SimpleNamespace(), SimpleNamespace(memfd_create=refuse)])
def test_systems_without_files_in_memory_have_none(
    monkeypatch: pytest.MonkeyPatch, library: SimpleNamespace
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: library)
    notice = LocalNotice()
    notice.write(source="preemption")
    assert notice.env() == {}
