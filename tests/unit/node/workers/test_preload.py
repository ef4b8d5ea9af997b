"""Imports that a fork would not survive, or that would leave less than one of the worker's own."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from hpc_ddp.node.workers import preload
from hpc_ddp.node.workers.first_import import MISSING, READ
from hpc_ddp.node.workers.preload import forget_rank, keep_cpus, pause_collector

REPO = Path(__file__).parents[4]
# Imports what the arguments name in a process of its own, and prints the refusal.
PROGRAM = """
import os, sys
from hpc_ddp.node.workers import preload
from hpc_ddp.node.workers.script_imports import UnfitError
output = os.memfd_create("output")
try:
    preload.import_all(sys.argv[1:], output)
except UnfitError as error:
    print(error)
os.lseek(output, 0, 0)
print(os.read(output, 100).decode())
"""


def _import(folder: Path, text: str, *names: str) -> list[str]:
    (folder / "package.py").write_text(f"import os, sys, threading, time\n{text}")
    env = {**os.environ, "PYTHONPATH": f"{folder}:{REPO}", "MASTER_ADDR": "n1"}
    argv = [sys.executable, "-c", PROGRAM, *(names or ("package",))]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("threading.Thread(target=threading.Event().wait, daemon=True).start()",
         "an import has started 1 threads"),
        ("import signal\nsignal.signal(signal.SIGTERM, print)", "a signal's handler"),
        ("os.chdir('/')", "the working directory"),
        ("os.environ['A_B'] = '1'", "the environment"),
        ("sys.path.insert(0, '/')", "sys.path"),
        ("import logging\nlogging.basicConfig()", "the root logger"),
        ("file = open('/dev/null')", "the open files"),
        ("raise ValueError(1)", "the import of package has failed: ValueError(1)"),
        ("sys.exit(3)", "the import of package has failed: SystemExit(3)"),
        ("import no_such_module", "the import of package has failed: ModuleNotFoundError"),
        ("file = open('/dev/dri')", "the import of package has failed"),
    ],
)  # fmt: skip
def test_an_import_that_must_be_the_workers_own_is_refused(
    tmp_path: Path, text: str, reason: str
) -> None:
    assert reason in _import(tmp_path, text)[0]


@pytest.mark.parametrize(
    "text",
    [
        "t = threading.Thread(target=time.sleep, args=(0,))\nt.start()\nt.join()",
    ],
)
def test_an_import_without_a_trace_is_taken(tmp_path: Path, text: str) -> None:
    lines = _import(tmp_path, f"print('out')\nprint('err', file=sys.stderr)\n{text}")
    assert sorted(lines) == ["", "err", "out"]


NVML = """
#include <fcntl.h>
#include <unistd.h>
static int users, file;
int nvmlInit(void) { if (!users++) file = open("/dev/null", O_RDONLY); return 0; }
int nvmlShutdown(void) { if (!--users) close(file); return 0; }
int nvmlDeviceGetCount_v2(int *count) { *count = 1; return 0; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="a stand-in for NVML is compiled by cc")
def test_a_package_may_ask_for_gpus(tmp_path: Path) -> None:
    """NVML is open only where the package has opened it itself."""
    library = tmp_path / "libnvidia-ml.so.1"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=NVML, text=True, check=True)
    text = "import torch\nfor _ in range(2):\n torch.cuda.is_available()"
    (tmp_path / "package.py").write_text(text)
    text += "\nimport ctypes\nctypes.CDLL('libnvidia-ml.so.1').nvmlInit()"
    (tmp_path / "keeper.py").write_text(text)
    paths = {"PYTHONPATH": f"{tmp_path}:{REPO}", "LD_LIBRARY_PATH": str(tmp_path)}
    paths["PYTHONUNBUFFERED"] = ""  # what the first import prints is not to go to the second's file
    twice = f"import torch\n{PROGRAM}\nsys.argv[1] = 'keeper'\n{PROGRAM}"
    argv = [sys.executable, "-c", twice, "package"]
    done = subprocess.run(
        argv, env={**os.environ, **paths}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["", "an import has changed the open files", ""]


def test_a_package_may_choose_how_the_collector_works() -> None:
    thresholds = gc.get_threshold()
    try:
        with pause_collector():
            assert not gc.get_threshold()[0]
            gc.disable()
        assert (gc.isenabled(), gc.get_threshold()) == (False, thresholds)
        gc.enable()
        with pause_collector():
            gc.set_threshold(9, 8, 7)
        assert (gc.isenabled(), gc.get_threshold()) == (True, (9, 8, 7))
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)


def test_the_rank_of_the_nodes_one_task_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("SLURM_PROCID", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "PMI_RANK", "RANK")
    for name in (*names, "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "0")
    forget_rank()
    assert [name for name in (*names, "SLURM_JOB_ID") if name in os.environ] == ["SLURM_JOB_ID"]


def test_a_package_that_binds_its_thread_binds_no_worker() -> None:
    cpus = os.sched_getaffinity(0)
    with keep_cpus():
        os.sched_setaffinity(0, {min(cpus)})
    assert os.sched_getaffinity(0) == cpus


def test_modules_that_imports_look_for_in_vain_are_recorded() -> None:
    """By exec, torch would import the script's own cuda.py amid its own import."""
    with preload.record_lookups(), suppress(ImportError):
        importlib.import_module("no_such_module")
    with suppress(ImportError):
        importlib.import_module("no_such_other")
    assert "no_such_module" in MISSING
    assert "no_such_other" not in MISSING


def test_variables_that_imports_look_up_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenCV's wheel sets variables of Qt: scripts with it started a second time for nothing."""
    monkeypatch.setenv("OF_ALL", "1")
    environ = os.environ
    kind = type(environ)
    with preload.record_lookups():
        names = [name for name, _ in environ.items()]  # as tqdm does
        assert (environ.get("NO_SUCH"), "OF_ALL" in names) == (None, True)
    assert environ["OF_ALL"] == "1"
    assert type(environ) is kind
    assert {"NO_SUCH"} == READ & {"NO_SUCH", "OF_ALL"}


def test_the_import_of_torch_reads_few_variables() -> None:
    """With all of them recorded each change, of PATH, say, started the script a second time."""
    text = (
        "from hpc_ddp.node.workers import first_import, preload\n"
        "with preload.record_lookups():\n"
        "    import torch._dynamo\n"
        "names = ('TORCH_LOGS', 'PATH', 'WANDB_DIR', 'HF_HOME', 'HOSTNAME', 'GLOO_SOCKET_IFNAME')\n"
        "print(*filter(first_import.is_read, names))"
    )
    env = {**os.environ, "WANDB_DIR": "a", "HF_HOME": "a", "HOSTNAME": "a"}
    argv = [sys.executable, "-c", text]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.stdout == "TORCH_LOGS\n", done.stderr
