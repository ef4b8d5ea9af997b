"""The batch script's look at who owns what it is going to execute."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.skips import skip_or_fail

GOLDEN = Path(__file__).parent / "golden" / "plain.sbatch"
PARTS = ("lib/node.py", "lib/hpc_ddp/batch.py", "code/0/train.py", "submitit/supervisor.pkl")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "a run"
    for part in (*PARTS, "checkpoints/step-1/w", "logs/slurm.out"):
        (run / part).parent.mkdir(parents=True, exist_ok=True)
        (run / part).touch(mode=0o644)
    for folder in (run, *run.rglob("*/")):
        folder.chmod(0o755 if folder.is_dir() else 0o644)
    return run


def check(run: Path) -> str:
    """Return what the script prints to stderr; '' where it would go on."""
    begin, _, rest = GOLDEN.read_text().partition("check_owner() {")
    function = "check_owner() {" + rest.partition("\n}\n")[0] + "\n}\n"
    env = {"PATH": os.environ["PATH"], "HPC_DDP_RUN": str(run), "node": f"{run}/lib/node.py"}
    argv = ["/bin/bash", "-c", f"{function}check_owner"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert bool(done.returncode) == bool(done.stderr)
    assert begin
    return done.stderr


@pytest.mark.parametrize("part", [*PARTS, "lib/hpc_ddp", "code", "code/0"])
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_nothing_of_another_user_is_run(run: Path, part: str, mode: int) -> None:
    """Also in a run that is closed by now."""
    if os.geteuid():
        skip_or_fail("only root can give a file to another user")
    run.chmod(mode)
    assert check(run) == ""
    os.chown(run / part, 54321, -1)
    assert f"nothing is run of {run}/{part}: " in check(run)


@pytest.mark.parametrize("part", PARTS)
def test_what_others_can_write_counts_where_they_can_enter(run: Path, part: str) -> None:
    (run / part).chmod(0o664)
    assert f"nothing is run of {run}/{part}: " in check(run)
    run.chmod(0o700)
    assert check(run) == ""


def test_what_a_script_leaves_with_the_umask_of_a_group_ends_no_requeue(run: Path) -> None:
    """A folder that the group can write: a file in it would be another user's."""
    for name in ("code/0/__pycache__", "lib/hpc_ddp/__pycache__"):
        (run / name).mkdir()
        (run / name).chmod(0o775)
    (run / "code" / "0" / "out.txt").touch()
    (run / "code" / "0" / "out.txt").chmod(0o664)
    (run / "code" / "0" / "link.py").symlink_to("out.txt")
    (run / "checkpoints" / "step-1" / "w").chmod(0o666)
    assert check(run) == ""
