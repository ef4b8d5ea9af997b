"""TensorBoard on the runs' events, under names that a person knows."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from hpc_ddp.run.errors import HpcDdpError
from hpc_ddp.run.folder import RunFolder
from hpc_ddp.run.ownership import check_executable
from hpc_ddp.run.spec import JobSpec

PATIENCE_S = 120.0  # an import from a network disk that nobody has read yet


def event_folders(runs: Sequence[RunFolder]) -> dict[str, Path]:
    """Return the folders with events of some runs, by a readable name; tasks with their point.

    Raises
    ------
    HpcDdpError
        there is none
    """
    found = {}
    for run in runs:
        for each in run.tasks() or [run]:
            folder = each.path / "tensorboard"
            if any(folder.rglob("events.out.tfevents*")):
                found[_name(each)] = folder
    if not found:
        raise HpcDdpError(
            "no run has events for TensorBoard yet",
            hint="start(tensorboard=True) in the script has them written",
        )
    return found


def _name(run: RunFolder) -> str:
    name = f"{run.name}/{run.id}"
    if not run.is_task:
        return name
    points = JobSpec.from_json((run.whole / "job.json").read_text()).trials
    point = points[run.index] if run.index < len(points) else {}
    return " ".join([name, *(f"{key}={value}".replace("/", "_") for key, value in point.items())])


def command(run: RunFolder) -> list[str]:
    """Return what starts TensorBoard: in the Python of this process, on PATH, or in the run's.

    Raises
    ------
    UsageError
        only the run's Python may have it, and the run is another user's
    HpcDdpError
        it is in none of them
    """
    if find_spec("tensorboard"):
        return [sys.executable, "-m", "tensorboard.main"]
    if on_path := shutil.which("tensorboard"):
        return [on_path]
    check_executable(run)
    python = JobSpec.from_json(run.job_json.read_text()).python
    with contextlib.suppress(OSError):
        if (
            subprocess.run([python, "-c", "import tensorboard"], capture_output=True).returncode
            == 0
        ):
            return [python, "-m", "tensorboard.main"]
    raise HpcDdpError(
        f"TensorBoard is not installed, neither here nor for the job's Python ({python})",
        hint=f"{sys.executable} -m pip install tensorboard",
    )


@contextlib.contextmanager
def served(
    folders: Mapping[str, Path], command: Sequence[str], port: int | None
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Have TensorBoard serve some folders on this machine alone; give its port and its process.

    Raises
    ------
    HpcDdpError
        it did not come up
    """
    port = port or _free_port()
    with tempfile.TemporaryDirectory(prefix="hpc-ddp-tensorboard-") as temp:
        root = Path(temp, "runs")
        for name, folder in folders.items():
            link = root / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(folder)
        options = ["--logdir", str(root), "--host", "127.0.0.1", "--port", str(port)]
        said = Path(temp, "said")
        with open(said, "wb") as log:
            process = subprocess.Popen([*command, *options], stdout=log, stderr=log)
        try:
            _wait_for(process, port, said)
            yield port, process
        finally:
            process.terminate()
            process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _wait_for(process: subprocess.Popen[bytes], port: int, said: Path) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < give_up_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    lines = said.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
    raise HpcDdpError(f"TensorBoard did not come up: {lines[-1]}", hint="--port with another one")


def from_elsewhere(port: int) -> str:
    """Return what leads to the port from a laptop."""
    user = os.environ.get("USER") or os.environ.get("LOGNAME") or "USER"
    return f"ssh -N -L {port}:127.0.0.1:{port} {user}@{socket.gethostname()}"
