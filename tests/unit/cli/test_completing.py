"""Names for the Tab key."""

from __future__ import annotations

from pathlib import Path

from hpc_ddp.cli.completing import runs
from hpc_ddp.cli.main import main
from hpc_ddp.core.run_folder import RunFolder


def test_names_that_a_shell_would_read_are_not_offered(tmp_path: Path, run: RunFolder) -> None:
    (run.root / "best;id>PWNED;#").mkdir()
    (run.root / "train" / "$(id)").mkdir()
    parent = main.make_context("hpc-ddp", ["status"], resilient_parsing=True)
    parent.params["runs_dir"] = str(run.root)
    assert [suggestion.value for suggestion in runs(parent, "")] == [
        "train",
        "20260101-000000-abcd",
    ]
