"""`--stage`: a Python starts from a tree of the files that an earlier one has opened, or, whatever
is wrong, from where it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_ddp.core.attempt_env import FIRST_STEP
from hpc_ddp.node.workers.staging import keeper
from hpc_ddp.node.workers.staging.keeper import Keeper
from hpc_ddp.node.workers.staging.mirror import Mirror

STAGING = Path(keeper.__file__).parent
LOOK = "import pkg, sys; print(sys.prefix, pkg.__file__, pkg.where()); "
ALL = (
    LOOK
    + "import pkg.seldom, other, importlib.resources as r; print(pkg.seldom.__file__, \
other.__file__, (r.files('pkg') / 'text').read_text(), pkg.seldom.Y)"
)


class Environment:
    """A virtual environment with a package, and a module that a .pth file brings."""

    def __init__(self, top: Path) -> None:
        self.path, self.beside = top / "env", top / "beside" / "site-packages"
        venv.create(self.path, symlinks=True)
        self.site = next(self.path.glob("lib/python3*/site-packages"))
        self.module = self.site / "pkg" / "__init__.py"
        (self.site / "pkg" / "inner").mkdir(parents=True)
        self.beside.mkdir(parents=True)
        self.module.write_text("import os\ndef where(): return os.__file__\n")
        (self.site / "pkg" / "seldom.py").write_text("from pkg.inner.deep import Y\n")
        (self.site / "pkg" / "inner" / "deep.py").write_text("Y = 'deep'\n")
        (self.site / "pkg" / "text").write_text("a text")
        (self.beside / "other.py").touch()
        (self.site / "beside.pth").write_text(f"{self.beside}\n")


class Stage:
    """A run with an environment; what a task of it does on its node."""

    def __init__(self, top: Path, environment: Environment) -> None:
        self.top, self.run, self.env = top, top / "run", environment.path
        self.site, self.beside = environment.site, environment.beside
        self.python = self.env / "bin" / "python"
        lib = self.run / "lib"
        (lib / "hpc_ddp" / "node" / "workers").mkdir(parents=True)
        (lib / "node.py").touch()
        (self.run / "logs" / "attempt-0").mkdir(parents=True)
        shutil.copytree(STAGING, lib / "hpc_ddp" / "node" / "workers" / "staging")
        self.script = lib / "hpc_ddp" / "node" / "workers" / "staging" / "stage.sh"
        self.near = top / "near"
        self.near.mkdir()
        self.environ = {
            "PATH": os.environ["PATH"],
            "TMPDIR": str(self.near),
            "HPC_DDP_RUN": str(self.run),
            "HPC_DDP_ATTEMPT": "0",
        }
        self.parcel = Keeper(self.run / "stage", self.folder / "opened-x")

    @property
    def folder(self) -> Path:
        """The run's folder on this node, as `stage.sh` names it."""
        key = subprocess.run(["sha256sum"], input=str(self.run).encode(), capture_output=True)
        return self.near / f"hpc-ddp-near-{os.geteuid()}" / f"0-{key.stdout.decode()[:16]}"

    @property
    def part(self) -> str:
        """The name of the tree in the parcel."""
        return (self.parcel.parcel / "label").read_text().split(None, 2)[1]

    @property
    def tree(self) -> Path:
        (mark,) = self.folder.glob("*.complete")
        return mark.with_suffix("")

    def note(self, code: str = LOOK) -> None:
        """Run a Python that notes what it opens."""
        self.folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        self.folder.parent.chmod(0o700)
        env = self.environ | {"PYTHONPATH": str(STAGING / "hook")}
        env |= {"HPC_DDP_OPENED_FILES": str(self.parcel.record)}
        subprocess.run([self.python, "-c", code], env=env, check=True, capture_output=True)

    def call(self, *words: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
        argv = ["bash", self.script, *words]
        return subprocess.run(argv, env=self.environ | environ, capture_output=True, text=True)

    def start(self, code: str = LOOK, **environ: str) -> tuple[list[str], str]:
        """Bring the parcel, if there is one, and start a task; return the words that it prints, and
        what is printed about the start."""
        text, state = "", {}
        if (self.run / "stage" / "label").exists():
            brought = self.call("bring", self.python, self.part, **environ)
            text, state = (
                brought.stderr,
                {"HPC_DDP_BROUGHT": "no" if brought.returncode else self.part},
            )
        done = self.call("run", self.python, "-c", code, **(environ | state))
        assert done.returncode == 0, done.stderr
        return done.stdout.split(), text + done.stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="module")
