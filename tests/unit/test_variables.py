"""Variables that do nothing, or not what is thought, and what is said of them."""

from __future__ import annotations

import itertools
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.launch.fabric import fabric_env, read_toml
from hpc_ddp.launch.resources import folder
from hpc_ddp.launch.variables import ALIKE, passed, warnings
from hpc_ddp.run.spec import JobSpec

TABLE = read_toml(folder("templates") / "variables.toml")
KNOWN = " ".join(TABLE["known"].values()).split()


def _warnings(**values: Any) -> list[str]:
    return warnings(JobSpec("train.py", nodes=2, **values))


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("NCCL_TIMEOUT", "init_process_group(timeout="),
        ("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("TORCH_NCCL_ASYNC_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("NCCL_IB_GDR_LEVEL", "NCCL_NET_GDR_LEVEL"),
        ("NCCL_MIN_CHANNELS", "NCCL_MIN_NCHANNELS"),
        ("NCCL_TREE_THRESHOLD", "NCCL_ALGO"),
        ("FI_EFA_USE_DEVICE_RDMA", "instead: nothing"),
        ("RDMAV_FORK_SAFE", "instead: nothing"),
        ("NCCL_SOCKET_IFNAMES", "did you mean 'NCCL_SOCKET_IFNAME'?"),
        ("NCCL_SOCKET_IFNMAE", "did you mean 'NCCL_SOCKET_IFNAME'?"),
        ("GLOO_SOCKET_IFNAM", "did you mean 'GLOO_SOCKET_IFNAME'?"),
        ("FI_PROVIDERS", "did you mean 'FI_PROVIDER'?"),
    ],
)
def test_a_dead_or_misspelt_name_is_told_with_the_right_one(name: str, right: str) -> None:
    for given in ({"env": {name: "1"}}, {"env_names": (name,)}, {"setup": (f"export {name}=1",)}):
        (warning,) = _warnings(**given)
        assert warning.startswith(name)
        assert right in warning


@pytest.mark.parametrize(
    "name", ["NCCL_BRAND_NEW_KNOB", "NCCL_MAX_P2P_CTAS", "NCCLX", "FI_OPX_UUID"]
)
def test_a_name_that_we_do_not_know_is_accepted(name: str) -> None:
    assert _warnings(env={name: "1"}) == []


def test_what_is_known_and_what_we_set_is_accepted() -> None:
    assert _warnings(env=dict.fromkeys(KNOWN, "2")) == []
    for path in (folder("templates") / "fabrics").glob("*.toml"):
        assert _warnings(env=fabric_env(path.stem), fabric=path.stem) == []


def test_no_two_known_names_are_taken_for_each_other() -> None:
    pairs = itertools.combinations(KNOWN, 2)
    assert max(SequenceMatcher(None, *pair).ratio() for pair in pairs) < ALIKE


def test_values_count_where_a_row_says_so() -> None:
    assert _warnings(fabric="efa", env={"NCCL_PROTO": "Simple", "FI_PROVIDER": "efa"}) != []
    assert _warnings(env={"NCCL_PROTO": "Simple"}) == []  # it is not known to be EFA
    assert "userfaultfd" in _warnings(env={"FI_MR_CACHE_MONITOR": "memhooks"})[0]
    assert _warnings(env={"FI_MR_CACHE_MONITOR": "kdreg2"}) == []


def test_what_contradicts_the_fabric_is_told() -> None:
    (warning,) = _warnings(fabric="slingshot", env={"NCCL_NET": "IB"})
    assert warning == "NCCL_NET=IB is not fabric slingshot, which has 'AWS Libfabric'; yours counts"
    assert _warnings(fabric="slingshot", env={"NCCL_NET": "ofi"}) == []
    (warning,) = _warnings(fabric="infiniband", env={"NCCL_IB_DISABLE": "1"})
    assert "--fabric ethernet" in warning
    assert _warnings(fabric="infiniband", env={"NCCL_IB_DISABLE": "0"}) == []
    assert _warnings(env={"NCCL_IB_DISABLE": "1", "NCCL_NET": "IB"}) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("export A=1", {"A": "1"}),
        ("  export A='x y' B=\"z\" # why", {"A": "x y", "B": "z"}),
        ("module load x; export A=1 && export B=2", {"A": "1", "B": "2"}),
        ("echo export A=1", {}),
        ("export A", {}),
        ("A=1 python x.py", {}),
        ("if true; then export A=1; fi", {"A": "1"}),
    ],
)
def test_what_a_set_up_line_exports(line: str, expected: dict[str, str]) -> None:
    assert passed(JobSpec("train.py", setup=(line,))) == expected


def test_every_row_is_whole() -> None:
    for row in TABLE["variable"]:
        assert (
            {"name", "why", "instead"}
            <= row.keys()
            <= {"name", "why", "instead", "value", "fabrics"}
        )
        for fabric in row.get("fabrics", ()):
            assert (folder("templates") / "fabrics" / f"{fabric}.toml").is_file()
        assert "value" in row or row["name"] not in KNOWN
    assert Path(folder("templates") / "variables.toml").read_text().count("2026-11-22") >= 3
