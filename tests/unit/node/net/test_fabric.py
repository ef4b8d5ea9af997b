"""What a node's interconnect is taken for, from trees like /sys, and what follows from it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hpc_ddp.core.job.spec import JobSpec
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.net.fabric import VERBS, Found, _loads, look, settings
from hpc_ddp.node.net.place import Place
from hpc_ddp.submission.resources import folder
from hpc_ddp.submission.script.render import job_env
from hpc_ddp.submission.settings.fabric_profiles import fabric_env, for_auto
from hpc_ddp.submission.snapshot import carry_library

FILES = sorted((folder("templates") / "fabrics").glob("*.toml"))


def _card(
    root: Path, name: str, layer: str, driver: str = "mlx5_core", state: str = "4: ACTIVE"
) -> None:
    """An RDMA card with one port, as the kernel shows it (taken over from its documentation:
    Documentation/ABI/stable/sysfs-class-infiniband)."""
    port = root / "sys/class/infiniband" / name / "ports/1"
    port.mkdir(parents=True)
    (port / "link_layer").write_text(f"{layer}\n")
    (port / "state").write_text(f"{state}\n")
    drivers = root / "sys/bus/pci/drivers" / driver
    drivers.mkdir(parents=True, exist_ok=True)
    device = port.parents[1] / "device"
    device.mkdir()
    (device / "driver").symlink_to(drivers)


def _verbs(root: Path) -> None:
    (root / "dev/infiniband").mkdir(parents=True, exist_ok=True)
    (root / "dev/infiniband/uverbs0").touch()


def _look(root: Path) -> Found:
    return look(root, loads=lambda library: library == VERBS)


def _lib(tmp_path: Path) -> Path:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    carry_library(run)
    return run.lib


# --- what is seen --------------------------------------------------------------------------


def test_a_machine_without_such_cards_has_nothing(tmp_path: Path) -> None:
    assert _look(tmp_path) == Found()
    assert str(Found()) == "none"


def test_infiniband_goes_before_the_ethernet_card_beside_it(tmp_path: Path) -> None:
    for index in range(2):
        _card(tmp_path, f"mlx5_{index}", "InfiniBand")
    _card(tmp_path, "mlx5_bond_0", "Ethernet")
    _verbs(tmp_path)
    found = _look(tmp_path)
    assert found == Found("infiniband", ("mlx5_0", "mlx5_1"))
    assert str(found) == "infiniband (mlx5_0 and 1 more)"
    assert found.is_like(Found("infiniband", ("mlx5_0",)))
    assert not found.is_like(Found("infiniband", ("mlx5_0", "mlx5_1"), trouble="x"))


def test_roce(tmp_path: Path) -> None:
    _card(tmp_path, "mlx5_0", "Ethernet")
    _card(tmp_path, "mlx5_1", "Ethernet", state="1: DOWN")
    _verbs(tmp_path)
    assert _look(tmp_path) == Found("roce", ("mlx5_0",))


def test_slingshot_is_told_by_its_own_class(tmp_path: Path) -> None:
    for index in range(4):
        (tmp_path / f"sys/class/cxi/cxi{index}").mkdir(parents=True)
    _card(tmp_path, "mlx5_0", "Ethernet")
    assert _look(tmp_path) == Found("slingshot", ("cxi0", "cxi1", "cxi2", "cxi3"))


def test_efa_is_told_by_its_driver(tmp_path: Path) -> None:
    _card(tmp_path, "rdmap16s27", "Unknown", driver="efa")
    assert _look(tmp_path) == Found("efa", ("rdmap16s27",))


def test_tcpxo_is_told_by_the_way_to_its_gpus(tmp_path: Path) -> None:
    (tmp_path / "dev/aperture_devices").mkdir(parents=True)
    assert _look(tmp_path) == Found("tcpxo", ("/dev/aperture_devices",))


@pytest.mark.parametrize("beside", [(), ("Ethernet",)])
def test_a_port_that_is_down_is_told(tmp_path: Path, beside: tuple[str, ...]) -> None:
    _card(tmp_path, "mlx5_0", "InfiniBand", state="1: DOWN")
    for layer in beside:
        _card(tmp_path, "mlx5_1", layer)
    _verbs(tmp_path)
    found = _look(tmp_path)
    assert found.name == ("roce" if beside else "")
    assert found.trouble == "no InfiniBand port is active (mlx5_0)"


def test_a_container_without_a_part_of_it_is_told(tmp_path: Path) -> None:
    _card(tmp_path, "mlx5_0", "InfiniBand")
    assert "there is no /dev/infiniband/uverbs*" in _look(tmp_path).trouble
    _verbs(tmp_path)
    assert VERBS in look(tmp_path, loads=lambda _: False).trouble
    assert look(tmp_path, loads=lambda _: False).name == "infiniband"


def test_this_machine_can_be_looked_at() -> None:
    """What it has is not known here; but what is told of it has to be there."""
    found = look()
    places = ("/sys/class/cxi", "/sys/class/infiniband", "/dev")
    there = [{path.name for path in Path(place).glob("*")} for place in places]
    assert {Path(card).name for card in found.cards} <= set().union(*there)
    assert bool(found.name) is bool(found.cards)
    if not (there[0] or there[1] or "aperture_devices" in there[2]):
        assert found == Found()


def test_a_library_is_tried_for_real() -> None:
    assert _loads("libc.so.6")
    assert _loads("libno-such-library.so") is False


# --- what is set ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["infiniband", "slingshot", "efa", "tcpxo"])
def test_a_fabric_that_is_found_is_set_as_if_it_had_been_named(name: str, tmp_path: Path) -> None:
    assert settings(Found(name), _lib(tmp_path), {}, tmp_path) == fabric_env(name)
    assert fabric_env(name)["NCCL_NET"]


@pytest.mark.parametrize("name", ["", "roce"])
def test_nothing_is_set_where_nothing_is_better_than_nccl_itself(name: str, tmp_path: Path) -> None:
    assert settings(Found(name), _lib(tmp_path), {}, tmp_path) == {}
    assert fabric_env("auto") == {}


def test_what_somebody_has_set_stays(tmp_path: Path) -> None:
    lib, found = _lib(tmp_path), Found("slingshot")
    given = {"NCCL_NET": "Socket", "FI_MR_CACHE_MONITOR": "kdreg2", "NCCL_NET_GDR_LEVEL": ""}
    told = settings(found, lib, given, tmp_path)
    assert not given.keys() & told.keys()
    assert told["FI_CXI_DISABLE_HOST_REGISTER"] == "1"
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("# ours\nNCCL_NET_GDR_LEVEL = SYS\nNCCL_NET=OFI\n")
    told = settings(found, lib, {"NCCL_IB_DISABLE": "1"}, tmp_path)
    assert "NCCL_NET" not in told
    assert "NCCL_NET_GDR_LEVEL" not in told
    own = tmp_path / "own.conf"
    own.write_text("FI_CXI_DEFAULT_CQ_SIZE=1\n")
    assert "FI_CXI_DEFAULT_CQ_SIZE" not in settings(
        found, lib, {"NCCL_CONF_FILE": str(own)}, tmp_path
    )


def test_no_network_is_named_where_another_word_has_chosen_one(tmp_path: Path) -> None:
    lib = _lib(tmp_path)
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins/libnccl-net.so").touch()
    path = {"LD_LIBRARY_PATH": f"/usr/lib::{tmp_path}/plugins"}
    for given in ({"NCCL_IB_DISABLE": "1"}, {"NCCL_NET_PLUGIN": "none"}, path):
        assert settings(Found("infiniband"), lib, given, tmp_path) == {}, given
    assert settings(Found("infiniband"), lib, {"NCCL_IB_DISABLE": "0"}, tmp_path)
    # Those that are no verbs are plugins themselves.
    for given in ({"NCCL_IB_DISABLE": "1"}, path):
        assert settings(Found("efa"), lib, given, tmp_path)["NCCL_NET"] == "AWS Libfabric"


def test_an_interface_of_nccls_own_files_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user names one."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    conf = tmp_path / "nccl.conf"
    conf.write_text("NCCL_SOCKET_IFNAME=ib0\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(conf))
    told = {"HPC_DDP_RUN": str(tmp_path), "HPC_DDP_ATTEMPT": "0"}
    RunFolder(tmp_path).claim_attempt({"nodes": ["local-0"]}, lambda info: False)
    told["HPC_DDP_NODE_INDEX"] = "0"
    assert Place.from_env(told).interface_env() == {"GLOO_SOCKET_IFNAME": "lo"}
    named = Place.from_env({**told, "HPC_DDP_INTERFACE": "eth1"})
    assert named.interface_env()["NCCL_SOCKET_IFNAME"] == "=eth1"


def test_a_run_of_an_older_version_goes_on_without(tmp_path: Path) -> None:
    assert settings(Found("infiniband"), tmp_path, {}, tmp_path) == {}


def test_a_job_of_one_node_needs_no_fabric() -> None:
    assert job_env(JobSpec("x.py", fabric="slingshot", env={"A": "1"})) == {"A": "1"}
    assert job_env(JobSpec("x.py", fabric="slingshot", nodes="1-2"))["NCCL_NET"]


# --- the data ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_fabric_names_its_sources_with_a_date(path: Path) -> None:
    text = path.read_text()
    env = fabric_env(path.stem)
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]+", name) and value for name, value in env.items())
    assert not env or ("https://" in text and "2026-" in text)


def test_what_travels_can_be_read_without_toml(tmp_path: Path) -> None:
    table = json.loads((_lib(tmp_path) / "fabrics.json").read_text())
    assert table == for_auto()
    assert "roce" not in table
    assert "slingshot" in table
