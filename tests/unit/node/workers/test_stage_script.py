"""`stage.sh` where something goes wrong on a node: nothing of it ends a start, or stays behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_ddp.node.workers.staging import removal
from tests.waiting import wait_until
from unit.node.workers.test_staging import Environment, Stage, environment, packed, parcel, stage

__all__ = ["environment", "packed", "parcel", "stage"]
REPO = Path(__file__).parents[4]
SUPERVISOR = f"""\
import os, sys, time
from pathlib import Path
if sys.argv[1] == "workers.staging.keeper":
    Path(__file__).with_name("draft").write_text(str(os.getpid()))
    Path(__file__).with_name("draft").rename(Path(__file__).with_name("keeper"))
    time.sleep(600)
sys.path.insert(0, {str(REPO)!r})
from hpc_ddp.node.workers.staging import removal
removal.STAGE_SH = ("bash", "-p", sys.argv[2])
print("up", flush=True)
removal.leave_tree(is_hurried=sys.stdin.read(1) == "n")
"""


def _wrap(stage: Stage, name: str, lines: str) -> dict[str, str]:
    """Put a program before the real one of this name, which the `lines` may exec as $real."""
    folder = stage.top / "bin"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\nreal={shutil.which(name)}\n{lines}\n")
    (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{stage.environ['PATH']}"}


def _bring(stage: Stage, **environ: str) -> Path:
    done = stage.call("bring", stage.python, stage.part, **environ)
    assert done.returncode == 0, done.stderr
    return stage.tree


def _supervisor(stage: Stage) -> tuple[Path, list[str | Path], dict[str, str]]:
    """Return the tree, and command and environment of a supervisor that starts from it."""
    (stage.run / "lib" / "node.py").write_text(SUPERVISOR)
    tree = _bring(stage)
    words = ("-E", "-s", stage.run / "lib" / "node.py", "supervisor", stage.script)
    argv: list[str | Path] = ["bash", stage.script, "run", stage.python, *words]
    return tree, argv, stage.environ | {"HPC_DDP_BROUGHT": stage.part}


def test_a_tree_that_no_longer_starts_is_left_out(packed: Stage) -> None:
    python = _bring(packed) / packed.python.resolve().relative_to("/")
    if not python.exists():  # the system's, which is a link
        python = packed.tree / packed.python.relative_to("/")
    python.unlink()
    python.write_bytes(b"\x7fELF" + bytes(100))
    python.chmod(0o755)
    done = packed.call("run", packed.python, "-c", "print('up')", HPC_DDP_BROUGHT=packed.part)
    assert (done.returncode, done.stdout) == (0, "up\n")
    assert "does not start" in done.stderr


@pytest.mark.parametrize("is_old", [False, True])
def test_a_wrapper_of_python_reads_no_parcel(packed: Stage, is_old: bool) -> None:
    """Each node would read and unpack gigabytes at each start, to find that it is not in them."""
    wrapper, label = packed.top / "wrapper", packed.parcel.parcel / "label"
    wrapper.write_text(f'#!/bin/sh\nexec nice {packed.python} "$@"\n')
    wrapper.chmod(0o755)
    if is_old:  # of the run's hpc-ddp before it was renewed
        lines = label.read_text().splitlines(keepends=True)
        label.write_text("".join(line for line in lines if not line.startswith("programs")))
    environ = _wrap(packed, "tar", f'touch {packed.top}/read; exec $real "$@"')
    done = packed.call("bring", wrapper, packed.part, **environ)
    assert (done.returncode, "wrapper is not in the parcel" in done.stderr) == (1, True)
    assert (packed.top / "read").exists() == is_old
    if not is_old:
        done = packed.call("bring", "/no/such/python", packed.part, **environ)
        assert "/no/such/python is not in the parcel" in done.stderr
        assert not (packed.top / "read").exists()
        link = packed.top / "current"
        link.symlink_to(packed.env)
        assert packed.call("bring", link / "bin" / "python", packed.part).returncode == 0


def test_a_start_from_the_tree_marks_its_attempt(packed: Stage) -> None:
    logs = packed.run / "logs" / "attempt-0"
    packed.call("run", packed.python, "-c", "", HPC_DDP_BROUGHT="no")
    assert not [*logs.glob("staged-*")]
    packed.start()
    assert len([*logs.glob("staged-*")]) == 1


def test_a_start_that_can_not_be_marked_is_not_staged(packed: Stage) -> None:
    shutil.rmtree(packed.run / "logs")
    words, line = packed.start()
    assert words[0] == str(packed.env)
    assert "can't be written" in line


@pytest.mark.parametrize(
    ("memory", "is_taken"),
    [
        ({}, False),
        ({"SLURM_MEM_PER_NODE": "300"}, False),
        ({"SLURM_MEM_PER_NODE": "700"}, True),
        ({"SLURM_MEM_PER_CPU": "100", "SLURM_CPUS_ON_NODE": "2"}, False),
        ({"SLURM_MEM_PER_CPU": "100", "SLURM_CPUS_ON_NODE": "7"}, True),
    ],
    ids=str,
)
def test_memory_is_taken_where_the_job_has_plenty(
    stage: Stage, memory: dict[str, str], is_taken: bool
) -> None:
    assert _finds_folder(stage, "/dev/shm", 100 << 20, memory) == is_taken


def test_a_folder_that_another_job_removes_while_empty_is_made_again(packed: Stage) -> None:
    """As each job does at its end, on a node that several share."""
    mark = packed.top / "removed"
    lines = f'$real "$@"; [[ $1 != -m || -e {mark} ]] || {{ touch {mark}; rmdir "$3"; }}'
    assert _bring(packed, **_wrap(packed, "mkdir", lines)).is_relative_to(packed.near)
    assert mark.exists()


@pytest.mark.parametrize(("share", "is_taken"), [(0.6, False), (0.3, True)])
def test_half_of_a_disk_stays_free(stage: Stage, share: float, is_taken: bool) -> None:
    status = os.statvfs(stage.near)
    size = int(share * status.f_bavail * status.f_bsize)
    plenty = {"SLURM_MEM_PER_NODE": "999999999"}  # where the disk of the test is memory
    if subprocess.run(["stat", "-fc", "%T", stage.near], stdout=-1).stdout.strip() in (
        b"tmpfs",
        b"overlayfs",
    ):
        size //= 2
    assert _finds_folder(stage, str(stage.near), size, plenty) == is_taken


def _finds_folder(stage: Stage, place: str, size: int, environ: dict[str, str]) -> bool:
    lines = f"source {stage.script} none x; places=({place}); find_folder {size} && echo $folder"
    argv = ["bash", "-c", lines]
    text = subprocess.run(argv, env=stage.environ | environ, capture_output=True, text=True).stdout
    return text != ""


def test_a_task_unpacks_nothing(packed: Stage) -> None:
    """Inside a preflight or a rendezvous it would be late."""
    done = packed.call("run", packed.python, "-c", "print('up')", HPC_DDP_BROUGHT=packed.part)
    assert done.stdout == "up\n"
    assert not [*packed.near.glob("*/*/environment-*")]


def test_a_dead_reader_does_not_stop_the_unpacking(packed: Stage) -> None:
    """The one of a named pipe, killed before it has opened it, had its writer wait for ever."""
    lines = (
        "for pid in $(cat /proc/$PPID/task/$PPID/children); do\n"
        '[ "$pid" != $$ ] && [ "$(cat /proc/$pid/comm)" = bash ] && kill -9 $pid\ndone\n'
        'exec $real "$@"'
    )
    environ = packed.environ | _wrap(packed, "tee", lines)
    argv: list[str | Path] = ["bash", packed.script, "bring", packed.python, packed.part]
    task = subprocess.Popen(argv, env=environ, start_new_session=True)
    try:
        task.wait(timeout=60)
    finally:
        if task.poll() is None:
            os.killpg(task.pid, 9)


def test_nothing_is_removed_while_it_is_unpacked(packed: Stage) -> None:
    lines = f'env PATH=$PATH bash {packed.script} remove\nexec $real "$@"'
    _bring(packed, **_wrap(packed, "tar", lines))
    words, _ = packed.start()
    assert words[0].startswith(str(packed.tree))


def test_a_folder_that_is_removed_before_it_is_locked_is_made_anew(packed: Stage) -> None:
    once, gone = packed.top / "once", f"{packed.folder}.gone"
    lines = f'[ -e {once} ] || {{ touch {once}; mv {packed.folder} {gone}; }}; exec $real "$@"'
    tree = _bring(packed, **_wrap(packed, "flock", lines))
    assert tree.parent == packed.folder
    assert not [*Path(gone).iterdir()]


def test_the_last_supervisor_of_a_node_removes_the_tree(packed: Stage) -> None:
    tree, argv, environ = _supervisor(packed)
    pipe = subprocess.PIPE
    tasks = [
        subprocess.Popen(argv, env=environ, text=True, stdin=pipe, stdout=pipe) for _ in range(2)
    ]
    for task in tasks:
        assert task.stdout
        assert task.stdout.readline() == "up\n"
    wait_until((packed.run / "lib" / "keeper").exists, "the keeper")
    tasks[0].communicate("x")
    assert tree.exists()
    tasks[1].communicate("x")
    assert [*packed.near.iterdir()] == []
    # It would miss what it imports.
    assert not Path("/proc", (packed.run / "lib" / "keeper").read_text()).exists()


def test_a_tree_stays_for_another_start_of_the_attempt(packed: Stage) -> None:
    (packed.run / "lib" / "node.py").write_text(SUPERVISOR)
    tree = _bring(packed)
    (packed.run / "logs" / "attempt-0" / "port-taken").touch()
    words = ("-E", "-s", packed.run / "lib" / "node.py", "supervisor", packed.script)
    packed.call("run", packed.python, *words, HPC_DDP_BROUGHT=packed.part)
    assert tree.exists()


def test_leftovers_are_removed_whatever_they_are(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(stage.near))
    top = stage.folder.parent
    top.mkdir(mode=0o700)
    for name in ("a", "b", "c", "locked", "young"):
        (top / name).mkdir()
    (top / "b" / "run").mkdir()  # no file
    (top / "a" / "run").write_text(f"{stage.run}\n")
    for name in ("a", "b", "c", "locked"):
        os.utime(top / name, (1e9, 1e9))
    descriptor = os.open(top / "locked", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    removal.run_stage_script("clean")
    os.close(descriptor)
    assert sorted(path.name for path in top.iterdir()) == ["locked", "young"]


def test_all_nodes_start_from_the_tree_or_none(packed: Stage) -> None:
    _bring(packed)
    done = packed.call("run", packed.python, "-c", "import sys; print(sys.prefix)")
    assert done.stdout == f"{packed.env}\n"


@pytest.mark.parametrize("is_turned", [True, False])
def test_a_link_to_the_environment_that_was_turned_is_noticed(
    packed: Stage, is_turned: bool
) -> None:
    link = packed.top / "current"
    link.symlink_to(packed.top if is_turned else packed.env)
    with open(packed.parcel.parcel / "label", "a") as label:
        label.write(f"spelled {link}\nreal {packed.env}\n")
    words, line = packed.start()
    assert (words[0] == str(packed.env)) == is_turned
    assert ("the environment has changed" in line) == is_turned


def test_another_language_of_stat_is_understood(packed: Stage) -> None:
    lines = '$real "$@" | sed "s/directory/Verzeichnis/; s/regular.*file/Datei/"'
    words, _ = packed.start(**_wrap(packed, "stat", lines))
    assert words[0].startswith(str(packed.tree))


@pytest.mark.parametrize("path", ["{site}:", ":{site}", "{site}::/x"])
def test_an_empty_element_of_a_path_stays(packed: Stage, path: str) -> None:
    path = path.format(site=packed.site)
    code = "import os; print(os.environ['PYTHONPATH'])"
    (words, _), tree = packed.start(code, PYTHONPATH=path), packed.tree
    assert words == [path.replace(str(packed.site), f"{tree}{packed.site}")]


@pytest.mark.parametrize("is_whole", [True, False])
def test_the_users_own_folder_is_turned_as_a_whole(tmp_path: Path, is_whole: bool) -> None:
    """Other Pythons and programs find there what they have installed."""
    stage, home = Stage(tmp_path, Environment(tmp_path)), tmp_path / "home"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (site := home / ".local" / "lib" / version / "site-packages").mkdir(parents=True)
    (site / "mine.py").touch()
    (stage.env / "pyvenv.cfg").write_text(
        (stage.env / "pyvenv.cfg").read_text().replace("packages = false", "packages = true")
    )
    stage.environ["HOME"] = str(home)
    stage.note("import mine")
    stage.parcel.pack(checks_files=True)
    if not is_whole:  # something was installed since
        (home / ".local" / "bin").mkdir()
    code = "import mine, os, site, sys; print(mine.__file__, site.getuserbase())"
    (words, _), tree = stage.start(code), stage.tree
    base = Path(f"{tree}{home}" if is_whole else home) / ".local"
    assert words == [str(base / site.relative_to(home / ".local") / "mine.py"), str(base)]
    stage.call("remove")


def test_the_folder_of_compile_caches_is_the_users_alone(packed: Stage) -> None:
    code = "import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    (packed.run / "lib" / "node.py").write_text(code)
    umask = os.umask(0)
    done = packed.call("run", packed.python, packed.run / "lib" / "node.py", "", "x", "supervisor")
    os.umask(umask)
    assert done.stdout == f"{packed.folder / 'compile'}\n"
    for path in (packed.folder / "compile", packed.folder, packed.folder.parent):
        assert path.stat().st_mode & 0o777 == 0o700


def test_nodes_with_one_folder_on_a_shared_disk_have_a_keeper_each(packed: Stage) -> None:
    """The first node's packs the parcel, and the others' end at once."""
    node = packed.run / "lib" / "node.py"
    node.write_text("")
    for index in ("0", "1"):
        packed.call("run", packed.python, node, "", "x", "supervisor", SLURM_NODEID=index)
    assert len([*packed.folder.glob("keeper-*")]) == 2


def test_an_unstaged_run_notes_nothing(stage: Stage) -> None:
    (stage.run / "unstaged").write_text("so it is")
    (stage.run / "lib" / "node.py").write_text(
        "import os; print('HPC_DDP_OPENED_FILES' in os.environ)"
    )
    done = stage.call("run", stage.python, "-E", "-s", stage.run / "lib" / "node.py", "supervisor")
    assert done.stdout == "False\n"
    assert "so it is; Python starts from where it is" in done.stderr


def test_tars_own_options_are_not_used(packed: Stage) -> None:
    words, _ = packed.start("import pkg; print(pkg.__file__)", TAR_OPTIONS="--exclude=*.py")
    assert Path(words[0]).is_file()


def test_copies_go_where_one_node_has_none(packed: Stage) -> None:
    tree = _bring(packed)
    packed.call("run", packed.python, "-c", "", HPC_DDP_BROUGHT="no")
    assert not tree.exists()


def test_all_tasks_use_the_tree_that_was_brought(packed: Stage) -> None:
    """The label may change between their starts, by a keeper of the array, or an install."""
    assert packed.call("bring", packed.python, "other-1").returncode == 1
    tree, part = _bring(packed), packed.part
    (packed.parcel.parcel / "label").write_text("part other-1 1 1\n")
    code = "import sys; print(sys.prefix)"
    done = packed.call("run", packed.python, "-c", code, HPC_DDP_BROUGHT=part)
    assert done.stdout.startswith(str(tree))


def test_jobs_of_a_run_have_folders_of_their_own(packed: Stage) -> None:
    tree = _bring(packed)
    packed.call("remove", SLURM_JOB_ID="7")
    assert tree.exists()
    assert packed.call("bring", packed.python, packed.part, SLURM_JOB_ID="7").returncode == 0
    assert len([*packed.near.glob("*/*/environment-*.complete")]) == 2
    packed.call("remove", SLURM_JOB_ID="7")


def _on_disk(stage: Stage, kind: str) -> dict[str, str]:
    """Have `stat` say that the node's folder lies on a disk of this kind."""
    lines = f'[ "$1" = -f ] && exec echo 99999999 4096 {kind}\nexec $real "$@"'
    return _wrap(stage, "stat", lines) | {"SLURM_MEM_PER_NODE": "99999"}


