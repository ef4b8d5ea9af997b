"""Settings are inferred from a cluster's description of itself.

`clusters` has what Slurm's own commands printed on the tests' cluster, in four versions, with a
partition more that cancels what it preempts, and one that gives whole nodes. The rest is made up
from the manual's names.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.slurm_text import parse_config, parse_records
from hpc_ddp.submission.site_detect.cluster import ClusterFacts, SharedDisk
from hpc_ddp.submission.site_detect.infer import Site, infer_site

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


CLUSTERS = sorted((Path(__file__).parent / "clusters").glob("slurm-*.txt"))


def _real(path: Path) -> ClusterFacts:
    _, config, partitions, nodes = re.split(r"### \w+\n", path.read_text())
    return ClusterFacts(parse_config(config), parse_records(partitions), parse_records(nodes))


def _made(
    partitions: str, nodes: str, config: dict[str, str] | None = None, **more: Any
) -> ClusterFacts:
    configuration = {"ClusterName": "made", "SLURM_VERSION": "24.05.1", **(config or {})}
    return ClusterFacts(configuration, parse_records(partitions), parse_records(nodes), **more)


def _says(site: Site, *texts: str) -> None:
    for text in texts:
        assert any(text in remark for remark in site.remarks), "\n".join(site.remarks)


def _when(site: Site, kind: str, name: str) -> Any:
    """Return a table of the file as TOML has it: what stands behind a # does not count."""
    return tomllib.loads(site.to_toml("x")).get("when", {}).get(kind, {}).get(name, {})


def test_the_kept_clusters_have_four_versions() -> None:
    assert [path.stem for path in CLUSTERS] == [
        f"slurm-{version}" for version in ("20.11", "22.05", "24.11", "26.05")
    ]


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_the_same_cluster_is_the_same_in_each_version(path: Path) -> None:
    site = infer_site(_real(path))
    version = path.stem.removeprefix("slurm-")
    assert f"Cluster hd0: Slurm {version}." in site.title
    assert site.title.endswith("5 partitions, 4 nodes, 4 of them with GPUs.")
    first = infer_site(_real(CLUSTERS[0]))
    assert (site.remarks, site.tables) == (first.remarks, first.tables)
    nodes, by = "4 nodes: 8 CPUs, 20 GB, 4 GPUs", "jobs can be preempted by high, whole"
    assert site.tables == {
        ("partition", "low"): f"the default; {nodes}; {by} (REQUEUE, 20 s of grace)",
        ("partition", "low0"): f"{nodes}; {by} (REQUEUE, 0 s of grace)",
        ("partition", "high"): nodes,
        ("partition", "lowc"): f"{nodes}; {by} (CANCEL, 0 s of grace)",
        ("partition", "whole"): f"{nodes}; jobs get whole nodes; time limit 01:00:00;"
        " 00:10:00 without --time",
    }
    assert _when(site, "partition", "lowc") == {"continue-by": "resubmit"}
    assert _when(site, "partition", "whole") == {"gpus-per-node": "4"}
    assert _when(site, "partition", "low") == {}
    assert "partition" not in tomllib.loads(site.to_toml("x"))


def _nodes(partitions: str, gres: str, count: int, cpus: int = 64, first: int = 1) -> str:
    return "".join(
        f"NodeName=n{k} CPUTot={cpus} Gres={gres} RealMemory=512000 Partitions={partitions} X=1\n"
        for k in range(first, first + count)
    )


def test_each_type_of_gpu_is_listed() -> None:
    site = infer_site(
        _made(
            "PartitionName=cpu Default=YES OverSubscribe=NO\n"
            "PartitionName=gpu Default=NO OverSubscribe=NO JobDefaults=DefCpuPerGPU=8\n"
            "PartitionName=odd Default=NO OverSubscribe=NO\n",
            _nodes("cpu", "(null)", 3)
            + _nodes("gpu,odd", "gpu:a100:4(S:0-1)", 2, first=4)
            + _nodes("odd", "gpu:h100:8", 1, first=6),
            {"SelectTypeParameters": "CR_Core_Memory", "EnforcePartLimits": "ALL"},
        )
    )
    text = site.to_toml("x")
    assert '# gpus-per-node = "a100:4"  # all GPUs of a node\n' in text
    assert '# gpus-per-node = "h100:8"' in text
    assert (
        "# cpus-per-node = 64  # all CPUs of a node; without it: 8 per GPU (DefCpuPerGPU)" in text
    )
    assert (
        "# cpus-per-node = 64  # all CPUs of a node; without it: one core for all workers" in text
    )
    assert "[when.partition.cpu]" not in text


def test_whole_nodes_without_known_gpus_request_none() -> None:
    site = infer_site(
        _made("PartitionName=gh Default=NO OverSubscribe=EXCLUSIVE", _nodes("gh", "(null)", 9))
    )
    _says(site, "no default partition", 'gpu-request = "none"')


def test_preemption_by_qos_is_described() -> None:
    qos = [
        {"Name": "normal", "GraceTime": "00:00:00", "Preempt": "scavenger", "PreemptMode": "off"},
        {"Name": "scavenger", "GraceTime": "00:02:00", "Preempt": "", "PreemptMode": "cancel"},
        {"Name": "burst.1", "GraceTime": "00:00:00", "Preempt": "", "PreemptMode": "cluster"},
        {"Name": "top", "GraceTime": "", "Preempt": "normal,burst.1", "PreemptMode": "cluster"},
    ]
    config = {"PreemptType": "preempt/qos", "PreemptMode": "REQUEUE", "KillWait": "30 sec"}
    facts = _made("PartitionName=a Default=YES", _nodes("a", "gpu:4", 1), config, qos=qos)
    site = infer_site(facts)
    assert site.tables == {
        ("partition", "a"): "the default; 1 node: 64 CPUs, 512 GB, 4 GPUs",
        ("qos", "scavenger"): "a QOS; jobs can be preempted by normal (CANCEL, 120 s of grace)",
        ("qos", "burst.1"): "a QOS; jobs can be preempted by top (REQUEUE, 0 s of grace)",
    }
    assert _when(site, "qos", "scavenger") == {"continue-by": "resubmit"}
    blind = _made("PartitionName=a Default=YES", "", {**config, "PreemptMode": "CANCEL"})
    assert tomllib.loads(infer_site(blind).to_toml("x"))["continue-by"] == "resubmit"
    _says(infer_site(blind), "jobs can be preempted (CANCEL")


