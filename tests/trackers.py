"""What the trackers' clients have recorded: W&B's in files, MLflow's at a server."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.waiting import wait_until


def records_of(path: Path) -> Iterator[bytes]:
    """Yield the records of a .wandb file: LevelDB's log format, with a header of its own."""
    content, record = path.read_bytes(), b""
    position, block, header = 7, 32768, 7
    while position + header <= len(content):
        if block - position % block < header:
            position += block - position % block
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        position += header
        record += content[position : position + length]
        position += length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def recorded_offline(run: Path) -> dict[str, list[int]]:
    """Return the steps in the .wandb files of a run by W&B's id, in the order of the attempts."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    steps: dict[str, list[int]] = defaultdict(list)
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        id = path.stem.removeprefix("run-")
        for content in records_of(path):
            record = Record.FromString(content)
            if record.WhichOneof("record_type") == "run":
                assert record.run.run_id == id
            if record.WhichOneof("record_type") == "history":
                steps[id].append(record.history.step.num)
    return steps


@contextmanager
def mlflow_server(folder: Path, host: str = "127.0.0.1") -> Iterator[str]:
    """Make a folder for MLflow's server and run it; yield its URL."""
    folder.mkdir()
    argv = [sys.executable, str(Path(__file__).with_name("mlflow_server.py")), str(folder), host]
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        port, log_path = folder / "port", folder / "log"
        wait_until(port.exists, "the server", log_path.read_text, ended=server.poll)
        yield f"http://{host}:{port.read_text()}"
    finally:
        server.kill()
        server.wait()


def ask(url: str, call: str, **words: Any) -> dict[str, Any]:
    """Return the answer of MLflow's server; `words` are posted, if there are some."""
    request = urllib.request.Request(
        f"{url}/api/2.0/mlflow/{call}",
        json.dumps(words).encode() if words else None,
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def recorded_at(url: str) -> dict[str, list[int]]:
    """Return the steps that MLflow's server has, by its run."""
    runs = ask(url, "runs/search", experiment_ids=["0", "1"]).get("runs", [])
    ids = [run["info"]["run_id"] for run in runs]
    history = "metrics/get-history?metric_key=loss&run_id="
    steps = {id: ask(url, history + id).get("metrics", []) for id in ids}
    return {id: [metric["step"] for metric in metrics] for id, metrics in steps.items()}
