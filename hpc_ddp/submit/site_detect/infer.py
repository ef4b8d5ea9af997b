"""Infer the settings of a cluster from what Slurm prints of it. Pure: no Slurm, no disk.

Records hold the values of ``scontrol`` and ``sacctmgr`` by name. Where a version of Slurm does not
print a value, the settings that follow from it are left out.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.slurm_values import parse_time
from hpc_ddp.submit.script.container import DEFAULT_TOOL

Record = Mapping[str, str]

OLDEST = (20, 11)
_GRES = re.compile(r"(?P<name>\w+)(?P<type>(:[A-Za-z][\w.-]*)*)(:(?P<count>\d+))?")
_NOTHING = ("", "(null)", "N/A", "NONE", "UNLIMITED", "INFINITE")


@dataclass(frozen=True)
class ClusterFacts:
    """The values that a login node has of its cluster.

    Attributes
    ----------
    config
        ``scontrol show config``
    partitions, nodes
        ``scontrol show partition`` and ``node``, in order
    qos, accounts
        of the accounting; empty without one
    scratch
        for each variable of the shell that names a shared disk: its name, the folder, and whether
        the folder can be written
    runs
        the value of HPC_DDP_RUNS
    containers
        the installed container tools, by the names of ``templates/containers``
    """

    config: Record
    partitions: Sequence[Record]
    nodes: Sequence[Record]
    qos: Sequence[Record] = ()
    accounts: Sequence[Record] = ()
    scratch: Sequence[tuple[str, str, bool]] = ()
    runs: str = ""
    containers: Sequence[str] = ()

    def value(self, name: str) -> str:
        """Return a value of slurm.conf, '' where it is not set."""
        return _set_value(self.config, name)


@dataclass(frozen=True)
class Setting:
    """A line of the site file; one that is not certain is a comment there.

    `scope` is the partition or QOS of the setting, as ``("partition", "low")``.
    """

    key: str
    value: str | int | list[str]
    why: str
    scope: tuple[str, str] | None = None
    is_certain: bool = True


@dataclass(frozen=True)
class Site:
    """The content of a site file: settings, remarks in words, and a summary of each table."""

    title: str
    settings: Sequence[Setting]
    remarks: Sequence[str]
    tables: Mapping[tuple[str, str], str]

    def to_toml(self, date: str) -> str:
        """Return the file; `date` is the day on which Slurm printed the values."""
        lines = [f"# {self.title}", f"# Written by `hpc-ddp site detect` on {date}."]
        lines += [f"# {remark}" for remark in self.remarks]
        lines += [_line(setting) for setting in self.settings if setting.scope is None]
        for (kind, name), summary in self.tables.items():
            is_bare = re.fullmatch(r"[\w-]+", name, re.A)
            lines += ["", f"[when.{kind}.{name if is_bare else json.dumps(name)}]  # {summary}"]
            lines += [_line(setting) for setting in self.settings if setting.scope == (kind, name)]
        return "\n".join(lines) + "\n"


def _line(setting: Setting) -> str:
    mark = "" if setting.is_certain else "# "
    return f"{mark}{setting.key} = {json.dumps(setting.value)}  # {setting.why}"


# --- what the nodes are --------------------------------------------------------------------


class NodeKind(NamedTuple):
    """Nodes of the same make: GPUs as (type, number), with type '' where Slurm has none; MB."""

    gpus: tuple[tuple[str, int], ...]
    cpus: int
    memory: int

    @property
    def gpu_requests(self) -> list[str]:
        """The values of --gpus-per-node for all GPUs of such a node, one for each type."""
        return [f"{type}:{count}" if type else str(count) for type, count in self.gpus]

    @property
    def gpu_count(self) -> int:
        return sum(count for _, count in self.gpus)

    def __str__(self) -> str:
        gpus = "".join(f", {count} {f'{type} GPUs'.strip()}" for type, count in self.gpus)
        return f"{self.cpus} CPUs, {self.memory / 1000:.0f} GB{gpus}"


def gpus_of(gres: str) -> tuple[tuple[str, int], ...]:
    """Return the GPUs in a Gres value such as ``gpu:a100:4(S:0-1),nvme:1``."""
    gpus = []
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        match = _GRES.match(part)
        if match and match["name"] == "gpu":
            types = [t for t in match["type"].split(":") if t not in ("", "no_consume")]
            gpus.append((types[0] if types else "", int(match["count"] or 1)))
    return tuple(gpus)


@dataclass(frozen=True)
class Partition:
    """A partition, its nodes' kinds (the most common first), and the nodes' names."""

    values: Record
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
        """Whether a job gets whole nodes. Slurm 26.05 has a field of its own for it."""
        is_exclusive = self.values.get("OverSubscribe", "").startswith("EXCLUSIVE")
        return is_exclusive or self.values.get("Exclusive", "") == "NODE"

    @property
    def tier(self) -> int:
        return int(self.values.get("PriorityTier") or 1)

    @property
    def has_gpus(self) -> bool:
        return any(kind.gpus for kind in self.kinds)

    @cached_property
    def gpu_requests(self) -> list[str]:
        """The values of --gpus-per-node for all GPUs of a node, for each kind of node."""
        return list(dict.fromkeys(text for kind in self.kinds for text in kind.gpu_requests))

    def value(self, name: str) -> str:
        return _set_value(self.values, name)

    @property
    def summary(self) -> str:
        """The partition in a line: nodes, time limits, and whether it is the default."""
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
    """Return the partitions with the kinds of their nodes, in Slurm's order."""
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