@pytest.mark.parametrize("kind", ["xfs", "tmpfs"])
def test_a_tree_is_only_hidden_after_a_notice_unless_it_is_in_memory(
    packed: Stage, kind: str
) -> None:
    """Other jobs of the node would lack the memory."""
    tree, argv, environ = _supervisor(packed)
    environ |= _on_disk(packed, kind)
    subprocess.run(argv, env=environ, input=b"n", check=True, stdout=subprocess.PIPE)
    assert not tree.exists()
    assert bool([*packed.near.glob(f"*/*/{tree.name}")]) == (kind == "xfs")
    packed.call("remove")
    assert [*packed.near.iterdir()] == []


@pytest.mark.parametrize("state", ["chain", "cancelled"])
def test_a_tree_that_no_start_would_take_back_is_removed_after_a_notice(
    packed: Stage, state: str
) -> None:
    """A chain's next job has another id, and looks for no tree of this one."""
    (packed.run / "job.json").write_text('{"continue_by": "resubmit"}' if state == "chain" else "")
    if state == "cancelled":
        (packed.run / "cancelled").touch()
    _, argv, environ = _supervisor(packed)
    environ |= _on_disk(packed, "xfs")
    subprocess.run(argv, env=environ, input=b"n", check=True, stdout=subprocess.PIPE)
    assert [*packed.near.iterdir()] == []


