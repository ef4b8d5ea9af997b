"""A cluster as a login node sees it: its partitions, the kinds of its nodes, and preemption.

`probe_cluster` queries Slurm's controller and the shell; all else is pure. Records hold the values
of ``scontrol`` and ``sacctmgr`` by name; a version of Slurm may lack some.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from hpc_ddp import slurm
from hpc_ddp.core.job.slurm_values import gpus_of, slurm_seconds
from hpc_ddp.submission.settings.user import user_name

Row = Mapping[str, str]

# Variables of sites for a disk that all nodes see, the fastest first.
SCRATCH = ("SCRATCH", "PSCRATCH", "CINECA_SCRATCH", "FAST", "WORK", "GROUP_SCRATCH")
# File systems behind a network, by the beginnings of their names in /proc/mounts.
NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "panfs", "wekafs", "fuse", "afs", "9p")
CONTAINERS = ("apptainer", "singularity", "shifter", "podman-hpc")
_NOTHING = ("", "(null)", "N/A", "NONE", "UNLIMITED", "INFINITE")


class SharedDisk(NamedTuple):
    """A variable that names a shared disk, the folder, and whether the folder can be written."""

    variable: str
    folder: str
    is_writable: bool


@dataclass(frozen=True)
class ClusterFacts:
    """The values that a login node has of its cluster.

    Attributes
    ----------
    config
        ``scontrol show config``
    partitions, nodes
        ``scontrol show partition`` and ``node``, in Slurm's order
    qos, accounts
        the qualities of service, and the user's accounts, by Slurm's accounting; empty without it
    scratch
        the shared disks that variables of the shell name
    runs
        the value of HPC_DDP_RUNS, '' where it is not set
    containers
        the installed container tools, by the names of ``templates/containers``
    python_disk
        the folder of this Python's environment, and the type of the network file system that it
        is on, '' for a disk of this machine
    """

    config: Row
    partitions: Sequence[Row]
    nodes: Sequence[Row]
    qos: Sequence[Row] = ()
    accounts: Sequence[Row] = ()
    scratch: Sequence[SharedDisk] = ()
    runs: str = ""
    containers: Sequence[str] = ()
    python_disk: tuple[str, str] = ("", "")

    def value(self, name: str) -> str:
        """Return a value of slurm.conf; '' where it is not set, or is one of `_NOTHING`."""
        return _set_value(self.config, name)


def probe_cluster(environ: Mapping[str, str]) -> ClusterFacts:
    """Ask Slurm, and look at this shell's variables (`environ`) and machine; return the facts of
    the cluster. `qos` and `accounts` are empty where the accounting does not answer.

    Raises
    ------
    HpcDdpError
        this machine has no Slurm client, or the controller does not answer
    """
    return ClusterFacts(
        config=slurm.show_config(),
        partitions=slurm.show_all("partition"),
        nodes=slurm.show_all("node"),
        qos=slurm.show_accounting("qos"),
        accounts=slurm.show_accounting("user", user_name(), "withassoc"),
        scratch=_find_disks(environ),
        runs=environ.get("HPC_DDP_RUNS", ""),
        containers=_find_container_tools(),
        python_disk=(sys.prefix, _network_type(Path(sys.prefix))),
    )


def _find_disks(environ: Mapping[str, str]) -> list[SharedDisk]:
    """Return the disk of each variable of `SCRATCH` that is set and not empty, in that order."""
    folders = {name: environ[name] for name in SCRATCH if environ.get(name)}
    return [
        SharedDisk(name, path, Path(path).is_dir() and os.access(path, os.W_OK))
        for name, path in folders.items()
    ]


def _find_container_tools() -> list[str]:
    """Return the container tools that are installed here, in the order of `CONTAINERS`; ``pyxis``
    comes last, where srun has its options. srun is asked for its help."""
    pyxis = ["pyxis"] if slurm.takes_option("srun", "container-image") else []
    return [name for name in CONTAINERS if shutil.which(name)] + pyxis


def _network_type(folder: Path) -> str:
    """Return the type of the network file system that a folder is on, as ``nfs4``; '' for a disk of
    this machine, and where there is no /proc."""
    types = {}
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text(errors="replace").splitlines():
            types[line.split()[1]] = line.split()[2]  # by mount point; the newest mount comes last
    # The nearest mount point above counts.
    kind = next((types[str(p)] for p in (folder, *folder.parents) if str(p) in types), "")
    return kind if kind.startswith(NETWORK) else ""


class NodeKind(NamedTuple):
    """The equipment that some nodes have in common: the GPUs of a node as (type, number), where a
    type that Slurm does not name is ''; its number of CPUs; and its memory in MB."""

    gpus: tuple[tuple[str, int], ...]
    cpus: int
    memory_mb: int

    @property
    def gpu_requests(self) -> list[str]:
        """The values of --gpus-per-node for all GPUs of such a node, one for each type of GPU."""
        return [f"{type}:{count}" if type else str(count) for type, count in self.gpus]

    def __str__(self) -> str:
        """The node in words: ``64 CPUs, 512 GB, 4 a100 GPUs``."""
        gpus = "".join(f", {count} {f'{type} GPUs'.strip()}" for type, count in self.gpus)
        return f"{self.cpus} CPUs, {self.memory_mb / 1000:.0f} GB{gpus}"


@dataclass(frozen=True)
class Partition:
    """A partition: Slurm's values of it by name, the kinds of its nodes (the most common first),
    and the nodes' names."""

    values: Row
    kinds: Sequence[NodeKind]
    nodes: frozenset[str]

    @property
    def name(self) -> str:
        return self.values["PartitionName"]

    @property
    def is_default(self) -> bool:
        return self.values.get("Default") == "YES"

    @property
    def is_whole(self) -> bool:
        """Whether a job gets whole nodes. In Slurm 26.05 the field ``Exclusive`` has it."""
        is_exclusive = self.values.get("OverSubscribe", "").startswith("EXCLUSIVE")
        return is_exclusive or self.values.get("Exclusive", "") == "NODE"

    @property
    def tier(self) -> int:
        """The partition's priority tier; jobs of a higher tier may preempt jobs of a lower one."""
        return int(self.values.get("PriorityTier") or 1)

    @property
    def has_gpus(self) -> bool:
        return any(kind.gpus for kind in self.kinds)

    @cached_property
    def gpu_requests(self) -> list[str]:
        """The values of --gpus-per-node for all GPUs of a node: those of each kind of node, each
        value once."""
        return list(dict.fromkeys(text for kind in self.kinds for text in kind.gpu_requests))

    def value(self, name: str) -> str:
        """Return a value of the partition; '' where it is not set, or is one of `_NOTHING`."""
        return _set_value(self.values, name)

    @property
    def summary(self) -> str:
        """The partition as a line of text: whether it is the default, its nodes (three kinds at
        most), whether jobs get whole nodes, and its time limits."""
        kinds = ", or ".join(map(str, self.kinds[:3])) or "unknown"
        parts = [f"{len(self.nodes)} node{'s' * (len(self.nodes) != 1)}: {kinds}"]
        if self.is_default:
            parts.insert(0, "the default")
        if self.is_whole:
            parts.append("jobs get whole nodes")
        if limit := self.value("MaxTime"):
            parts.append(f"time limit {limit}")
        if default := self.value("DefaultTime"):
            parts.append(f"{default} without --time")
        return "; ".join(parts)


