"""A node counts its GPUs."""

from __future__ import annotations

import itertools
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.net.place import Place
from hpc_ddp.node.preflight import checks
from hpc_ddp.node.preflight.checks import UnfitError


def _place(node: str = "n1") -> Place:
    run = RunFolder(Path("/r/name/run"))
    return Place(run, run.attempt(0), (node,), 0, "", None, 0.0, None)


NVIDIA, AMD, INTEL = ({name: 4} for name in ("NVIDIA", "AMD", "Intel"))
CUDA, ROCR, ZE = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"
FOUR = {"gpus": 4, "gpus_there": 4}


@pytest.mark.parametrize(
    ("count", "environ", "listed", "files", "expected"),
    [
        (2, {CUDA: "0,1"}, None, {}, {"gpus": 2, "note": "GPUs are counted by CUDA"}),
        (0, {CUDA: "0,1"}, None, {}, {"gpus": 2}),
        (1, {CUDA: "0"}, 0, NVIDIA, "0 GPUs in place of 1 .by nvidia-smi"),
        (2, {ROCR: "0"}, None, AMD, "1 GPUs in place of 2 .by ROCR_VISIBLE"),
        (2, {ROCR: "0,1", "HIP_VISIBLE_DEVICES": "0"}, None, AMD, "1 GPUs .* .by HIP_VISIBLE"),
        (2, {ROCR: "0", ZE: "0"}, None, NVIDIA, FOUR),  # those of other vendors don't count
        (1, {CUDA: ""}, None, {}, "0 GPUs in place of 1 .by CUDA_VISIBLE"),
        (1, {CUDA: "NoDevFiles"}, None, {}, "0 GPUs in place of 1 .by CUDA_VISIBLE"),
        (2, {CUDA: "0,-1,1"}, None, NVIDIA, "1 GPUs in place of 2"),
        (2, {"ASCEND_RT_VISIBLE_DEVICES": "3"}, None, {"Ascend": 8}, "1 GPUs in place of 2"),
        (2, {ZE: "0.0,0.1"}, None, {"Intel": 1}, {"gpus": 2, "gpus_there": 1}),
        (3, {ZE: "0.0,0.1,1.0"}, None, {"Intel": 1}, "2 GPUs in place of 3 .by nvidia-smi and dev"),
        (4, {ZE: "", CUDA: "0"}, None, INTEL, FOUR),  # an empty mask hides nothing
        (4, {"ONEAPI_DEVICE_SELECTOR": "level_zero:gpu"}, None, INTEL, FOUR),
        (4, {"ONEAPI_DEVICE_SELECTOR": "level_zero:0,2"}, None, INTEL, "2 GPUs in place of 4"),
        (4, {}, None, {"Intel": 1, "NVIDIA": 4}, FOUR),  # one is on the main board
        (4, {}, 4, {"NVIDIA": 2}, FOUR),
        (4, {}, None, NVIDIA, FOUR),
        (1, {}, None, {}, {"gpus": None, "note": "can't tell whether there are 1 GPUs"}),
        (0, {}, None, {}, {"gpus": 0}),
        (0, {}, None, INTEL, {"gpus": 4}),  # a display's: torch need not see it
        (4, {"HIP_VISIBLE_DEVICES": ""}, None, AMD, FOUR),
        (4, {"ONEAPI_DEVICE_SELECTOR": "!level_zero:0"}, None, INTEL, FOUR),
        (8, {}, None, {"AMD": 1}, {"gpus": 8, "gpus_there": 1}),  # one in partitions
    ],
)
def test_gpus_are_counted_by_variables_slurm_or_files(
    count: int,
    environ: dict[str, str],
    listed: int | None,
    files: dict[str, int],
    expected: dict[str, Any] | str,
) -> None:
    if isinstance(expected, str):
        with pytest.raises(UnfitError, match=expected):
            checks.check_gpus(count, environ, listed, files)
        return
    result = checks.check_gpus(count, environ, listed, files)
    note = result.pop("note", "")
    assert bool(note) is ("note" in expected)
    assert note.startswith(expected.get("note", ""))
    assert result == {key: value for key, value in expected.items() if key != "note"}


