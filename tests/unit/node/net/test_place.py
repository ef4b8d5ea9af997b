"""A process of an attempt knows its node, and the interface that reaches it."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.net import place as place_module
from hpc_ddp.node.net.place import Place, node_index
from unit.node.fakes import place_of


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The variables of the first attempt of a run on two nodes."""
    run = RunFolder(tmp_path / "run").make()
    run.claim_attempt({"nodes": ["n1", "n2"]}, lambda identity: False)
    return {"HPC_DDP_RUN": str(run.path), "HPC_DDP_ATTEMPT": "0"}


def test_the_place_is_read_from_the_environment(environ: dict[str, str]) -> None:
    least = Place.from_env({**environ, "SLURM_NODEID": "1", "HPC_DDP_WARN_S": ""})
    assert (least.run.path, least.attempt.number) == (Path(environ["HPC_DDP_RUN"]), 0)
    assert (least.nodes, least.index, least.node, least.suffix) == (("n1", "n2"), 1, "n2", "")
    assert (least.end_time, least.warn_s, least.interface, least.fabric) == (None, 0.0, None, "")
    assert least.notice_signal == signal.SIGTERM
    more = {"NODE_INDEX": "0", "END_TIME": "99", "WARN_S": "7", "INTERFACE": "ib0"}
    more |= {"SIGNAL": "USR1", "FABRIC": "auto", "HOST_SUFFIX": "-ib"}
    most = Place.from_env(environ | {f"HPC_DDP_{name}": value for name, value in more.items()})
    assert (most.index, most.end_time, most.warn_s, most.interface) == (0, 99.0, 7.0, "ib0")
    assert (most.notice_signal, most.fabric, most.suffix) == (signal.SIGUSR1, "auto", "-ib")


@pytest.mark.parametrize(
    ("variables", "host", "index"),
    [
        ({"SLURM_NODEID": "1"}, "n1", 1),
        ({"SLURM_NODEID": "1", "HPC_DDP_NODE_INDEX": "0"}, "n1", 0),
        ({"SLURM_NODEID": "0", "HPC_DDP_STEP_LAUNCHER": "srun"}, "n2", 0),
        ({"SLURM_NODEID": "0", "HPC_DDP_STEP_LAUNCHER": "mpirun"}, "n2", 1),  # an MPI's own order
        ({"HPC_DDP_STEP_LAUNCHER": "ibrun"}, "n2.cluster.org", 1),
        ({"HPC_DDP_STEP_LAUNCHER": "ibrun"}, "N2.Cluster.org", 1),
        ({"HPC_DDP_STEP_LAUNCHER": "ibrun", "HPC_DDP_NODE_INDEX": "0"}, "elsewhere", 0),
    ],
)
def test_a_node_is_found_by_index_or_host_name(
    environ: dict[str, str],
    variables: dict[str, str],
    host: str,
    index: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert node_index({**environ, **variables}) == index


def test_a_host_that_is_none_of_the_nodes_is_refused(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "login")
    with pytest.raises(OSError, match="this host, login, is none of the job's 2 nodes"):
        node_index({**environ, "HPC_DDP_STEP_LAUNCHER": "mpirun"})


@pytest.mark.parametrize(
    ("nodes", "index", "host", "peer", "fabric"),
    [
        (("n1", "n2", "n3"), 0, "n1-ib", "n2-ib", True),
        (("n1", "n2", "n3"), 2, "n3-ib", "n1-ib", True),
        (("n1",), 0, "127.0.0.1", "n1-ib", False),
        (("local-0", "local-1"), 1, "127.0.0.2", "local-0-ib", False),
        (("local-gpu0", "local-gpu1"), 1, "local-gpu1-ib", "local-gpu0-ib", True),  # a cluster's
    ],
)
def test_hosts_and_peers_have_the_suffix(
    attempt: AttemptFolder, nodes: tuple[str, ...], index: int, host: str, peer: str, fabric: bool
) -> None:
    place = place_of(attempt, nodes=nodes, index=index, suffix="-ib", fabric="auto")
    assert (place.host, place.peer, place.seeks_fabric) == (host, peer, fabric)
    assert not place_of(attempt, fabric="ethernet").seeks_fabric


@pytest.mark.parametrize(
    ("values", "option"),
    [
        ({}, "n2"),
        ({"nodes": ("n1",)}, "127.0.0.1"),
        ({"nodes": ("local-0", "local-1")}, "127.0.0.1"),
        ({"interface": "ib0"}, None),
    ],
)
def test_the_interface_is_that_to_the_others(
    attempt: AttemptFolder,
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, Any],
    option: str | None,
) -> None:
    monkeypatch.setattr(place_module, "interface_to", lambda host: f"to-{host}")
    assert place_of(attempt, **values).chosen_interface == (f"to-{option}" if option else "ib0")


def _clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete the variables that name an interface to a backend."""
    for name in (
        *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        *("HCCL_SOCKET_IFNAME", "CCL_KVS_IFACE"),
    ):
        monkeypatch.delenv(name, raising=False)


def test_interface_variables_that_are_set_stay(
    attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_module, "interface_to", lambda host: "eth0")
    _clear(monkeypatch)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    variables = {"NCCL_SOCKET_IFNAME": "=eth0", "HCCL_SOCKET_IFNAME": "=eth0"}
    variables["CCL_KVS_IFACE"] = "eth0"
    assert place_of(attempt).interface_env() == variables
    for name in ("HCCL_SOCKET_IFNAME", "CCL_KVS_IFACE"):
        monkeypatch.setenv(name, "ib0")
        del variables[name]
        assert place_of(attempt).interface_env() == variables
    monkeypatch.setattr(place_module, "interface_to", lambda host: None)
    assert place_of(attempt).interface_env() == {}


def test_an_interface_of_nccls_own_files_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interface that the user names counts before them."""
    _clear(monkeypatch)
    conf = tmp_path / "nccl.conf"
    conf.write_text("NCCL_SOCKET_IFNAME=ib0\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(conf))
    environ = {"HPC_DDP_RUN": str(tmp_path), "HPC_DDP_ATTEMPT": "0"}
    RunFolder(tmp_path).claim_attempt({"nodes": ["local-0"]}, lambda identity: False)
    environ["HPC_DDP_NODE_INDEX"] = "0"
    others = {"GLOO_SOCKET_IFNAME": "lo", "HCCL_SOCKET_IFNAME": "=lo", "CCL_KVS_IFACE": "lo"}
    assert Place.from_env(environ).interface_env() == others
    named = Place.from_env({**environ, "HPC_DDP_INTERFACE": "eth1"})
    assert named.interface_env()["NCCL_SOCKET_IFNAME"] == "=eth1"
