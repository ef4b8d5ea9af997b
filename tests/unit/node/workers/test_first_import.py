"""A script that changes, before its import of torch, what that import depends on starts again."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import hpc_ddp
from hpc_ddp.node.workers import first_import, worker
from hpc_ddp.node.workers.first_import import FirstImport

COMMAND = ["python", "-u", "train.py", "--lr", "1"]


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """A module in place of torch, in a process whose finders, folder and CPUs are its own."""
    (tmp_path / "stand_in.py").touch()
    spec = importlib.util.spec_from_file_location("torch", tmp_path / "stand_in.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(first_import, "MISSING", {"not_there_yet", "torch.not_there"})
    monkeypatch.setattr(first_import, "READ", {"CI_OF_COMPILER"})
    monkeypatch.chdir(tmp_path)
    cpus = os.sched_getaffinity(0)
    handlers = {number: signal.getsignal(number) for number in worker.NOTICE_SIGNALS}
    yield module
    os.sched_setaffinity(0, cpus)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """The commands, with their environments, that the process would become."""
    commands: list[tuple[list[str], dict[str, str]]] = []

    def execve(_: str, words: list[str], environ: dict[str, str]) -> None:
        commands.append((words, environ))

    monkeypatch.setattr(os, "execve", execve)
    return commands


def test_torch_is_hidden_up_to_its_import(torch: ModuleType) -> None:
    spec = torch.__spec__
    FirstImport(COMMAND)
    assert "torch" not in sys.modules
    query = importlib.util.find_spec("torch")
    assert query is not None
    assert spec is not None
    assert query.origin == spec.origin
    assert "torch" not in sys.modules
    assert importlib.import_module("torch") is torch
    assert torch.__spec__ is spec
    assert not any(isinstance(finder, FirstImport) for finder in sys.meta_path)


def test_a_part_of_torch_brings_back_all_of_it(
    monkeypatch: pytest.MonkeyPatch, torch: ModuleType
) -> None:
    """Python would take it from ``sys.modules``, and not look for torch before it."""
    part, ours = ModuleType("torch.part"), ModuleType("hpc_ddp.training")
    monkeypatch.setitem(sys.modules, "torch.part", part)
    monkeypatch.setitem(sys.modules, "hpc_ddp.training", ours)
    monkeypatch.setattr(hpc_ddp, "training", ours, raising=False)
    torch.__path__ = []
    FirstImport(COMMAND)
    assert not {"torch", "torch.part", "hpc_ddp.training"} & {*sys.modules}
    assert not hasattr(hpc_ddp, "training")
    assert importlib.import_module("torch.part") is part
    assert hpc_ddp.training is ours  # type: ignore[attr-defined]
    assert sys.modules["torch"] is torch
    assert sys.modules["hpc_ddp.training"] is ours


def test_functions_of_the_exit_get_torch_in_any_case(
    starts: list[tuple[list[str], dict[str, str]]], torch: ModuleType
) -> None:
    finder = FirstImport(COMMAND)
    os.chdir("/")
    finder.put_back()
    assert importlib.import_module("torch") is torch
    assert not starts


def _set_variable(folder: Path) -> None:
    os.environ["CI_OF_COMPILER"] = "a"


def _change_folder(folder: Path) -> None:
    os.chdir("/")


def _append_path(folder: Path) -> None:
    sys.path.append("a")


def _bind_to_cpu(folder: Path) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def _install_module(folder: Path) -> None:
    (folder / "not_there_yet").mkdir()
    (folder / "not_there_yet" / "__init__.py").touch()
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_set_variable, "CI_OF_COMPILER"),
        (_change_folder, "the working directory"),
        (_append_path, "sys.path"),
        (_bind_to_cpu, "the number of CPUs"),
        (_install_module, "the module not_there_yet"),
    ],
)
def test_a_change_starts_the_script_again_as_at_its_start(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    starts: list[tuple[list[str], dict[str, str]]],
    change: Callable[[Path], None],
    name: str,
) -> None:
    monkeypatch.delenv("CI_OF_COMPILER", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    cpus = os.sched_getaffinity(0)
    if change is _bind_to_cpu and len(cpus) == 1:
        pytest.skip("this process has one CPU only")
    FirstImport(COMMAND)
    change(tmp_path)
    importlib.import_module("torch")
    ((words, environ),) = starts
    assert words[1:] == COMMAND[1:]
    assert "CI_OF_COMPILER" not in environ
    assert (Path.cwd(), os.sched_getaffinity(0)) == (tmp_path, cpus)
    assert f"hpc-ddp: {name} has changed before the import of torch" in capfd.readouterr().err
    os.environ.pop("CI_OF_COMPILER", None)


def test_a_working_folder_that_is_gone_is_left_to_the_script(
    tmp_path: Path, starts: list[tuple[list[str], dict[str, str]]], torch: ModuleType
) -> None:
    """As after the first life of a worker that has removed it."""
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    FirstImport(COMMAND)
    assert importlib.import_module("torch") is torch
    assert not starts
    os.chdir(tmp_path)
    FirstImport(COMMAND)
    os.environ["CI_OF_COMPILER"] = "b"
    importlib.import_module("torch")
    assert len(starts) == 1
    os.environ.pop("CI_OF_COMPILER")


def test_a_notice_of_the_first_life_counts(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    starts: list[tuple[list[str], dict[str, str]]],
) -> None:
    """The script's own handler has had the signal, and is gone behind an exec."""
    ends: list[int] = []
    monkeypatch.setenv("HPC_DDP_NOTICE", str(tmp_path / "notice"))
    monkeypatch.setattr(os, "kill", lambda _, number: ends.append(number))
    FirstImport(COMMAND)
    (tmp_path / "notice").touch()
    os.chdir("/")
    importlib.import_module("torch")
    assert ends == [signal.SIGTERM]


def test_variables_that_imports_do_not_read_may_change(
    monkeypatch: pytest.MonkeyPatch, starts: list[tuple[list[str], dict[str, str]]]
) -> None:
    FirstImport(COMMAND)
    for name in ("CUDA_VISIBLE_DEVICES", "QT_QPA_FONTDIR", "MPLCONFIGDIR", "HF_HOME"):
        monkeypatch.setenv(name, "1")
    importlib.import_module("torch")
    assert not starts


def test_a_process_that_the_script_forks_gets_torch(
    starts: list[tuple[list[str], dict[str, str]]], torch: ModuleType
) -> None:
    finder = FirstImport(COMMAND)
    finder.process += 1
    os.chdir("/")
    assert importlib.import_module("torch") is torch
    assert not starts
