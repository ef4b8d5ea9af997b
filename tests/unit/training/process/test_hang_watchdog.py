"""The record of the last collectives, which a hanging rank dumps."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hpc_ddp.training.process import hang_watchdog as watchdog


def test_a_torch_without_a_record_of_a_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.9 takes no backend's name, and its TypeError has the function's signature."""

    def dump(*, onlyActive: bool = False) -> bytes:
        return b"record"

    backend = SimpleNamespace(name=lambda: "xccl")
    group = SimpleNamespace(WORLD=SimpleNamespace(_get_backend=lambda device: backend))
    monkeypatch.setattr(watchdog, "dist", SimpleNamespace(group=group))
    monkeypatch.setattr(watchdog, "c10d", SimpleNamespace(_dump_fr_trace=dump))
    with pytest.raises(NotImplementedError, match=r"torch \S+ records no collectives of xccl$"):
        watchdog.flight_recorder(torch.device("cpu"))
    backend.name = lambda: "gloo"
    assert watchdog.flight_recorder(torch.device("cpu")) == b"record"


def test_the_stack_of_a_hang_begins_with_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked worker runs the script below a frame of hpc-ddp, `python -m` below runpy's."""
    script = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    error = watchdog.HangError("no step for 2 s")
    code = compile(
        "def train():\n    stack = show()\n    return stack\ntext = train()", "t.py", "exec"
    )
    script.__dict__["show"] = lambda: watchdog._traceback_of_main(error)
    exec(code, vars(script))
    lines = script.__dict__["text"].splitlines()
    assert lines[:3] == [
        "Traceback (most recent call last):",
        '  File "t.py", line 4, in <module>',
        '  File "t.py", line 2, in train',
    ]
    assert lines[-1] == "HangError: no step for 2 s"
