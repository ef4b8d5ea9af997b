"""Look-ups that only a node can make for trackers: whether it reaches their servers, MLflow's run.

The first supervisor makes them, once for each attempt, while torch is imported. The workers wait
for the answer, variables as JSON in the attempt's file ``trackers`` (`worker.set_trackers`). Where
none of the trackers is installed, nothing is looked up, and no worker waits.
"""

from __future__ import annotations

import json
import os
import re
import site
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from socket import create_connection
from urllib.parse import urlsplit

from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.file_io import make_folders, patiently, read_word, write_whole
from hpc_ddp.core.job.trackers import SET_HERE, mlflow_id_file
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.net.place import Place

ANSWER = "trackers"  # empty from the start of the attempt (see `AttemptFolder.notice`)
CONNECT_S = 2.0
# For the client's import, which takes a minute on a cold file system: requests have own limits.
CREATE_S = 150.0
PROXIES = ("https_proxy", "all_proxy")
# The package; the variable and the default of its server; the variable that makes it offline.
SERVERS = (
    ("wandb", "WANDB_BASE_URL", "https://api.wandb.ai", "WANDB_MODE", "offline"),
    ("comet_ml", "COMET_URL_OVERRIDE", "https://www.comet.com", "COMET_START_ONLINE", "false"),
)
# MLflow refuses a run of another experiment than the script's: so a variable must name that.
EXPERIMENT = ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID")
NO_EXPERIMENT = (
    "each attempt has an MLflow run of its own; for one run set MLFLOW_EXPERIMENT_NAME, in place of"
    " mlflow.set_experiment"
)
# The process leaves the run open: its end would mark it as finished.
# Nothing is imported from the working directory, which others may write.
CREATE = """
import os, sys
sys.path[:] = [path for path in sys.path if path]
import mlflow
print("\\n" + mlflow.start_run(run_name=sys.argv[1]).info.run_id, flush=True)
os._exit(0)
"""