def test_partitions_that_suspend_or_preempt_nothing_are_told_apart() -> None:
    partitions = (
        "PartitionName=day Default=YES PriorityTier=1 PreemptMode=GANG,SUSPEND GraceTime=0\n"
        "PartitionName=now PriorityTier=2 PreemptMode=OFF\n"
        "PartitionName=far PriorityTier=1 PreemptMode=CANCEL\n"
    )
    nodes = _nodes("day,now", "gpu:4", 1) + _nodes("far", "gpu:4", 1, first=2)
    site = infer_site(_made(partitions, nodes, {"PreemptType": "preempt/partition_prio"}))
    summary = site.tables["partition", "day"]
    assert "jobs can be preempted by now (GANG,SUSPEND, 0 s of grace)" in summary
    assert "preempted" not in site.tables["partition", "far"]
    assert not _when(site, "partition", "far")
    none = infer_site(_made(partitions, nodes, {"PreemptType": "preempt/none"}))
    assert not any("preempted" in summary for summary in none.tables.values())


def test_the_default_is_named_where_its_table_counts() -> None:
    partitions = (
        "PartitionName=a.b Default=YES PriorityTier=1 PreemptMode=CANCEL GraceTime=60\n"
        "PartitionName=top PriorityTier=2 PreemptMode=OFF\n"
    )
    facts = _made(partitions, _nodes("a.b,top", "gpu:4", 1), {"PreemptType": "x/partition_prio"})
    site = infer_site(facts)
    assert tomllib.loads(site.to_toml("x"))["partition"] == "a.b"
    assert _when(site, "partition", "a.b") == {"continue-by": "resubmit"}


def test_accounts_scratch_and_containers_are_inferred() -> None:
    accounts = [
        {"Cluster": "made", "DefaultAccount": "p1", "Account": name, "Partition": ""}
        for name in ("p1", "p2", "p2")
    ] + [{"Cluster": "other", "DefaultAccount": "p1", "Account": "p3", "Partition": ""}]
    facts = _made(
        "PartitionName=a Default=YES",
        _nodes("a", "gpu:4", 1),
        {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "MaxArraySize": "0",
        },
        accounts=accounts,
        scratch=[SharedDisk("SCRATCH", "/gone", False), SharedDisk("WORK", "/work/me", True)],
        containers=["singularity", "pyxis"],
    )
    site = infer_site(facts)
    _says(
        site,
        "$SCRATCH (/gone) is not writable here",
        "Runs are kept in $WORK/hpc-ddp",
        "no sweeps",
    )
    text = site.to_toml("x")
    assert '# account = "p1"  # yours: p1, p2 (sacctmgr show user); default: p1' in text
    read = tomllib.loads(text)
    assert (read["scratch"], read["container-tool"]) == ("$WORK", "singularity")


def test_an_expedited_requeue_is_requested_if_slurm_has_it() -> None:
    config = {"SlurmctldParameters": "idle_on_node_suspend,enable_expedited_requeue"}
    site = infer_site(_made("PartitionName=a Default=YES", "", config))
    assert tomllib.loads(site.to_toml("x"))["sbatch"] == ["--requeue=expedite"]


def test_the_folder_of_runs_is_named_once() -> None:
    facts = _made(
        "PartitionName=a Default=YES", "", {}, scratch=[SharedDisk("WORK", "/w", True)], runs="/r"
    )
    site = infer_site(facts)
    _says(site, "Runs are kept in /r (HPC_DDP_RUNS).")
    assert not any(setting.key == "scratch" for setting in site.settings)
    keys = ["scratch", "continue-by"]
    site = infer_site(_made("PartitionName=a Default=YES", ""), shipped_keys=keys)
    assert not any("kept" in remark for remark in site.remarks)


def test_settings_of_a_shipped_site_are_left_out() -> None:
    facts = _made(
        "PartitionName=a Default=YES",
        _nodes("a", "gpu:4", 1),
        scratch=[SharedDisk("W", "/w", True)],
    )
    assert [setting.key for setting in infer_site(facts).settings] == [
        *("partition", "gpus-per-node", "cpus-per-node", "scratch")
    ]
    site = infer_site(facts, shipped_keys=["gpus-per-node", "cpus-per-node", "scratch", "title"])
    assert tomllib.loads(site.to_toml("x")) == {}
    assert not site.settings


def test_an_almost_empty_configuration_is_described() -> None:
    site = infer_site(ClusterFacts({"SLURM_VERSION": "19.05.8"}, [], []))
    _says(site, "Slurm 19.05 is older than 20.11")
    assert tomllib.loads(site.to_toml("x")) == {}


@pytest.mark.parametrize("disk", ["lustre", ""])
def test_stage_is_recommended_for_an_environment_behind_a_network(disk: str) -> None:
    site = infer_site(_made("PartitionName=a Default=YES", "", {}, python_disk=("/work/env", disk)))
    line = f"# stage = true  # /work/env is on {disk}: try it where `hpc-ddp explain` says"
    assert (line in site.to_toml("x")) == bool(disk)
