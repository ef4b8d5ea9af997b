"""The batch script's look at who owns what it is going to execute."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.file_owners import check_executable, check_kept_modes
from hpc_ddp.core.run_folder import RunFolder
from tests.skips import skip_or_fail

GOLDEN = Path(__file__).parent / "golden" / "plain.sbatch"
PARTS = (
    *("lib/node.py", "lib/hpc_ddp/batch.py", "code/0/train.py", "submitit/supervisor.pkl"),
    "job.sbatch",
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "a run"
    for part in (*PARTS, "checkpoints/step-1/w", "logs/slurm.out"):
        (run / part).parent.mkdir(parents=True, exist_ok=True)
        (run / part).touch(mode=0o644)
    for folder in (run, *run.rglob("*/")):
        folder.chmod(0o755 if folder.is_dir() else 0o644)
    return run


def check(run: Path, profile: str = "", **more: str) -> str:
    """Return what the script prints to stderr; '' where it would go on. `profile` are lines before
    it, and `more` are variables."""
    text = GOLDEN.read_text()
    begin = text.index("_end_of_wait() {")
    functions = text[begin : text.index("\n}\n", text.index("_check_owner() {")) + 3]
    env = {"PATH": os.environ["PATH"], "HPC_DDP_RUN": str(run), "_node": f"{run}/lib/node.py"}
    env |= more
    argv = ["/bin/bash", "-c", f"{profile}\n{functions}_check_owner"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert bool(done.returncode) == bool(done.stderr)
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


@pytest.mark.parametrize("part", [*PARTS, ".", "lib"])
def test_what_others_can_write_counts_where_they_can_enter(run: Path, part: str) -> None:
    """The submit's look at a run that it has written agrees."""
    assert check(run) == ""
    check_kept_modes(RunFolder(run))
    (run / part).chmod((run / part).stat().st_mode | 0o020)
    assert f"nothing is run of {run}/{part}: " in check(run)
    with pytest.raises(UsageError, match="does not keep permissions"):
        check_kept_modes(RunFolder(run))
    run.chmod(0o700)
    assert check(run) == ""
    check_kept_modes(RunFolder(run))


def test_what_a_script_leaves_with_the_umask_of_a_group_ends_no_requeue(run: Path) -> None:
    """A folder that the group can write: a file in it would be another user's."""
    for name in ("code/0/__pycache__", "lib/hpc_ddp/__pycache__"):
        (run / name).mkdir()
        (run / name).chmod(0o775)
    (run / "code" / "0" / "out.txt").touch()
    (run / "code" / "0" / "out.txt").chmod(0o664)
    (run / "code" / "0" / "link.py").symlink_to("out.txt")
    (run / "checkpoints" / "step-1" / "w").chmod(0o666)
    cached = run / "code" / "0" / "__pycache__" / "train.f-1.py311.1.nbc"  # of numba
    cached.touch(mode=0o664)
    cached.chmod(0o664)
    run.chmod(0o700)
    assert (check(run), cached.exists()) == ("", True)
    run.chmod(0o755)
    assert (check(run), cached.exists()) == ("", False)  # it is compiled anew
    check_kept_modes(RunFolder(run))


def test_what_a_containers_root_has_compiled_ends_no_requeue(run: Path) -> None:
    if os.geteuid():
        skip_or_fail("only root can give a file to another user")
    cached = run / "code" / "0" / "__pycache__" / "train.cpython-311.pyc"
    cached.parent.mkdir(mode=0o755)
    for mode in (0o700, 0o755):
        cached.touch(mode=0o644)
        os.chown(cached, 54321, -1)
        run.chmod(mode)
        assert (check(run), cached.exists()) == ("", False)
    cached.touch()
    os.chown(cached, 54321, -1)
    (run / "journal").mkdir()
    check_executable(RunFolder(run))
    assert not cached.exists()


def test_a_file_that_goes_while_it_is_looked_at_is_no_strangers(run: Path, tmp_path: Path) -> None:
    """Another task of the array, or Python beside what it compiles, has just removed it."""
    find = tmp_path / "find"
    find.write_text(
        f"#!/bin/sh\n[ -e {tmp_path}/again ] || echo ./lib/draft\ntouch {tmp_path}/again\n"
    )
    find.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert check(run, PATH=path) == ""
    assert (tmp_path / "again").exists()
    find.write_text("#!/bin/sh\necho ./lib/node.py\n")
    assert f"nothing is run of {run}/lib/node.py: " in check(run, PATH=path)


def test_a_task_runs_no_library_that_another_user_has_linked(run: Path) -> None:
    if os.geteuid():
        skip_or_fail("only root can give a file to another user")
    for task in ("task-1", "task-2"):
        (run / task / "checkpoints").mkdir(parents=True)
        (run / task / "lib").symlink_to("../lib")
    os.chown(run / "task-2" / "checkpoints", 54321, -1)  # data
    assert check(run, SLURM_ARRAY_TASK_ID="2") == ""
    assert check(run, SLURM_ARRAY_TASK_ID="3") == ""  # begins now
    os.chown(run / "task-2" / "lib", 54321, -1, follow_symlinks=False)
    assert check(run, SLURM_ARRAY_TASK_ID="1") == ""
    assert f"nothing is run of {run}/task-2/lib: " in check(run, SLURM_ARRAY_TASK_ID="2")


def test_a_task_that_goes_on_alone_runs_nothing_of_another_user(run: Path) -> None:
    """Its library and code are the array's."""
    if os.geteuid():
        skip_or_fail("only root can give a file to another user")
    (run / "task-2" / "logs").mkdir(parents=True)
    (run / "task-2" / "lib").symlink_to("../lib")
    alone = {"HPC_DDP_RUN": f"{run}/task-2", "SLURM_ARRAY_TASK_ID": "2"}
    assert check(run, **alone) == ""
    for part in ("lib/hpc_ddp/batch.py", "code/0/train.py"):
        os.chown(run / part, 54321, -1)
        assert f"nothing is run of {run}/{part}: " in check(run, **alone)
        os.chown(run / part, 0, -1)


def test_functions_of_a_profile_change_nothing(run: Path) -> None:
    names = ("cd", "find", "stat", "mktemp", "rm")
    profile = 'cd() { builtin cd "$@" && ls; }\n'
    profile += "".join(f"{name}() {{ echo {name}; }}\n" for name in names[1:])
    assert check(run, profile) == ""
    (run / "lib" / "node.py").chmod(0o664)
    assert "nothing is run of" in check(run, profile)
    assert not list((run / "logs").glob(".owner*"))


@pytest.mark.parametrize(
    ("folders", "expected"),
    [(":/a", "/a"), ("/a:", "/a"), ("/a::/b:::", "/a:/b"), ("/a:/b", "/a:/b"), ("", ""), (":", "")],
)
def test_an_empty_part_of_a_path_is_no_folder_that_others_can_write(
    tmp_path: Path, folders: str, expected: str
) -> None:
    """Python takes it for the working directory, and imports a colleague's random.py from there."""
    _, _, rest = GOLDEN.read_text().partition("_drop_empty_parts() {")
    function = "_drop_empty_parts() {" + rest.partition("\n}\n")[0] + "\n}\n"
    for mode, left in ((0o755, folders), (0o775, expected)):
        tmp_path.chmod(mode)
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": folders}
        text = f'{function}_drop_empty_parts\nset -u; printf %s "$PYTHONPATH${{LD_LIBRARY_PATH-}}"'
        argv = ["/bin/bash", "-c", text]
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.stdout == left
        assert done.stderr.startswith("hpc-ddp: the empty part") == (left != folders), done.stderr