def start_lookups(place: Place, rank: int | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Start the look-ups in a thread of the attempt's first supervisor, if there is anything to
    look up. Return the variable that tells the workers to wait for the answer; {} if there is
    nothing to look up, or hpc-ddp is not to set trackers (`SET_HERE` is off).

    `rank` is that of the supervisor's one worker, None where it has all of the node. `environ` is
    the attempt's; a variable that is set there is not looked up. The first supervisor prints
    `NO_EXPERIMENT` where MLflow's run can't be created, since no experiment is set.
    """
    if environ.get(SET_HERE, "off") == "off":
        return {}
    servers = [
        (package, name, default, switch, word)
        for package, name, default, switch, word in SERVERS
        if switch not in environ and _is_installed(package, environ)
    ]
    lacks_run = "MLFLOW_TRACKING_URI" in environ and "MLFLOW_RUN_ID" not in environ
    lacks_run = lacks_run and _is_installed("mlflow", environ)
    creates_run = lacks_run and any(name in environ for name in EXPERIMENT)
    is_first = place.index == 0 and rank in (None, 0)
    if is_first and lacks_run and not creates_run:
        say(NO_EXPERIMENT)
    if not servers and not creates_run:
        return {}
    answer = place.attempt.path / ANSWER
    if is_first:
        look_up = partial(_look_up, place.run, answer, servers, creates_run, environ)
        threading.Thread(target=look_up, daemon=True).start()
    return {"HPC_DDP_TRACKERS_FILE": str(answer)}


def _is_installed(package: str, environ: Mapping[str, str]) -> bool:
    """Return whether the job's Python has a package, without an import. Folders that this process
    ignores (PYTHONPATH of `environ`, the user's site-packages) are searched, too."""
    paths = [*environ.get("PYTHONPATH", "").split(":"), site.getusersitepackages(), *sys.path]
    spec = PathFinder.find_spec(package, [path for path in paths if path])
    return spec is not None and spec.origin is not None  # not a folder of the tracker's files


def _look_up(
    run: RunFolder,
    answer: Path,
    servers: Sequence[tuple[str, ...]],
    creates_run: bool,
    environ: Mapping[str, str],
) -> None:
    """Make the look-ups, and write the variables that they give into the file `answer` as JSON.

    For each of the `servers` (rows of `SERVERS`) that can't be reached, its tracker is set offline;
    with `creates_run` MLflow's run is created. If Comet is among the servers, its folder in the run
    is made. A failure is printed, and ends no job; the file is written after it, too."""
    variables: dict[str, str] = {}
    try:
        for package, name, default, switch, word in servers:
            if package == "comet_ml":  # its client makes no folder
                make_folders(run.path / "comet")
            url = environ.get(name) or _login_url(package) or default
            if not _reaches(url, environ):
                variables[switch] = word
        if creates_run:
            variables["MLFLOW_RUN_ID"] = _create_mlflow_run(run, environ)
    except (OSError, RuntimeError) as error:
        say(f"a tracker can't be prepared, the job goes on without: {error}")
    finally:
        with suppress(OSError):  # the workers wait no longer than some seconds
            patiently(partial(answer.write_text, json.dumps(variables)))


def _login_url(package: str) -> str:
    """Return the server's URL that `wandb login --host` has noted for this user; '' where it has
    noted none, and for packages other than wandb."""
    folder = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    settings = read_word(Path(os.path.expanduser(folder)) / "settings")
    url = re.search(r"^base_url\s*=\s*(\S+)", settings, re.M)
    return url[1] if url and package == "wandb" else ""


def _reaches(url: str, environ: Mapping[str, str]) -> bool:
    """Return whether the server of `url` accepts a connection within `CONNECT_S`, the look-up of
    its name included. True without a try where `environ` sets a proxy, which alone can tell."""
    if any(environ.get(name) or environ.get(name.upper()) for name in PROXIES):
        return True
    server = urlsplit(url)
    answers: list[bool] = []

    def connect() -> None:
        """Connect to the server, and append True to `answers` if that works."""
        with suppress(OSError, ValueError):  # also a port that is no number
            port = server.port or (80 if server.scheme == "http" else 443)
            create_connection((server.hostname, port), timeout=CONNECT_S).close()
            answers.append(True)

    # In a thread: the look-up of a name has no timeout.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(CONNECT_S)
    return bool(answers)


def _create_mlflow_run(run: RunFolder, environ: Mapping[str, str]) -> str:
    """Create a run on MLflow's server by MLflow's own client, write its id to a file of `run` for
    later attempts, and return the id. Raise RuntimeError where no server answers, or the client
    fails or takes longer than `CREATE_S`; OSError where the id can't be written."""
    uri = environ["MLFLOW_TRACKING_URI"]
    if uri.startswith("http") and not _reaches(uri, environ):
        raise RuntimeError(f"MLflow: {_without_password(uri)} does not answer")
    # A server that answers may be slow: its first request takes 10 s and more. If this client gave
    # up before the script's client does, each attempt would get an MLflow run of its own.
    bounds = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "60"}
    argv = [sys.executable, "-c", CREATE, environ.get("WANDB_NAME") or run.name]
    try:
        client = subprocess.run(
            argv, env={**bounds, **environ}, capture_output=True, text=True, timeout=CREATE_S
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"MLflow has not answered within {CREATE_S:.0f} s") from None
    lines = (client.stdout if client.returncode == 0 else client.stderr).split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "").strip()
    if client.returncode:
        raise RuntimeError("MLflow: " + _without_password(last))
    write_whole(mlflow_id_file(run, AttemptEnv.from_env(environ).first_attempt), last + "\n")
    return last


def _without_password(text: str) -> str:
    """Return `text` with user and password removed from its URLs: ``//me:secret@host``."""
    return re.sub(r"://[^/@\s]*@", "://", text)