def parcel(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    stage = Stage(tmp_path_factory.mktemp("packed"), environment)
    stage.note()
    stage.parcel.pack(checks_files=True)
    return stage.parcel.parcel


@pytest.fixture
def stage(tmp_path: Path, environment: Environment) -> Iterator[Stage]:
    stage = Stage(tmp_path, environment)
    yield stage
    stage.call("remove")


@pytest.fixture
def packed(stage: Stage, parcel: Path) -> Stage:
    shutil.copytree(parcel, stage.parcel.parcel)
    return stage


@pytest.fixture
def edited(environment: Environment) -> Iterator[Path]:
    """Yield a module that was edited after the parcel was written."""
    text, status = environment.module.read_text(), environment.module.stat()
    environment.module.write_text(f"edited = True\n{text}")
    yield environment.module
    environment.module.write_text(text)
    os.utime(environment.module, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_python_starts_from_the_tree(packed: Stage) -> None:
    words, line = packed.start()
    folder = packed.folder.relative_to(packed.near)
    assert not any((Path(place) / folder).exists() for place in ("/tmp", "/dev/shm"))
    tree = str(packed.tree)
    assert all(word.startswith(tree) for word in words)
    assert "Python starts from" in line
    assert " MB of disk; " in line
    assert line.count("\n") == 1


def test_what_was_not_opened_is_found_where_it_is(packed: Stage) -> None:
    words, _ = packed.start(ALL)
    copied = packed.tree / packed.site.relative_to("/") / "pkg"
    assert words[3:] == [
        str(copied / "seldom.py"),
        f"{packed.tree}{packed.beside}/other.py",
        *("a", "text", "deep"),
    ]
    assert (copied / "seldom.py").readlink() == packed.site / "pkg" / "seldom.py"
    assert (copied / "inner").is_symlink()
    assert not (copied / "__init__.py").is_symlink()


def test_a_second_start_on_the_node_reads_no_parcel(packed: Stage) -> None:
    packed.start()
    next(packed.parcel.parcel.glob("environment-*[0-9]")).unlink()
    words, line = packed.start()
    assert words[0].startswith(str(packed.tree))
    assert "Python starts from" in line


def test_a_first_start_runs_from_where_it_is(stage: Stage) -> None:
    words, line = stage.start()
    assert words[0] == str(stage.env)
    assert "there is no parcel yet" in line


def _damage(stage: Stage) -> None:
    with open(next(stage.parcel.parcel.glob("environment-*[0-9]")), "r+b") as file:
        file.seek(1 << 20)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def _truncate(stage: Stage) -> None:
    os.truncate(next(stage.parcel.parcel.glob("environment-*[0-9]")), 1 << 20)


def _open_to_group(stage: Stage) -> None:
    next(stage.parcel.parcel.glob("environment-*[0-9]")).chmod(0o620)


def _open_label(stage: Stage) -> None:
    (stage.parcel.parcel / "label").chmod(0o602)


def _install(stage: Stage) -> None:
    label = stage.parcel.parcel / "label"
    seconds = int(stage.site.stat().st_mtime)
    label.write_text(label.read_text().replace(f"{seconds} {stage.site}\n", f"1 {stage.site}\n"))


def _fill(stage: Stage) -> None:
    label = stage.parcel.parcel / "label"
    first, rest = label.read_text().split("\n", 1)
    label.write_text(f"{first.rpartition(' ')[0]} {1 << 55}\n{rest}")


def _give_away(stage: Stage) -> None:
    os.chown(stage.parcel.parcel / "label", 12345, -1)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_damage, "checksum"),
        (_truncate, "not whole"),
        (_open_to_group, "not this user's alone"),
        (_open_label, "not this user's alone"),
        (_install, "the environment has changed"),
        (_fill, "no disk of this node"),
        pytest.param(
            *(_give_away, "not this user's alone"),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away"),
        ),
    ],
)
def test_what_is_wrong_is_said_and_python_starts_from_where_it_is(
    packed: Stage, spoil: object, reason: str
) -> None:
    assert callable(spoil)
    spoil(packed)
    words, line = packed.start()
    assert words[0] == str(packed.env)
    assert reason in line
    assert line.count("\n") == 1
    assert not [*packed.near.glob("*/*/environment-*[0-9]")]  # nor is anything half-unpacked left
    again, _ = packed.start()
    assert again == words


def test_a_python_that_does_not_start_from_the_tree_is_left_out(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Environment(tmp_path))
    (stage.site / "bad.pth").write_text("import os, sys; 'near' in sys.prefix and os._exit(3)\n")
    stage.note()
    stage.parcel.pack(checks_files=True)
    words, line = stage.start()
    assert words[0] == str(stage.env)
    assert "does not start" in line


