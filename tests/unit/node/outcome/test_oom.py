"""The kernel's count of processes that it killed for memory is read from the right group."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp.node.outcome.oom import count_kills

V1 = "5:cpu,cpuacct:/\n4:memory:/slurm/job_7\n0::/\n"
MOUNTS = "tmpfs /sys tmpfs rw 0 0\ncgroup {0}/cpu cgroup rw,cpu 0 0\n"


def _proc(root: Path, cgroup: str, mounts: str, vmstat: str = "oom_kill 40\n") -> Path:
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(cgroup)
    (proc / "self/mounts").write_text((MOUNTS + mounts).format(root))
    (proc / "vmstat").write_text(f"pgfault 4\n{vmstat}")
    return proc


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_version_1_counts_in_the_jobs_own_group(tmp_path: Path) -> None:
    _write(tmp_path / "memory/slurm/job_7/memory.oom_control", "under_oom 0\noom_kill 3\n")
    _write(tmp_path / "memory/memory.oom_control", "oom_kill 9\n")
    _write(tmp_path / "cpu/slurm/job_7/memory.oom_control", "oom_kill 8\n")  # no controller of it
    assert count_kills(_proc(tmp_path, V1, "cgroup {0}/memory cgroup rw,memory 0 0\n")) == 3


@pytest.mark.parametrize("at", ["slurm/job_7/task_0", "slurm/job_7"])
def test_version_2_counts_where_the_controller_is_on(tmp_path: Path, at: str) -> None:
    _write(tmp_path / "cg" / at / "memory.events", "oom 2\noom_kill 5\noom_group_kill 0\n")
    mounts = "cgroup2 {0}/cg cgroup2 rw 0 0\n"
    assert count_kills(_proc(tmp_path, "0::/slurm/job_7/task_0\n", mounts)) == 5


def test_a_group_may_have_a_colon_in_its_name(tmp_path: Path) -> None:
    _write(tmp_path / "cg/pods:containerd:7/memory.events", "oom_kill 6\n")
    mounts = "cgroup2 {0}/cg cgroup2 rw 0 0\n"
    assert count_kills(_proc(tmp_path, "0::/pods:containerd:7\n", mounts)) == 6


def test_the_whole_machine_counts_without_a_group(tmp_path: Path) -> None:
    assert count_kills(_proc(tmp_path, V1, "cgroup2 {0}/unified cgroup2 rw 0 0\n")) == 40


def test_a_kernel_without_counts_has_no_kills(tmp_path: Path) -> None:
    assert count_kills(_proc(tmp_path, "", "", vmstat="")) == 0
    assert count_kills(tmp_path / "none") == 0
