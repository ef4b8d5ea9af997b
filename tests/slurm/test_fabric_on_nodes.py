"""The interconnect is looked up on the nodes of a real job: said, set, and compared."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from harness import REPO, Hpc

# Ends once the supervisor of the other node has said what it saw.
SCRIPT = """
import json, os, pathlib, time
names = ("NCCL_NET", "NCCL_SOCKET_IFNAME", "SLURM_LOCALID")
told = {name: os.environ.get(name) for name in names}
rank = os.environ["RANK"]
pathlib.Path(os.environ["OUT"], rank).write_text(json.dumps(told))
out = pathlib.Path(os.environ["HPC_DDP_RUN"], "logs", "slurm.out")
end = time.time() + 60
while "WARNING" not in out.read_text() and time.time() < end:
    time.sleep(0.2)
"""


@pytest.fixture
def infiniband(cluster: Cluster, tmp_path: Path) -> Iterator[str]:
    """One node has a card whose port is active, as /sys shows it; in no container of verbs."""
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "link_layer").write_text("InfiniBand\n")
    (port / "state").write_text("4: ACTIVE\n")
    node = cluster.nodes[0]
    cluster.exec_on(node, "mount", "--bind", str(tmp_path / "class"), "/sys/class")
    yield node
    cluster.exec_on(node, "umount", "--lazy", "/sys/class", check=False)


@pytest.mark.parametrize(
    ("launcher", "backend"),
    [
        ("srun", "slurm"),
        pytest.param("torchrun", "slurm", marks=pytest.mark.more),
        pytest.param("torchrun", "submitit", marks=pytest.mark.more),
        pytest.param("srun", "submitit", marks=pytest.mark.more),
    ],
)
def test_a_node_that_differs_is_named(
    hpc: Hpc, cluster: Cluster, infiniband: str, launcher: str, backend: str, tmp_path: Path
) -> None:
    first, second = cluster.nodes[:2]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = ("--nodes", "2", "--nproc-per-node", "2", "--nodelist", f"{first},{second}")
    how = ("--launcher", launcher, "--backend", backend, "--env", f"OUT={tmp_path}")
    job = hpc.submit(*words, *how, str(script))
    assert job.end() == "COMPLETED", job.output()
    output = job.output()
    there = "infiniband (mlx5_0), but they can't be opened: there is no /dev/infiniband/uverbs*"
    assert output.count(f"hpc-ddp: fabric: {first}: {there}") == 1, output
    assert output.count("; NCCL_NET=IB\n") == 1, output
    warning = f"WARNING: the interconnect of {second} is none, and of {first} {there}"
    assert output.count(warning) == 1, output
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    assert [each["NCCL_NET"] for each in told] == ["IB", "IB", None, None]
    assert {each["NCCL_SOCKET_IFNAME"] for each in told} == {"=eth0"}
    seen = {event["node"]: event for event in job.events("fabric")}
    assert seen[first]["name"] == "infiniband"
    assert seen[first]["env"] == {"NCCL_NET": "IB"}
    assert seen[second]["name"] == ""
    assert seen[second]["env"] == {}


@pytest.mark.more
def test_the_preflight_names_a_node_without_the_card(
    hpc: Hpc, cluster: Cluster, infiniband: str
) -> None:
    first, second = cluster.nodes[:2]
    env = cluster.env() | {"HPC_DDP_RUNS": str(hpc.runs), "PYTHONPATH": str(REPO)}
    argv = ["salloc", "--nodes=2", "--gpus-per-node=2", f"--nodelist={first},{second}"]
    argv += [sys.executable, "-m", "hpc_ddp", "preflight", "--json"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["bad_nodes"] == [second]
    assert found["why"] == (
        f"{second}: no fast network that we know here, while others have infiniband"
    )
    assert found["report"][first]["fabric"] == "infiniband"
    assert found["report"][first]["cards"] == 1
    assert any("can't be opened" in note for note in found["report"][first]["notes"])
