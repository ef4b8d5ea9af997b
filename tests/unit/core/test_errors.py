"""Errors carry a hint and an exit code; misspelt words get a suggestion."""

from __future__ import annotations

from hpc_ddp.core.errors import HpcDdpError, UsageError, closest


def test_errors_have_exit_codes_hints_and_suggestions() -> None:
    assert closest("slrum", ("slurm", "local")) == ", did you mean 'slurm'?"
    assert closest("zzz", ("slurm", "local")) == ""
    assert (HpcDdpError("x").exit_code, UsageError("x").exit_code) == (1, 2)
    assert (HpcDdpError("x", hint="y").hint, HpcDdpError("x").message) == ("y", "x")