def test_no_folder_is_made_where_slurm_has_mounted_one_for_the_job(packed: Stage) -> None:
    """By job_container/tmpfs, which empties it under the running job at a notice."""
    mounts = packed.top / "mounts"
    for root, is_taken in (("/", True), ("/data/14711", True), ("/job/4711/.4711", False)):
        lines = [
            "1 0 8:1 / / rw - ext4 /dev/sda rw",
            f"2 1 8:1 {root} {packed.near.parent} rw - ext4 /dev/sda rw",
            f"3 1 8:1 /job/4711/.4711 {packed.near}-other rw - ext4 /dev/sda rw",
        ]
        mounts.write_text("\n".join([*lines, ""]))
        lines = [f"source {packed.script} none x", f"mounts={mounts}; places=({packed.near})"]
        argv = ["bash", "-c", "\n".join([*lines, 'find_folder 0 && echo taken || echo "$why"'])]
        environ = packed.environ | {"SLURM_JOB_ID": "4711"} | _on_disk(packed, "xfs")
        text = subprocess.run(argv, env=environ, capture_output=True, text=True).stdout
        assert (text == "taken\n") == is_taken, text
        assert f"{packed.near} is this job's alone" in text or is_taken
        assert bool([*packed.near.iterdir()]) == is_taken
        packed.call("remove", SLURM_JOB_ID="4711")


