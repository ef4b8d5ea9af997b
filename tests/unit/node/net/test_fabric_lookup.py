"""A node's interconnect is recognised from trees like /sys, and NCCL's variables follow from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp.node.net.fabric_lookup import (
    VERBS,
    Interconnect,
    _try_to_load,
    fabric_variables,
    find_fabric,
)
from hpc_ddp.submission.settings.fabric_profiles import fabric_env
from unit.node.fakes import write_lib


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


def _look(root: Path) -> Interconnect:
    return find_fabric(root, can_load=lambda library: library == VERBS)


# --- what is seen --------------------------------------------------------------------------


def test_a_machine_without_such_cards_has_nothing(tmp_path: Path) -> None:
    assert _look(tmp_path) == Interconnect()
    assert str(Interconnect()) == "none"


def test_infiniband_goes_before_the_ethernet_card_beside_it(tmp_path: Path) -> None:
    for index in range(2):
        _card(tmp_path, f"mlx5_{index}", "InfiniBand")
    _card(tmp_path, "mlx5_bond_0", "Ethernet")
    _verbs(tmp_path)
    fabric = _look(tmp_path)
    assert fabric == Interconnect("infiniband", ("mlx5_0", "mlx5_1"))
    assert str(fabric) == "infiniband (mlx5_0 and 1 more)"
    assert fabric.is_like(Interconnect("infiniband", ("mlx5_0",)))
    assert not fabric.is_like(Interconnect("infiniband", ("mlx5_0", "mlx5_1"), trouble="x"))


def test_roce_is_told_from_infiniband(tmp_path: Path) -> None:
    _card(tmp_path, "mlx5_0", "Ethernet")
    _card(tmp_path, "mlx5_1", "Ethernet", state="1: DOWN")
    _verbs(tmp_path)
    assert _look(tmp_path) == Interconnect("roce", ("mlx5_0",))


def test_slingshot_is_recognised_by_its_class(tmp_path: Path) -> None:
    for index in range(4):
        (tmp_path / f"sys/class/cxi/cxi{index}").mkdir(parents=True)
    _card(tmp_path, "mlx5_0", "Ethernet")
    assert _look(tmp_path) == Interconnect("slingshot", ("cxi0", "cxi1", "cxi2", "cxi3"))


def test_efa_is_recognised_by_its_driver(tmp_path: Path) -> None:
    _card(tmp_path, "rdmap16s27", "Unknown", driver="efa")
    assert _look(tmp_path) == Interconnect("efa", ("rdmap16s27",))


def test_tcpxo_is_recognised_by_the_path_to_its_gpus(tmp_path: Path) -> None:
    (tmp_path / "dev/aperture_devices").mkdir(parents=True)
    assert _look(tmp_path) == Interconnect("tcpxo", ("/dev/aperture_devices",))


@pytest.mark.parametrize("beside", [(), ("Ethernet",)])
def test_a_port_that_is_down_is_reported(tmp_path: Path, beside: tuple[str, ...]) -> None:
    _card(tmp_path, "mlx5_0", "InfiniBand", state="1: DOWN")
    for layer in beside:
        _card(tmp_path, "mlx5_1", layer)
    _verbs(tmp_path)
    fabric = _look(tmp_path)
    assert fabric.name == ("roce" if beside else "")
    assert fabric.trouble == "no InfiniBand port is active (mlx5_0)"


def test_a_container_without_device_files_is_reported(tmp_path: Path) -> None:
    _card(tmp_path, "mlx5_0", "InfiniBand")
    assert "there is no /dev/infiniband/uverbs*" in _look(tmp_path).trouble
    _verbs(tmp_path)
    assert VERBS in find_fabric(tmp_path, can_load=lambda _: False).trouble
    assert find_fabric(tmp_path, can_load=lambda _: False).name == "infiniband"


def test_this_machines_fabric_is_recognised() -> None:
    """The cards of this machine are unknown; those that are reported have to exist."""
    fabric = find_fabric()
    places = ("/sys/class/cxi", "/sys/class/infiniband", "/dev")
    entries = [{path.name for path in Path(place).glob("*")} for place in places]
    assert {Path(card).name for card in fabric.cards} <= set().union(*entries)
    assert bool(fabric.name) is bool(fabric.cards)
    if not (entries[0] or entries[1] or "aperture_devices" in entries[2]):
        assert fabric == Interconnect()


def test_a_library_is_tried_for_real() -> None:
    assert _try_to_load("libc.so.6")
    assert _try_to_load("libno-such-library.so") is False


# --- what is set ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["infiniband", "slingshot", "efa", "tcpxo"])
def test_a_fabric_that_is_found_is_set_as_if_it_had_been_named(name: str, tmp_path: Path) -> None:
    assert fabric_variables(Interconnect(name), write_lib(tmp_path), {}, tmp_path) == fabric_env(
        name
    )
    assert fabric_env(name)["NCCL_NET"]


@pytest.mark.parametrize("name", ["", "roce"])
def test_no_variable_is_set_without_a_better_choice_than_nccls(name: str, tmp_path: Path) -> None:
    assert fabric_variables(Interconnect(name), write_lib(tmp_path), {}, tmp_path) == {}
    assert fabric_env("auto") == {}


def test_variables_that_are_set_stay(tmp_path: Path) -> None:
    lib, fabric = write_lib(tmp_path), Interconnect("slingshot")
    environ = {"NCCL_NET": "Socket", "FI_MR_CACHE_MONITOR": "kdreg2", "NCCL_NET_GDR_LEVEL": ""}
    variables = fabric_variables(fabric, lib, environ, tmp_path)
    assert not environ.keys() & variables.keys()
    assert variables["FI_CXI_DISABLE_HOST_REGISTER"] == "1"
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("# ours\nNCCL_NET_GDR_LEVEL = SYS\nNCCL_NET=OFI\n")
    variables = fabric_variables(fabric, lib, {"NCCL_IB_DISABLE": "1"}, tmp_path)
    assert "NCCL_NET" not in variables
    assert "NCCL_NET_GDR_LEVEL" not in variables
    nccl_conf = tmp_path / "own.conf"
    nccl_conf.write_text("FI_CXI_DEFAULT_CQ_SIZE=1\n")
    assert "FI_CXI_DEFAULT_CQ_SIZE" not in fabric_variables(
        fabric, lib, {"NCCL_CONF_FILE": str(nccl_conf)}, tmp_path
    )


def test_no_network_is_named_if_a_variable_chose_one(tmp_path: Path) -> None:
    lib = write_lib(tmp_path)
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins/libnccl-net.so").touch()
    path = {"LD_LIBRARY_PATH": f"/usr/lib::{tmp_path}/plugins"}
    for environ in ({"NCCL_IB_DISABLE": "1"}, {"NCCL_NET_PLUGIN": "none"}, path):
        assert fabric_variables(Interconnect("infiniband"), lib, environ, tmp_path) == {}, environ
    assert fabric_variables(Interconnect("infiniband"), lib, {"NCCL_IB_DISABLE": "0"}, tmp_path)
    # Those that are no verbs are plugins themselves.
    for environ in ({"NCCL_IB_DISABLE": "1"}, path):
        assert (
            fabric_variables(Interconnect("efa"), lib, environ, tmp_path)["NCCL_NET"]
            == "AWS Libfabric"
        )


def test_a_run_of_an_older_version_gets_no_variables(tmp_path: Path) -> None:
    assert fabric_variables(Interconnect("infiniband"), tmp_path, {}, tmp_path) == {}