# --- preemption ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Preemption:
    """Jobs of a partition or QOS that other jobs may preempt; scope None: any job may be."""

    scope: tuple[str, str] | None
    mode: str
    grace_s: int
    by: Sequence[str]

    def __str__(self) -> str:
        by = f" by {', '.join(self.by)}" if self.by else ""
        return f"jobs can be preempted{by} ({self.mode}, {self.grace_s} s of grace)"


def preemptions(facts: ClusterFacts, partitions: Sequence[Partition]) -> list[Preemption]:
    """Return the kinds of jobs that may be preempted, in which mode, and their grace time (s)."""
    plugin = facts.value("PreemptType").rpartition("/")[2]
    if plugin == "partition_prio":
        return [row for p in partitions if (row := _of_partition(p, partitions))]
    if plugin != "qos":
        return []
    if not facts.qos:
        return [Preemption(None, facts.value("PreemptMode"), 0, ())]
    rows = []
    for qos in facts.qos:
        by = [row["Name"] for row in facts.qos if qos["Name"] in row.get("Preempt", "").split(",")]
        mode = qos.get("PreemptMode", "").upper()
        mode = facts.value("PreemptMode") if mode in ("", "CLUSTER") else mode
        if by and mode != "OFF":
            rows.append(
                Preemption(("qos", qos["Name"]), mode, _seconds(qos.get("GraceTime", "")), by)
            )
    return rows


def _of_partition(partition: Partition, partitions: Sequence[Partition]) -> Preemption | None:
    mode = partition.value("PreemptMode")
    by = [p.name for p in partitions if p.tier > partition.tier and p.nodes & partition.nodes]
    if not by or mode in ("", "OFF"):
        return None
    grace_s = _seconds(partition.value("GraceTime"))
    return Preemption(("partition", partition.name), mode, grace_s, by)


# --- the site file -------------------------------------------------------------------------


def describe(facts: ClusterFacts, shipped_keys: Collection[str] = ()) -> Site:
    """Return the site file of a cluster.

    `shipped_keys` are the keys that the shipped file of this site has already: they are left out.
    """
    partitions = partitions_of(facts)
    threats = preemptions(facts, partitions)
    settings = [
        *_accounts(facts),
        *_chains(threats),
        *_expedited(facts),
        *_requests(facts, partitions),
        *_scratch(facts),
        *_tool(facts),
    ]
    settings = [setting for setting in settings if setting.key not in shipped_keys]
    if "partition" not in shipped_keys:
        settings = [*_default_partition(partitions, settings), *settings]
    scopes = {setting.scope for setting in settings} | {threat.scope for threat in threats}
    summaries = {("partition", p.name): p.summary for p in partitions}
    summaries |= {("qos", qos["Name"]): "a QOS" for qos in facts.qos}
    for threat in threats:
        if threat.scope:
            summaries[threat.scope] += f"; {threat}"
    return Site(
        title=_title(facts, partitions),
        settings=settings,
        remarks=[
            *_remarks(facts, partitions),
            *(f"{threat}." for threat in threats if threat.scope is None),
            *([] if {"scratch", "runs-dir"} & {*shipped_keys} else _runs_folder(facts)),
        ],
        tables={scope: text for scope, text in summaries.items() if scope in scopes},
    )


def _title(facts: ClusterFacts, partitions: Sequence[Partition]) -> str:
    name = facts.value("ClusterName") or "this cluster"
    version = facts.value("SLURM_VERSION") or "of unknown version"
    gpus = sum(1 for node in facts.nodes if gpus_of(node.get("Gres", "")))
    return (
        f"Cluster {name}: Slurm {version}, {len(partitions)} partitions, {len(facts.nodes)} nodes,"
        f" {gpus} of them with GPUs."
    )


def _default_partition(
    partitions: Sequence[Partition], settings: Sequence[Setting]
) -> list[Setting]:
    """Name Slurm's default partition, so that its table counts for jobs that name none."""
    for p in partitions:
        table = [setting for setting in settings if setting.scope == ("partition", p.name)]
        if p.is_default and table:
            why = f"Slurm's default; named, so that [when.partition.{p.name}] counts"
            is_certain = any(setting.is_certain for setting in table)
            return [Setting("partition", p.name, why, is_certain=is_certain)]
    return []


