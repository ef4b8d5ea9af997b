"""The first node finds out what trackers need; nothing of it fails a job, or is waited for."""

from __future__ import annotations

import json
import socket
import sys
import threading
from pathlib import Path

import pytest

from hpc_ddp.core.job.trackers import SET_HERE, mlflow_id_file
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.net import tracker_lookup
from tests.waiting import wait_until
from unit.node.fakes import place_of

MLFLOW = """
import os
def start_run(run_name):
    assert "MLFLOW_RUN_ID" not in os.environ
    if "fails" in os.environ["MLFLOW_TRACKING_URI"]:
        raise SystemExit("no answer of https://me:word@server")
    class Run:
        class info:
            run_id = f"id of {run_name}, asked with {os.environ['MLFLOW_HTTP_REQUEST_TIMEOUT']} s"
    return Run
"""


class Node:
    """A first node whose job has some packages, by names and texts."""

    def __init__(self, folder: Path, **packages: str) -> None:
        self.run = RunFolder(folder / "digits" / "1").make()
        self.run.claim_attempt({"nodes": ["n1"]}, lambda identity: False)
        self.attempt = self.run.attempt(0)
        self.trackers = self.attempt.path / "trackers"
        (folder / "packages").mkdir()
        for name, text in packages.items():
            (folder / "packages" / f"{name}.py").write_text(text)
        self.environ = {SET_HERE: "WANDB_RUN_ID", "PYTHONPATH": str(folder / "packages")}
        self.rank: int | None = None
        self.index = 0

    def begin(self, **environ: str) -> dict[str, str]:
        place = place_of(self.attempt, index=self.index)
        return tracker_lookup.start_lookups(place, self.rank, self.environ | environ)

    def answer(self, **environ: str) -> dict[str, str]:
        """Return the answer that the workers read."""
        path = Path(self.begin(**environ)["HPC_DDP_TRACKERS_FILE"])
        wait_until(path.read_text, "the answer")
        answer: dict[str, str] = json.loads(path.read_text())
        return answer


@pytest.fixture(autouse=True)
def is_bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is installed but what a test puts there."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "-packages" not in path])
    monkeypatch.setattr("site.getusersitepackages", lambda: "/none")


def test_without_a_tracker_nobody_looks(tmp_path: Path) -> None:
    node = Node(tmp_path)
    words = {"MLFLOW_TRACKING_URI": "http://server", "MLFLOW_EXPERIMENT_NAME": "digits"}
    assert node.begin(**words) == {}
    (tmp_path / "packages" / "wandb").mkdir()  # its files, and not the package
    assert node.begin() == {}


def test_a_server_that_answers_is_used_and_another_is_not(tmp_path: Path) -> None:
    node = Node(tmp_path, wandb="", comet_ml="")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        refused, no_port = "http://127.0.0.1:9", "http://127.0.0.1:port"
        urls = {"WANDB_BASE_URL": url, "COMET_URL_OVERRIDE": refused}
        assert node.answer(**urls) == {"COMET_START_ONLINE": "false"}
        assert (node.run.path / "comet").is_dir()
        node.trackers.write_text("")
        assert node.answer(WANDB_BASE_URL=refused, COMET_URL_OVERRIDE=url) == {
            "WANDB_MODE": "offline"
        }
        node.trackers.write_text("")
        assert node.answer(WANDB_BASE_URL=no_port, COMET_URL_OVERRIDE=url) == {
            "WANDB_MODE": "offline"
        }
    node.trackers.write_text("")
    assert node.answer(**dict.fromkeys(urls, refused), HTTPS_PROXY="http://proxy") == {}


def test_the_server_of_a_login_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, wandb="")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "settings").write_text(f"[default]\nbase_url = {url}\n")
        assert node.answer() == {}
        answered, _ = server.accept()
        answered.close()


def test_a_look_up_of_a_name_that_hangs_counts_as_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, wandb="")
    monkeypatch.setattr(tracker_lookup, "CONNECT_S", 0.01)
    hang = threading.Event()
    monkeypatch.setattr(tracker_lookup, "create_connection", lambda *_, **__: hang.wait())
    assert node.answer() == {"WANDB_MODE": "offline"}


def test_one_node_looks_and_no_one_for_what_is_set(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    node = Node(tmp_path, wandb="", mlflow="raise SystemExit('imported')")
    assert node.begin(WANDB_MODE="online") == {}
    assert node.begin(**{SET_HERE: "off"}) == {}
    for node.rank, node.index in ((1, 0), (None, 1)):
        assert node.begin() == {"HPC_DDP_TRACKERS_FILE": str(node.trackers)}
    node.rank, node.index = None, 0
    assert node.trackers.read_text() == ""
    set_already = {"MLFLOW_TRACKING_URI": "x", "MLFLOW_EXPERIMENT_ID": "1", "MLFLOW_RUN_ID": "y"}
    assert node.begin(WANDB_MODE="online", **set_already) == {}
    assert not capfd.readouterr().err
    # The script may name another experiment, and MLflow would refuse the run.
    words = {"WANDB_MODE": "online", "MLFLOW_TRACKING_URI": "x"}
    for node.index, hint in ((1, ""), (0, f"hpc-ddp: {tracker_lookup.NO_EXPERIMENT}\n")):
        assert node.begin(**words) == {}
        assert capfd.readouterr().err == hint


def test_mlflows_run_is_created_once_and_a_failure_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, mlflow=MLFLOW)
    (tmp_path / "mlflow.py").write_text("raise SystemExit('of the working directory')")
    monkeypatch.chdir(tmp_path)
    experiment = {"MLFLOW_EXPERIMENT_NAME": "digits"}
    prefix = "hpc-ddp: a tracker can't be prepared, the job goes on without: MLflow: "
    refused = "http://me:word@127.0.0.1:9"
    assert node.answer(MLFLOW_TRACKING_URI=refused, **experiment) == {}
    assert capfd.readouterr().err == prefix + "http://127.0.0.1:9 does not answer\n"
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        node.trackers.write_text("")
        assert node.answer(MLFLOW_TRACKING_URI=f"{url}/fails", **experiment) == {}
        assert capfd.readouterr().err == prefix + "no answer of https://server\n"
        assert not mlflow_id_file(node.run).exists()
        node.trackers.write_text("")
        assert node.answer(MLFLOW_TRACKING_URI=url, **experiment) == {
            "MLFLOW_RUN_ID": "id of digits, asked with 60 s"
        }
    assert mlflow_id_file(node.run).read_text() == "id of digits, asked with 60 s\n"
