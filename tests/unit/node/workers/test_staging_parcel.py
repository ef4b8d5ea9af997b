"""The parcel of `--stage`: what is in it, and that it is written anew, or not at all, where an
earlier keeper was killed, another one is at work, or the disk is full."""

from __future__ import annotations

import ast
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_ddp.core.attempt_env import FIRST_STEP
from hpc_ddp.node.workers.staging import keeper
from hpc_ddp.node.workers.staging.keeper import Keeper
from hpc_ddp.node.workers.staging.mirror import MOST_DATA_BYTES, Mirror, find_written, mirror_of
from unit.node.workers.test_staging import STAGING, Environment, Stage

KEEP = """
import os, sys
from hpc_ddp.node.workers.staging import keeper
keeper.__file__, keeper.call = sys.argv[1], lambda action: None
os.environ["HPC_DDP_NODE_INDEX"] = "0"
keeper.main([str(os.getppid())])
"""


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, Environment(tmp_path))


@pytest.fixture
def kernel(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An old file in the compile caches of the node."""
    path = stage.folder / "compile" / "kernel"
    path.parent.mkdir(parents=True)
    path.touch()
    os.utime(path, (1, 1))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(path.parent))
    return path


def part(stage: Stage) -> Path:
    (path,) = (path for path in stage.parcel.parcel.glob("environment-*") if not path.suffix)
    return path


def names(stage: Stage, is_kind: Callable[[tarfile.TarInfo], bool]) -> set[str]:
    """Return the paths of the members of a kind in the environment's part."""
    with tarfile.open(part(stage)) as tar:
        return {f"/{member.name}" for member in tar if is_kind(member)}


def label(stage: Stage) -> list[str]:
    return (stage.parcel.parcel / "label").read_text().splitlines()


def pack(stage: Stage, code: str = "import pkg", checks_files: bool = True) -> None:
    """Play an attempt up to the packing."""
    stage.note(code)
    Keeper(stage.parcel.parcel, stage.parcel.record).pack(checks_files)


def edit(path: Path) -> None:
    """Edit a module in place: the time of its folder stays."""
    path.write_text(f"edited = True\n{path.read_text()}")


def test_an_environment_behind_a_link_that_was_turned_is_packed_anew(stage: Stage) -> None:
    (stage.top / "current").symlink_to("env")
    stage.python = stage.top / "current" / "bin" / "python"
    pack(stage)
    lines = label(stage)
    assert {f"spelled {stage.top}/current", f"real {stage.env}"} <= {*lines}
    pack(stage)
    assert label(stage) == lines
    second = stage.top / "second"
    venv.create(second, symlinks=True)
    (stage.top / "current").unlink()
    (stage.top / "current").symlink_to("second")
    pack(stage, "pass")
    assert f"real {second}" in label(stage)


@pytest.mark.parametrize("step", ["write_json", "write_whole", "processor"])
def test_a_keeper_that_is_killed_at_a_step_leaves_no_old_code(
    stage: Stage, kernel: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    pack(stage)
    lines = label(stage)
    edit(stage.site / "pkg" / "__init__.py")

    def kill(*words: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(keeper, step, kill)
        with pytest.raises(SystemExit):
            pack(stage)
    assert (label(stage) == lines) == (step != "processor")  # which is of the compile caches
    pack(stage)
    stage.start("import pkg; assert pkg.edited and 'near' in pkg.__file__")


def test_the_record_has_a_bound(stage: Stage) -> None:
    stage.note()
    size = stage.parcel.record.stat().st_size
    stage.note()
    assert stage.parcel.record.stat().st_size > size
    os.truncate(stage.parcel.record, 64 << 20)
    stage.note()
    assert stage.parcel.record.stat().st_size == 64 << 20


def test_the_record_is_read_from_where_the_last_read_has_ended(tmp_path: Path) -> None:
    parcel = Keeper(tmp_path / "stage", tmp_path / "record")
    parcel.read_record()
    parcel.record.write_text("/a\n/b\n/torn")
    parcel.read_record()
    assert parcel.lines == {"/a", "/b"}
    parcel.record.write_text("/x\n/y\n/torn no more\n")
    parcel.read_record()
    assert parcel.lines == {"/a", "/b", "/torn no more"}


def _start_keeper(stage: Stage) -> subprocess.Popen[bytes]:
    """Return a keeper that has written its draft, and computes the checksum."""
    stage.note()
    with open(stage.parcel.record, "a") as record:
        record.write(f"{FIRST_STEP}\n")
    pipe, tool = stage.top / "pipe", stage.top / "tools" / "cksum"
    tool.parent.mkdir(exist_ok=True)
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    tool.write_text(f"#!/bin/sh\necho >{pipe}\nexec sleep 60\n")
    tool.chmod(0o700)
    env = {**os.environ, "HPC_DDP_RUN": str(stage.run)}
    env["HPC_DDP_OPENED_FILES"] = str(stage.parcel.record)
    env["PATH"] = f"{tool.parent}:{env['PATH']}"
    process = subprocess.Popen(
        [sys.executable, "-c", KEEP, stage.script.with_name("keeper.py")], env=env
    )
    pipe.read_bytes()
    return process


def _drafts(stage: Stage) -> list[Path]:
    return [*stage.parcel.parcel.glob(".draft*")]


def test_a_keeper_that_is_ended_leaves_no_draft(stage: Stage) -> None:
    process = _start_keeper(stage)
    assert _drafts(stage)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    assert not _drafts(stage)


def test_the_draft_of_a_killed_keeper_is_removed(stage: Stage) -> None:
    pack(stage)
    lines = label(stage)
    edit(stage.site / "pkg" / "__init__.py")
    process = _start_keeper(stage)
    process.kill()
    process.wait()
    assert _drafts(stage)
    module = stage.site / "pkg" / "__init__.py"
    module.write_text(module.read_text().partition("\n")[2])
    pack(stage, checks_files=False)
    assert label(stage) == lines  # nothing was written
    assert not _drafts(stage)


def test_a_keeper_gives_up_where_the_disk_is_full(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stage.note()
    with open(stage.parcel.record, "a") as record:
        record.write(f"{FIRST_STEP}\n")

    def fill(mirror: Mirror, draft: Path) -> list[str]:
        draft.touch()
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    def fail(seconds: float) -> None:
        raise AssertionError("it waits for another time")

    monkeypatch.setattr(Mirror, "pack", fill)
    monkeypatch.setattr("time.sleep", fail)
    keeper.keep_parcel(stage.parcel, stage.run / "unstaged")
    (line,) = capfd.readouterr().err.splitlines()
    assert "quota" in line
    assert not _drafts(stage)


def test_a_keeper_packs_no_more_once_its_parcel_was_in_the_way(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.note()
    with open(stage.parcel.record, "a") as record:
        record.write(f"{FIRST_STEP}\n")

    def make_room(seconds: float) -> None:
        shutil.rmtree(stage.parcel.parcel)
        (stage.run / "unstaged").touch()

    monkeypatch.setattr("time.sleep", make_room)
    keeper.keep_parcel(stage.parcel, stage.run / "unstaged")
    assert not stage.parcel.parcel.exists()


def test_a_keeper_ends_in_silence_with_its_attempt(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Mirror, "pack", lambda mirror, draft: os.listdir(stage.top / "gone"))
    parcel = Keeper(stage.parcel.parcel, stage.top / "gone" / "record")
    parcel.lines.add(FIRST_STEP)
    keeper.keep_parcel(parcel, stage.run / "unstaged")
    assert capfd.readouterr().err == ""


def test_a_parcel_has_a_bound(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "MOST_BYTES", 1000)
    with pytest.raises(OSError, match="its Python have"):
        pack(stage)
    assert [path.name for path in stage.parcel.parcel.iterdir()] == ["lock"]


def test_data_and_code_that_is_worked_on_are_not_packed(stage: Stage) -> None:
    data = [stage.env / "hf" / "model.safetensors", stage.site / "pkg" / "weights.bin"]
    data[0].parent.mkdir()
    for path in data:
        path.touch()
        os.truncate(path, MOST_DATA_BYTES + 1)
    library = stage.site / "pkg" / "libx.so.1"
    library.touch()
    os.truncate(library, MOST_DATA_BYTES + 1)
    editable, linked = stage.env / "src" / "proj", stage.top / "linked"
    for folder, name in ((editable, "proj"), (linked, "mod")):
        folder.mkdir(parents=True)
        (folder / f"{name}.py").write_text("def has(name): return name in globals()\n")
    (stage.site / "editable.pth").write_text(f"{editable}\n")
    (stage.site / "linked").symlink_to(linked)
    look = "".join(f"open({str(path)!r}).close(); " for path in (*data, library))
    pack(stage, f"{look}import proj, linked.mod")
    files = names(stage, tarfile.TarInfo.isfile)
    assert str(library) in files
    outside = (f"{stage.env}/hf", f"{stage.env}/src", str(linked), str(stage.site / "linked"))
    assert not [path for path in files if path in map(str, data) or path.startswith(outside)]
    edit(editable / "proj.py")
    (linked / "new.py").touch()
    words, _ = stage.start("import proj, linked.mod, linked.new, pkg; print(pkg.__file__)")
    assert words[0].startswith(str(stage.folder))
    stage.start("import proj; assert proj.has('edited')")


def test_what_the_job_writes_is_a_link(stage: Stage) -> None:
    count = stage.site / "pkg" / "count"
    count.write_text("0")
    up = f"path = {str(count)!r}; n = int(open(path).read()) + 1; open(path, 'w').write(str(n))"
    pack(stage, f"import pkg; {up}")
    assert str(count) not in names(stage, tarfile.TarInfo.isfile)
    beside = "import pkg; path = pkg.__file__.replace('__init__.py', 'count'); "
    words, _ = stage.start(beside + "open(path, 'w').write('7'); print(path)")
    assert words[0].startswith(str(stage.folder))
    assert count.read_text() == "7"


def test_a_file_that_the_job_has_copied_and_then_writes_becomes_a_link(stage: Stage) -> None:
    count = stage.site / "pkg" / "count"
    count.touch()
    pack(stage, f"import pkg; open({str(count)!r}).close()")
    assert str(count) in names(stage, tarfile.TarInfo.isfile)
    pack(stage, f"open({str(count)!r}, 'a').close()", checks_files=False)
    assert str(count) not in names(stage, tarfile.TarInfo.isfile)


def _note_in_tree(stage: Stage, code: str) -> set[str]:
    """Run a Python from the tree, which is brought, and return the paths that it notes anew."""
    stage.parcel.record.unlink()
    stage.start("")
    note = {"HPC_DDP_OPENED_FILES": str(stage.parcel.record), "HPC_DDP_NEAR": str(stage.tree)}
    note |= {"PYTHONPATH": str(STAGING / "hook")}
    near = f"{stage.tree}{stage.python}"
    subprocess.run([near, "-c", code], env=stage.environ | note, check=True)
    lines = stage.parcel.record.read_text().splitlines()
    return {line.replace(str(stage.tree), "") for line in lines}


def test_an_attempt_from_the_tree_notes_imports_without_an_audit_hook(stage: Stage) -> None:
    """The hook would make each `id()` of the training ten times as slow."""
    text = stage.site / "pkg" / "text"
    pack(stage, "import pkg")
    # What is noted must not wait for the exit.
    code = f"import os, pkg.seldom; open({str(text)!r}).close(); import other; os._exit(0)"
    noted = _note_in_tree(stage, code)
    read = {Path(path).name.split(".")[0] for path in noted}
    assert {"seldom", "deep", "other"} <= read
    assert str(stage.site / "pkg" / "inner") in noted  # listed
    assert str(text) not in noted


def test_what_a_job_writes_in_the_tree_is_a_link_from_then_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = stage.site / "pkg" / "count"
    count.touch()
    pack(stage, f"import pkg; open({str(count)!r}).close()")
    assert str(count) in names(stage, tarfile.TarInfo.isfile)
    _note_in_tree(stage, "import pkg; open(pkg.__file__.replace('__init__.py', 'count'), 'w')")
    monkeypatch.setenv("HPC_DDP_NEAR", str(stage.tree))
    stage.parcel.lines.clear()
    stage.parcel._offset = 0
    stage.parcel.pack(checks_files=True)
    assert str(count) not in names(stage, tarfile.TarInfo.isfile)
    assert str(stage.site / "pkg" / "__init__.py") in names(stage, tarfile.TarInfo.isfile)


def test_a_file_that_changes_while_it_is_packed_becomes_a_link(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = stage.site / "pkg" / "text"
    rewritten = Mirror.rewritten_texts

    def change(mirror: Mirror) -> dict[str, bytes]:
        table.write_text(table.read_text() + "more")
        return rewritten(mirror)

    monkeypatch.setattr(Mirror, "rewritten_texts", change)
    pack(stage, f"import pkg; open({str(table)!r}).close()")
    assert str(table) in names(stage, tarfile.TarInfo.issym)
    edit(table)
    words, _ = stage.start(
        "import pkg, pathlib as p; print(p.Path(pkg.__file__).with_name('text'))"
    )
    assert words[0].startswith(str(stage.folder))
    assert Path(words[0]).read_text() == table.read_text()


def test_one_keeper_writes_a_parcel(stage: Stage) -> None:
    stage.note()
    stage.parcel.parcel.mkdir(mode=0o700)
    with open(stage.parcel.parcel / "lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stage.parcel.pack(checks_files=True)
        assert [path.name for path in stage.parcel.parcel.iterdir()] == ["lock"]
    stage.parcel.pack(checks_files=True)
    assert part(stage).exists()


@pytest.mark.parametrize("kind", ["gone", "short"])
def test_a_part_that_is_not_as_it_was_written_is_written_again(stage: Stage, kind: str) -> None:
    pack(stage)
    path = part(stage)
    content = path.read_bytes()
    if kind == "gone":
        path.unlink()
    else:
        os.truncate(path, 1000)
    words, _ = stage.start()
    assert words[0] == str(stage.env)
    pack(stage)
    assert part(stage).read_bytes() == content
    words, _ = stage.start()
    assert words[0].startswith(str(stage.folder))


def test_a_part_is_on_the_disk_before_it_has_its_name(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, seen = os.fsync, []

    def look(descriptor: int) -> None:
        seen.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        assert not [*stage.parcel.parcel.glob("environment-*")]
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    pack(stage)
    assert seen == [str(stage.parcel.parcel / ".draft")]


def test_an_entry_of_the_compile_caches_travels_whole_and_settled(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = stage.folder / "compile"
    for name, age in (("old", 100), ("young", 0)):
        (compiled / name).mkdir(parents=True)
        for file in ("a.json", "b.so"):
            (compiled / name / file).write_text("x")
            os.utime(compiled / name / file, (1, time.time() - (age if file == "b.so" else 100)))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    pack(stage)
    (path,) = stage.parcel.parcel.glob("compiled-*")
    with tarfile.open(path) as tar:
        assert sorted(tar.getnames()) == ["old/a.json", "old/b.so"]
    assert label(stage)[-1].split()[1] == path.name


def test_a_cache_file_that_vanishes_leaves_the_label_of_the_environment(
    stage: Stage, kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = tarfile.TarFile.add

    def remove(tar: tarfile.TarFile, name: str, arcname: str) -> None:
        kernel.unlink()
        add(tar, name, arcname)

    monkeypatch.setattr(tarfile.TarFile, "add", remove)
    pack(stage)
    assert label(stage)[0].startswith("part environment-")
    assert not [line for line in label(stage) if "compiled" in line]
    assert not _drafts(stage)


def test_nothing_is_asked_of_the_disk_while_nothing_new_is_opened(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.note()
    stage.parcel.pack(checks_files=True)
    calls = []

    def count(record: Path, lines: set[str]) -> Mirror:
        calls.append(1)
        return mirror_of(record, lines)

    monkeypatch.setattr(keeper, "mirror_of", count)
    stage.note()  # opens the same files
    stage.parcel.pack(checks_files=False)
    assert not calls
    stage.note("import pkg.seldom")
    stage.parcel.pack(checks_files=False)
    assert calls


def test_both_sides_name_a_kind_of_processor_alike() -> None:
    assert f"processor=$({keeper.PROCESSOR})\n" in (STAGING / "stage.sh").read_text()
    assert "flags" in keeper.PROCESSOR


def test_a_user_site_has_the_whole_prefix_of_the_user(tmp_path: Path) -> None:
    site = tmp_path / ".local" / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    (site / "mine.py").touch()
    (tmp_path / ".local" / "share").mkdir()
    (tmp_path / ".local" / "lib" / "python3.9").mkdir()
    mirror = Mirror(frozenset([str(site)]))
    mirror.add(str(site / "mine.py"))
    links = dict(mirror.links())
    assert {*mirror.folders} == {str(site), *map(str, list(site.parents)[:3])}
    assert str(tmp_path / ".local" / "share") in links
    assert str(tmp_path / ".local" / "lib" / "python3.9") in links


def test_an_old_python_can_read_the_sitecustomize() -> None:
    text = (STAGING / "hook" / "sitecustomize.py").read_text()
    new = (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.Starred, ast.Await)
    nodes = [*ast.walk(ast.parse(text))]
    assert not [node for node in nodes if isinstance(node, new)]
    hints = [node.returns for node in nodes if isinstance(node, ast.FunctionDef)]
    hints += [node.annotation for node in nodes if isinstance(node, ast.arg)]
    assert not [hint for hint in hints if isinstance(hint, ast.Subscript)]  # list[str] is of 3.9


def test_a_turned_link_is_seen_by_the_keeper_too(stage: Stage) -> None:
    pack(stage)
    assert keeper.is_current(label(stage))
    assert not keeper.is_current([*label(stage), f"spelled {stage.top}", "real /elsewhere"])


def test_the_caches_of_an_array_grow(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = stage.folder / "compile"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    lines = []
    for names in (("a", "b"), ("c",), ("c", "d", "e")):
        for name in names:
            (compiled / name).mkdir(parents=True)
            (compiled / name / "kernel").touch()
            os.utime(compiled / name / "kernel", (1, 1))
        pack(stage)
        lines.append(label(stage)[-1])
        shutil.rmtree(compiled)
    assert lines[0] == lines[1] != lines[2]


def test_files_as_they_were_before_are_counted(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pack(stage)
    edit(stage.site / "pkg" / "__init__.py")
    monkeypatch.setenv("HPC_DDP_NEAR", "/near")
    pack(stage)
    assert "runs 2 files as they were before; a requeue takes the new" in capfd.readouterr().err


@pytest.mark.parametrize("index", ["", "1"])
def test_only_the_first_node_of_an_mpi_packs(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, index: str
) -> None:
    """There SLURM_NODEID is of another step."""
    calls: list[Keeper] = []
    monkeypatch.setattr(keeper, "keep_parcel", calls.append)
    monkeypatch.setattr(keeper, "die_with_parent", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *words: None)
    monkeypatch.setattr(keeper, "run_stage_script", lambda action: None)
    for name, text in {
        "HPC_DDP_OPENED_FILES": str(stage.parcel.record),
        "HPC_DDP_STEP_LAUNCHER": "mpirun",
        "HPC_DDP_RUN": str(stage.run),
        "HPC_DDP_NODE_INDEX": index,
        "SLURM_NODEID": "0",
    }.items():
        monkeypatch.setenv(name, text)
    (stage.run / "logs" / "attempt-0" / "attempt.json").write_text('{"nodes": ["n1", "n2"]}')
    assert keeper.main([str(os.getppid())]) == 0
    assert calls == []


def test_what_the_job_has_written_is_found_behind_a_path_that_is_gone(tmp_path: Path) -> None:
    tree, mark = tmp_path / "tree", tmp_path / "tree.complete"
    (tree / "opt").mkdir(parents=True)
    mark.touch()
    os.utime(mark, (1.0, 1.0))
    (tree / "opt" / "log.txt").write_text("x")
    (tree / "opt" / "data").write_text("a file in place of a folder")
    packed = ["/opt/gone", "/opt/data/x.json", "/opt/log.txt"]
    assert find_written(tree, packed) == {"/opt/log.txt"}
