"""A script that runs in a fork begins and ends as one that Python starts."""

from __future__ import annotations

import bz2
import gzip
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

NODE = Path(__file__).parents[4] / "hpc_ddp/node"
# A part of node.py: a fork that becomes the script, as fork_server.py makes it, without torch.
PART = """
import atexit, gc, os, sys
from hpc_ddp.node.workers import fork_server
from hpc_ddp.node.workers.forked_script import ForkedScript, is_main_kept, wipe_main_first
import package
def main(words):
    if is_main_kept():
        atexit.register(wipe_main_first)
    gc.freeze()
    atexit.register(fork_server._end_collections)
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return ForkedScript.become([sys.executable, "-u", *words])
"""
# A package that is imported before the fork. It keeps __main__ to the end, as dill, which saves it.
PACKAGE = """
import __main__, bz2, sys, zipfile
sys.keeper = sys.modules["package"]

class Note:
    def __init__(self, text):
        self.text = text
    def __del__(self):
        print("the end of", self.text)

def call_hook(kind, error, trace):
    print("the hook", error.__traceback__ is trace is sys.last_traceback, trace.tb_lineno)
    print(sys.excepthook is call_hook)
    if sys.argv[1] == "failing hook":
        raise KeyError("in the hook")

def leave(end):
    note, file = Note("a local"), bz2.open("local.bz2", "wt")
    archive = zipfile.ZipFile("local.zip", "w")
    file.write("local")
    archive.writestr("a", "archive")
    if "hook" in end:
        sys.excepthook = call_hook
    if end == "exit":
        sys.exit("bye")
    if end != "return":
        raise ValueError("the end")
"""
SCRIPT = '''"""A script that leaves its files open."""
import gzip, os, package, sys, threading, multiprocessing
print(sorted(globals()), [globals()[name] for name in ("__doc__", "__file__", "__name__")])
print(package.__main__ is sys.modules["__main__"], vars(package.__main__) is globals())
print(threading.main_thread().native_id == threading.get_native_id() == os.getpid())
note, record = package.Note("a global"), gzip.open("global.gz", "wt")
record.write("global")
{function}package.leave(sys.argv[1])
'''
# With a function the globals are in a cycle.
FUNCTION = "def print_loss(): pass\n"


def _lib(folder: Path) -> Path:
    """Make a folder with node.py, `PART` beside its parts, and the package."""
    (folder / "hpc_ddp/node").mkdir(parents=True)
    (folder / "node.py").write_text((NODE / "entry.py").read_text())
    (folder / "package.py").write_text(PACKAGE)
    for package in (folder / "hpc_ddp", folder / "hpc_ddp/node"):
        (package / "__init__.py").touch()
    (folder / "hpc_ddp/core").symlink_to(NODE.parent / "core")
    (folder / "hpc_ddp/node/workers").symlink_to(NODE / "workers")
    (folder / "hpc_ddp/node/part.py").write_text(PART)
    return folder


def _run_both(folder: Path, script: str, *arguments: str) -> list[tuple[int, str]]:
    """Run a script by exec and in a fork, each in a folder of this name below `folder`; return the
    exit codes and the outputs."""
    file, lib = folder / "train.py", _lib(folder / "lib")
    file.write_text(script)
    outputs = []
    for name, start in (("exec", []), ("fork", [str(lib / "node.py"), "part"])):
        (folder / name).mkdir()
        done = subprocess.run(
            [sys.executable, "-u", *start, str(file), *arguments],
            cwd=folder / name,
            env={"PYTHONPATH": str(lib)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        outputs.append((done.returncode, done.stdout))
    return outputs


@pytest.mark.parametrize("function", ["", FUNCTION])
@pytest.mark.parametrize("end", ["return", "exit", "raise"])
def test_a_forked_script_begins_and_ends_as_a_started_one(
    tmp_path: Path, end: str, function: str
) -> None:
    """Files that a script leaves open are complete, whether they are globals, or locals that an
    exception keeps; no output names node.py."""
    by_exec, by_fork = _run_both(tmp_path, SCRIPT.format(function=function), end)
    assert by_exec == by_fork
    assert "True True\nTrue\n" in by_exec[1]
    assert by_exec[1].count("the end of") == 2
    for folder in (tmp_path / "exec", tmp_path / "fork"):
        assert gzip.decompress((folder / "global.gz").read_bytes()) == b"global"
        assert bz2.decompress((folder / "local.bz2").read_bytes()) == b"local"
        assert zipfile.ZipFile(folder / "local.zip").read("a") == b"archive"


@pytest.mark.parametrize("end", ["hook", "failing hook"])
def test_the_hook_of_a_forked_script_is_called_as_by_python(tmp_path: Path, end: str) -> None:
    if end == "failing hook" and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 adds the frame of a function that raises an exception again")
    by_exec, by_fork = (
        (code, text.partition("the end of")[0])
        for code, text in _run_both(tmp_path, SCRIPT.format(function=""), end)
    )
    assert by_exec == by_fork
    assert "the hook True 8\n" in by_exec[1]