@pytest.mark.parametrize("kind", ["link", "mode", "owner"])
def test_a_folder_that_another_user_may_have_made_is_left_alone(packed: Stage, kind: str) -> None:
    top = packed.folder.parent
    if kind == "link":
        (packed.top / "theirs").mkdir(mode=0o700)
        top.symlink_to(packed.top / "theirs")
    else:
        top.mkdir(mode=0o755 if kind == "mode" else 0o700)
        top.chmod(0o755 if kind == "mode" else 0o700)
    if kind == "owner":
        if os.geteuid():
            pytest.skip("only root can give a folder away")
        os.chown(top, 12345, -1)
    words, _ = packed.start()
    assert not words[0].startswith(str(packed.near))
    assert [*top.iterdir()] == []


def test_a_folder_where_others_may_rename_is_left_alone(packed: Stage) -> None:
    packed.near.chmod(0o777)  # without the sticky bit
    packed.start()
    assert [*packed.near.iterdir()] == []


def test_an_unpacking_that_was_killed_is_begun_anew(packed: Stage) -> None:
    part = next(packed.parcel.parcel.glob("environment-*[0-9]")).name
    draft = packed.folder / f"{part}.new"
    (draft / "root").mkdir(parents=True)
    packed.folder.parent.chmod(0o700)
    os.mkfifo(f"{draft}.pipe")
    words, _ = packed.start()
    assert words[0].startswith(str(packed.tree))
    assert not [*packed.folder.glob("*.new*")]


def test_tasks_of_a_node_unpack_once(packed: Stage) -> None:
    argv = ["bash", str(packed.script), "bring", str(packed.python), packed.part]
    tasks = [subprocess.Popen(argv, env=packed.environ) for _ in range(3)]
    assert [task.wait(timeout=60) for task in tasks] == [0, 0, 0]
    assert len([*packed.folder.glob("environment-*")]) == 3  # with its mark and its list