def partitions_of(facts: ClusterFacts) -> list[Partition]:
    """Return the partitions with their nodes, in Slurm's order. For a node of which Slurm does not
    print the CPUs or the memory, the number is 0."""
    partitions = []
    for values in facts.partitions:
        name = values["PartitionName"]
        nodes = [n for n in facts.nodes if name in n.get("Partitions", "").split(",")]
        kinds = Counter(
            NodeKind(
                gpus_of(node.get("Gres", "")),
                int(node.get("CPUEfctv") or node.get("CPUTot") or 0),
                int(node.get("RealMemory") or 0),
            )
            for node in nodes
        )
        names = frozenset(node["NodeName"] for node in nodes)
        partitions.append(Partition(values, [kind for kind, _ in kinds.most_common()], names))
    return partitions


@dataclass(frozen=True)
class Preemption:
    """Jobs of a partition or QOS that other jobs may preempt."""

    scope: tuple[str, str] | None  # as ("partition", "low"); None: any job may be preempted
    mode: str  # Slurm's PreemptMode, as REQUEUE
    grace_s: int  # seconds
    by: Sequence[str]  # the partitions or QOS whose jobs preempt these; empty where unknown

    def __str__(self) -> str:
        """The preemption as text: a sentence without a full stop."""
        by = f" by {', '.join(self.by)}" if self.by else ""
        return f"jobs can be preempted{by} ({self.mode}, {self.grace_s} s of grace)"


def find_preemptions(facts: ClusterFacts, partitions: Sequence[Partition]) -> list[Preemption]:
    """Return the partitions, or the QOS, whose jobs may be preempted; [] where no job may be. Where
    jobs are preempted by QOS, and the accounting does not list the QOS, the result is a single
    preemption, for any job."""
    plugin = facts.value("PreemptType").rpartition("/")[2]
    if plugin == "partition_prio":
        return [row for p in partitions if (row := _preemption_in(p, partitions))]
    if plugin != "qos":
        return []
    if not facts.qos:
        return [Preemption(None, facts.value("PreemptMode"), 0, ())]
    rows = []
    for qos in facts.qos:
        preemptors = [
            row["Name"] for row in facts.qos if qos["Name"] in row.get("Preempt", "").split(",")
        ]
        mode = qos.get("PreemptMode", "").upper()
        mode = facts.value("PreemptMode") if mode in ("", "CLUSTER") else mode
        if preemptors and mode != "OFF":
            grace_s = _seconds(qos.get("GraceTime", ""))
            rows.append(Preemption(("qos", qos["Name"]), mode, grace_s, preemptors))
    return rows


def _preemption_in(partition: Partition, partitions: Sequence[Partition]) -> Preemption | None:
    """Return the preemption of a partition's jobs, by jobs of partitions of a higher tier that have
    nodes in common with it; None where there is no such partition, or preemption is off."""
    mode = partition.value("PreemptMode")
    higher = [p for p in partitions if p.tier > partition.tier and p.nodes & partition.nodes]
    if not higher or mode in ("", "OFF"):
        return None
    grace_s = _seconds(partition.value("GraceTime"))
    return Preemption(("partition", partition.name), mode, grace_s, [p.name for p in higher])


def _set_value(record: Row, name: str) -> str:
    """Return a value of a record; '' where it is not set, or is one of `_NOTHING`, such as
    UNLIMITED."""
    text = record.get(name, "")
    return "" if text in _NOTHING else text


def _seconds(text: str) -> int:
    """Return the seconds in `text`: a number, with or without ``sec``, or a time as ``00:02:00``; 0
    for any other text."""
    match = re.fullmatch(r"(\d+)( sec)?", text)
    return int(match[1]) if match else slurm_seconds(text) or 0