def _accounts(facts: ClusterFacts) -> list[Setting]:
    cluster = facts.value("ClusterName")
    rows = [row for row in facts.accounts if row.get("Cluster") in ("", cluster)]
    names = list(dict.fromkeys(row["Account"] for row in rows if row["Account"]))
    default = next((row["DefaultAccount"] for row in rows), "")
    if len(names) < 2:
        return []
    why = f"yours: {', '.join(names)} (sacctmgr show user); default: {default or 'none'}"
    return [Setting("account", default or names[0], why, is_certain=False)]


def _chains(threats: Sequence[Preemption]) -> list[Setting]:
    """Return the way of continuing where Slurm cancels the jobs that it preempts."""
    why = "PreemptMode=CANCEL: a preempted job is not requeued"
    return [
        Setting("continue-by", "resubmit", why, threat.scope)
        for threat in threats
        if "CANCEL" in threat.mode
    ]


def _expedited(facts: ClusterFacts) -> list[Setting]:
    """Return the request for the highest priority after a requeue (Slurm 25.11 and later)."""
    if "enable_expedited_requeue" not in facts.value("SlurmctldParameters"):
        return []
    return [Setting("sbatch", ["--requeue=expedite"], "a requeued job comes first, without a wait")]


def _requests(facts: ClusterFacts, partitions: Sequence[Partition]) -> list[Setting]:
    """Return the requests for GPUs and CPUs; certain only where jobs get whole nodes.

    Measured: in a partition with whole nodes a step without a request has no GPUs.
    """
    settings = []
    for p in partitions:
        scope = ("partition", p.name)
        is_certain = p.is_whole and len(p.kinds) == 1 and len(p.gpu_requests) == 1
        for request in p.gpu_requests:
            settings.append(
                Setting("gpus-per-node", request, "all GPUs of a node", scope, is_certain)
            )
        if p.gpu_requests and not p.is_whole and p.kinds[0].cpus:
            why = f"all CPUs of a node; without it: {_default_cpus(facts, p)}"
            settings.append(Setting("cpus-per-node", p.kinds[0].cpus, why, scope, False))
    return settings


def _default_cpus(facts: ClusterFacts, partition: Partition) -> str:
    defaults = f"{partition.value('JobDefaults')},{facts.value('JobDefaults')}"
    match = re.search(r"DefCpuPerGPU=(\d+)", defaults)
    return f"{match[1]} per GPU (DefCpuPerGPU)" if match else "one core for all workers"


def _scratch(facts: ClusterFacts) -> list[Setting]:
    """Return the disk for runs, unless it is hpc-ddp's default."""
    writable = [name for name, _, is_writable in facts.scratch if is_writable]
    if not writable or writable[0] == "SCRATCH" or facts.runs:
        return []
    return [Setting("scratch", f"${writable[0]}", "set in this shell, and writable")]


def _tool(facts: ClusterFacts) -> list[Setting]:
    if not facts.containers or facts.containers[0] == DEFAULT_TOOL:
        return []
    return [Setting("container-tool", facts.containers[0], "installed here, for --image")]


def _remarks(facts: ClusterFacts, partitions: Sequence[Partition]) -> list[str]:
    """Return what keeps jobs from starting, or needs a decision."""
    remarks = []
    match = re.match(r"(\d+)\.(\d+)", facts.value("SLURM_VERSION"))
    if match and (int(match[1]), int(match[2])) < OLDEST:
        remarks.append(f"Slurm {match[0]} is older than 20.11, the oldest that hpc-ddp supports.")
    if partitions and not any(p.is_default for p in partitions):
        remarks.append("There is no default partition: name one (--partition).")
    if partitions and not any(p.has_gpus for p in partitions):
        remarks.append(
            'Slurm knows no GPUs here. If nodes have some: gpu-request = "none", and gpus-per-node.'
        )
    if facts.value("MaxArraySize") == "0":
        remarks.append("There are no job arrays here, and so no sweeps (MaxArraySize=0).")
    if "associations" in facts.value("AccountingStorageEnforce") and not facts.accounts:
        remarks.append("You have no account: jobs may be refused. Ask the site for one.")
    return remarks


def _runs_folder(facts: ClusterFacts) -> list[str]:
    if facts.runs:
        return [f"Runs are kept in {facts.runs} (HPC_DDP_RUNS)."]
    remarks = [
        f"${name} ({folder}) is not writable here."
        for name, folder, is_writable in facts.scratch
        if not is_writable
    ]
    writable = [name for name, _, is_writable in facts.scratch if is_writable]
    if writable:
        return [*remarks, f"Runs are kept in ${writable[0]}/hpc-ddp."]
    return [*remarks, 'Runs are kept in ./runs; scratch = "/folder" names a disk of all nodes.']


def _set_value(record: Record, name: str) -> str:
    """Return a value of a record, '' where it is not set."""
    text = record.get(name, "")
    return "" if text in _NOTHING else text


def _seconds(text: str) -> int:
    """Return the seconds of a number with or without ``sec``, or of a time as ``00:02:00``."""
    if match := re.fullmatch(r"(\d+)( sec)?", text):
        return int(match[1])
    with suppress(UsageError):
        return parse_time(text)
    return 0