def test_the_compile_caches_travel(packed: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    packed.note()
    compiled = packed.folder / "compile"
    (compiled / "ab").mkdir(parents=True)
    (compiled / "ab" / "kernel.py").write_text("x")
    os.utime(compiled / "ab" / "kernel.py", (1, 1))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    packed.parcel.pack(checks_files=False)
    label = (packed.parcel.parcel / "label").read_text()
    packed.parcel.pack(checks_files=False)
    assert (packed.parcel.parcel / "label").read_text() == label  # nothing has changed
    shutil.rmtree(packed.near)
    packed.near.mkdir()
    packed.start()
    assert (compiled / "ab" / "kernel.py").read_text() == "x"


def test_a_parcel_is_written_anew_for_many_misses_or_a_changed_file(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    modules = [tmp_path / "lib" / f"m{number}.py" for number in range(keeper.MOST_MISSES + 2)]
    for module in modules:
        module.touch()
    mirror = Mirror(frozenset([str(tmp_path)]))
    mirror.add(str(modules[0]))
    packed = {**mirror.files}
    assert keeper.is_enough(mirror, packed)
    assert not keeper.is_enough(mirror, {})
    for module in modules[1:-1]:
        mirror.add(str(module))
    assert keeper.is_enough(mirror, packed)
    mirror.add(str(modules[-1]))
    assert not keeper.is_enough(mirror, packed)
    modules[0].write_text("edited")
    assert not keeper.is_enough(Mirror(mirror.roots), packed)
    assert keeper.is_enough(Mirror(mirror.roots), packed, checks_files=False)
    with open(modules[1], "wb") as large:
        large.truncate(keeper.MOST_MISSED_BYTES + 1)
    mirror = Mirror(mirror.roots)
    mirror.add(str(modules[1]))
    assert not keeper.is_enough(mirror, packed, checks_files=False)


def test_the_old_parcel_and_drafts_are_removed(packed: Stage, edited: Path) -> None:
    (packed.parcel.parcel / ".draft-1").touch()
    packed.note()
    packed.parcel.pack(checks_files=True)
    names = sorted(path.name.partition("-")[0] for path in packed.parcel.parcel.iterdir())
    assert names == ["environment", "environment", "label", "lock"]  # the part and its files
    packed.start("import pkg; assert pkg.edited")


def test_the_environments_own_sitecustomize_runs(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Environment(tmp_path))
    (stage.site / "sitecustomize.py").write_text("import sys; sys.own = True\n")
    stage.note("import sys; assert sys.own and not [p for p in sys.path if 'staging' in p]")
    (stage.site / "sitecustomize.py").unlink()
    stage.note("import sys; assert not [p for p in sys.path if 'staging' in p]")


def test_a_record_that_can_not_be_written_ends_nothing(stage: Stage) -> None:
    stage.parcel.record.parent.mkdir(parents=True)
    stage.parcel.record.mkdir()
    stage.note()


def test_packing_waits_for_the_first_step(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.folder.mkdir(parents=True)
    pauses = iter(["/env/a\n", "/env/b\n", f"{FIRST_STEP}\n"])

    def grow(seconds: float) -> None:
        with open(stage.parcel.record, "a") as file:
            file.write(next(pauses))

    monkeypatch.setattr("time.sleep", grow)
    stage.parcel.wait_for_first_step()
    assert next(pauses, None) is None


def test_a_tree_in_use_is_not_removed(packed: Stage) -> None:
    code = "import sys, time; print('up', flush=True); sys.stdin.read(1)"
    argv = ["bash", str(packed.script), "run", str(packed.python), "-c", code]
    pipe = subprocess.PIPE
    packed.call("bring", packed.python, packed.part)
    environ = packed.environ | {"HPC_DDP_BROUGHT": packed.part}
    with subprocess.Popen(argv, env=environ, stdin=pipe, stdout=pipe) as task:
        assert task.stdout
        task.stdout.readline()
        packed.call("remove")
        assert packed.tree.exists()
        task.kill()
    packed.call("remove")
    assert [*packed.near.iterdir()] == []


def test_links_stay_in_the_tree_where_both_ends_are_in_it(tmp_path: Path) -> None:
    real = tmp_path / "store" / "lib"
    real.mkdir(parents=True)
    (real / "a.so.1").touch()
    (real / "a.so").symlink_to("a.so.1")
    (real / "b.so").symlink_to(real / "a.so.1")
    (real / "out").symlink_to("/usr")
    (tmp_path / "spelled").symlink_to(tmp_path / "store")
    spelled = tmp_path / "spelled"
    mirror = Mirror(
        frozenset([str(spelled), str(spelled / "lib")])
    )  # the inner one is in the outer
    mirror.add(str(spelled / "lib" / "a.so"))
    assert [*mirror.files] == [str(real / "a.so.1")]
    assert dict(mirror.links()) == {
        str(real / "a.so"): "a.so.1",
        str(real / "b.so"): "a.so.1",
        str(real / "out"): "/usr",
        str(spelled): "store",
    }


def test_a_full_disk_of_the_record_costs_the_program_no_descriptors() -> None:
    script = (
        f"import os, sys; sys.path.insert(0, {str(STAGING / 'hook')!r}); import sitecustomize as s;"
        " s.PAUSE_S = -1.0; s.note_files('/dev/full'); before = os.listdir('/proc/self/fd');"
        " [sys.audit('open', f'{sys.prefix}/{n}', 'r', 0) for n in range(9)];"
        " print(len(os.listdir('/proc/self/fd')) - len(before))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_the_system_is_no_part_of_an_environment() -> None:
    sys.path.insert(0, str(STAGING / "hook"))
    try:
        from hpc_ddp.node.workers.staging.hook.sitecustomize import is_of_system
    finally:
        sys.path.remove(str(STAGING / "hook"))
    outside = ("/usr", "/usr/lib/python3/dist-packages", "/", "relative")
    assert all(map(is_of_system, outside))
    assert not any(map(is_of_system, ("/home/u/env", "/usr/local/lib/python3.11/site-packages")))


def test_the_next_attempt_on_a_node_reads_no_parcel_after_a_notice(packed: Stage) -> None:
    """Its tree is hidden until then; if a cleaner has taken a file of it, it is read anew."""
    assert packed.start()[0]
    tree, part = packed.tree, packed.run / "stage" / packed.part
    for is_whole in (True, False):
        packed.call("hide")
        packed.call("tidy")  # the batch script's end
        assert not packed.folder.exists()
        (hidden,) = packed.folder.parent.glob(f"{packed.folder.name}.kept.*")
        if not is_whole:
            next(file for file in (hidden / tree.name).rglob("*.py") if file.is_file()).unlink()
        part.rename(part.with_name("away"))
        text = packed.start()[1]
        assert ("has taken" in text) is is_whole, text
        part.with_name("away").rename(part)
    assert "has taken" in packed.start()[1]
    packed.call("remove")
    assert not list(packed.folder.parent.glob("*"))


def test_a_hidden_tree_that_no_attempt_takes_back_goes_at_the_next_start(packed: Stage) -> None:
    assert packed.start()[0]
    packed.call("hide")
    packed.call("clean")
    assert not list(packed.folder.parent.glob("*"))