def test_a_tree_that_goes_between_two_steps_is_not_brought_again(packed: Stage) -> None:
    """As where a TaskEpilog empties TMPDIR: each start would read all of the parcel for nothing."""
    shutil.rmtree(_bring(packed).parent)
    mark = packed.run / "unstaged"
    for _ in range(2):
        done = packed.call("run", packed.python, "-c", "", HPC_DDP_BROUGHT=packed.part)
        assert "the copy has gone (to try it again: rm" in done.stderr
        assert mark.read_text().strip() in done.stderr


def test_a_copy_goes_where_another_node_has_marked_the_run(packed: Stage) -> None:
    tree = _bring(packed)
    (packed.run / "unstaged").write_text("so it is")
    packed.call("run", packed.python, "-c", "", HPC_DDP_BROUGHT=packed.part)
    assert not tree.exists()


def test_the_jobs_next_start_removes_what_was_hidden(packed: Stage) -> None:
    """A job that is preempted each quarter of an hour would leave copy after copy."""
    _bring(packed)
    packed.call("hide", **_on_disk(packed, "xfs"))
    other = packed.folder.with_name("9-other.1")
    other.mkdir()
    tree = _bring(packed)
    packed.call("clean")
    assert sorted(packed.folder.parent.iterdir()) == sorted([tree.parent, other])
    other.rmdir()


