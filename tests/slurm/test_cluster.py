"""The tests' own cluster comes up on a fresh machine, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cluster_machine
import pytest
from cluster_machine import ClusterError, available, ensure_packages, folder_of

from tests.waiting import wait_until

HOLDER = """
import os, signal
from cluster import Cluster
print(Cluster.up().instance, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.more
@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_a_killed_holder_leaves_no_cluster() -> None:
    holder = subprocess.run(
        [sys.executable, "-c", HOLDER], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    folder = folder_of(int(holder.stdout))
    wait_until(lambda: not folder.with_suffix(".lock").exists(), "the end of the cluster")
    assert not folder.exists()


# An apt-get that refuses to run beside another one, as the real one does; `install` makes the
# last of its arguments a program.
APT_GET = """\
#!/bin/bash
cd "${0%/*}" && echo "$*" >>calls
mkdir held 2>/dev/null || { echo "E: Could not get lock ./held. It is held by 1" >&2; exit 100; }
sleep 0.2
[ "$2" = update ] || { echo "#!/bin/sh" >"${@: -1}"; chmod +x "${@: -1}"; }
rmdir held
"""


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a stand-in for apt-get, first on the PATH; `calls` has its calls."""
    (tmp_path / "apt-get").write_text(APT_GET)
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setattr(cluster_machine, "PATH", f"{tmp_path}:{cluster_machine.PATH}")
    monkeypatch.setattr(cluster_machine, "CACHE", tmp_path / "cache")
    return tmp_path


def test_processes_that_need_a_package_install_it_once(apt: Path) -> None:
    """The processes of pytest-xdist all find a fresh machine without Slurm, at the same time."""
    needed = {"test-program": "test-program"}
    with ThreadPoolExecutor(4) as pool:
        for installed in [pool.submit(ensure_packages, needed) for _ in range(4)]:
            installed.result()
    assert len((apt / "calls").read_text().splitlines()) == 2  # update, install


def test_another_programs_apt_get_is_waited_for(apt: Path) -> None:
    (apt / "held").mkdir()
    with ThreadPoolExecutor(1) as pool:
        installed = pool.submit(ensure_packages, {"test-program": "test-program"})
        wait_until((apt / "calls").exists, "the first try")
        (apt / "held").rmdir()
        installed.result()
    assert (apt / "test-program").exists()


def test_what_apt_get_complains_of_is_shown(apt: Path) -> None:
    (apt / "apt-get").write_text("#!/bin/sh\necho E: no route to the mirror >&2; exit 100\n")
    with pytest.raises(ClusterError, match="apt-get update` failed: E: no route to the mirror"):
        ensure_packages({"test-program": "test-program"})