NO_PROGRAM = "a file that the kernel can't execute"


def _install(folder: Path, text: str) -> None:
    (folder / "nvidia-smi").write_text(text)
    (folder / "nvidia-smi").chmod(0o755)


@pytest.mark.parametrize(
    ("script", "result"),
    [
        (None, None),
        ("echo 'GPU 0: a'; echo ' MIG'; echo 'GPU 1: a'", 2),
        ("echo 'GPU 0: a'; echo '  MIG 1g: a'; echo '  MIG 1g: a'", 2),
        ("echo; echo broken >&2; echo more; exit 9", "nvidia-smi: more"),
        ("exit 9", "nvidia-smi: exit code 9"),
        (NO_PROGRAM, "nvidia-smi can't be started: Exec format error"),
    ],
)
def test_nvidia_smi_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, result: str | int | None
) -> None:
    if script is not None:
        _install(tmp_path, f"#!/bin/bash\n{script}\n" if script != NO_PROGRAM else "")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if script else str(tmp_path))
    if isinstance(result, str):
        with pytest.raises(UnfitError, match=result):
            checks._ask_nvidia_smi()
    else:
        assert checks._ask_nvidia_smi() == result


def test_gpus_are_counted_if_the_job_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int | None]] = []
    files: dict[str, int] = {}
    monkeypatch.setattr(checks, "_ask_nvidia_smi", lambda: 4)
    monkeypatch.setattr(checks, "device_files", lambda: files)
    monkeypatch.setattr(
        checks, "check_gpus", lambda count, env, listed, files: calls.append((count, listed))
    )
    checks.count_gpus(_place(), 4)
    checks.count_gpus(_place(), 0)
    assert checks.count_gpus(_place("local-0"), 4) == {}
    files["AMD"] = 4
    checks.count_gpus(_place(), 4)  # an nvidia-smi of an image for all nodes fails there
    assert calls == [(4, 4), (0, None), (4, None)]


def test_a_late_nvidia_smi_is_a_fault_only_where_nothing_else_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a daemon that keeps the driver awake it may take half a minute on eight GPUs."""
    files: dict[str, int] = {"NVIDIA": 4}
    _install(tmp_path, "#!/bin/bash\nexec sleep 60\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(checks, "GPU_S", 0.3)
    monkeypatch.setattr(checks, "device_files", lambda: files)
    note = "nvidia-smi gave no answer within 0 s; its files are there"
    assert checks.count_gpus(_place(), 4) == {"gpus": 4, "gpus_there": 4, "note": note}
    with pytest.raises(UnfitError, match="4 GPUs in place of 8"):
        checks.count_gpus(_place(), 8)
    files.clear()
    with pytest.raises(UnfitError, match="nvidia-smi gave no answer within 0 s"):
        checks.count_gpus(_place(), 4)


def test_time_of_a_suspended_job_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is 400 s later than the one before."""
    clock = SimpleNamespace(monotonic=itertools.count(0.0, 400.0).__next__)
    monkeypatch.setattr(checks, "time", clock)
    done = checks._run_within(["sh", "-c", "sleep 1.5; echo yes"], 100.0)
    assert (done.returncode, done.stdout) == (0, "yes\n")


def test_a_program_that_no_signal_ends_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in state D."""
    programs: list[subprocess.Popen[str]] = []
    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "kill", lambda program: programs.append(program))
        begin = time.monotonic()
        with pytest.raises(subprocess.TimeoutExpired):
            checks._run_within(["sleep", "100"], 0.1)
        assert time.monotonic() - begin < 50
    for program in programs:
        program.kill()
        program.communicate()


def test_nvidia_smi_may_be_slow() -> None:
    assert checks.GPU_S >= 120