def test_a_removal_that_was_cut_short_is_made_up_for(
    packed: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk under load may take longer than there is time."""
    packed.start()
    (bin_ := tmp_path / "bin").mkdir()
    (bin_ / "rm").write_text("#!/bin/sh\nsleep 60\n")
    (bin_ / "rm").chmod(0o700)
    for name, text in packed.environ.items():
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(removal, "STAGE_SH", ("bash", "-p", str(packed.script)))
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
        patch.setattr(removal, "REMOVE_S", 2.0)
        removal.run_stage_script("remove")
    assert [*packed.near.iterdir()] != []
    removal.run_stage_script("remove")
    assert [*packed.near.iterdir()] == []


def test_functions_of_a_profile_are_not_run(packed: Stage) -> None:
    shell = ["bash", "-p", str(packed.script), "bring", str(packed.python), packed.part]
    environ = packed.environ | {"BASH_FUNC_stat%%": "() { exit 9; }"}
    assert subprocess.run(shell, env=environ).returncode == 0


def test_rank_0_of_an_mpi_speaks(packed: Stage) -> None:
    """What starts its tasks on other nodes is the first task of a step of Slurm's."""
    environ = {"SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "1"}
    assert packed.call("run", packed.python, "-c", "", **environ).stderr == ""


def test_a_keeper_that_waits_for_a_disk_holds_no_supervisor_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A write to a slow disk may end no earlier, whatever signal comes."""
    child = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(removal, "END_S", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda pid, number: None)
        removal._kill_child(child.pid)
    assert child.poll() is None
    removal._kill_child(child.pid)
    assert child.wait(timeout=10) == 0  # another one has reaped it
