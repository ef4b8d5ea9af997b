"""Infer the site file of a cluster from its facts. Pure: no Slurm, no disk.

Where a version of Slurm does not print a value, the settings that follow from it are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hpc_ddp.core.job.slurm_values import gpus_of
from hpc_ddp.submission.script.container import DEFAULT_TOOL
from hpc_ddp.submission.site_detect.cluster import (
    ClusterFacts,
    Partition,
    Preemption,
    find_preemptions,
    partitions_of,
)

OLDEST_SLURM = (20, 11)  # the oldest version of Slurm that hpc-ddp supports
TableScope = tuple[str, str]  # a partition or a QOS, as ("partition", "low")


@dataclass(frozen=True)
class Setting:
    """A line of the site file, with the reason `why`; a setting that is not certain becomes a
    comment. `scope` is the partition or QOS that it is for; None: for all jobs."""

    key: str
    value: str | int | bool | list[str]
    why: str
    scope: TableScope | None = None
    is_certain: bool = True


@dataclass(frozen=True)
class Site:
    """The content of a site file. `remarks` are sentences for its head; `tables` has the summary of
    each table, by the table's scope, in the order of the file."""

    title: str
    settings: Sequence[Setting]
    remarks: Sequence[str]
    tables: Mapping[TableScope, str]

    def to_toml(self, date: str) -> str:
        """Return the text of the file; `date` is the day on which Slurm printed the values."""
        lines = [f"# {self.title}", f"# Written by `hpc-ddp site detect` on {date}."]
        lines += [f"# {remark}" for remark in self.remarks]
        lines += [_toml_line(setting) for setting in self.settings if setting.scope is None]
        for scope, summary in self.tables.items():
            kind, name = scope
            key = name if re.fullmatch(r"[\w-]+", name, re.A) else json.dumps(name)
            lines += ["", f"[when.{kind}.{key}]  # {summary}"]
            lines += [_toml_line(setting) for setting in self.settings if setting.scope == scope]
        return "\n".join(lines) + "\n"


def _toml_line(setting: Setting) -> str:
    """Return a setting as a line of TOML, which is a comment where the setting is not certain."""
    mark = "" if setting.is_certain else "# "
    return f"{mark}{setting.key} = {json.dumps(setting.value)}  # {setting.why}"


def infer_site(facts: ClusterFacts, shipped_keys: Collection[str] = ()) -> Site:
    """Return the content of a site file for a cluster.

    `shipped_keys` are the keys of the shipped file of this site; settings of these are left out.
    Only partitions and QOS that have a setting, or whose jobs may be preempted, have a table.
    """
    partitions = partitions_of(facts)
    preemptions = find_preemptions(facts, partitions)
    settings = [
        *_account(facts),
        *_chains(preemptions),
        *_expedited_requeue(facts),
        *_requests(facts, partitions),
        *_scratch(facts),
        *_container_tool(facts),
        *_stage(facts),
    ]
    settings = [setting for setting in settings if setting.key not in shipped_keys]
    if "partition" not in shipped_keys:
        settings = [*_default_partition(partitions, settings), *settings]
    scopes = {setting.scope for setting in settings} | {row.scope for row in preemptions}
    summaries = {("partition", p.name): p.summary for p in partitions}
    summaries |= {("qos", qos["Name"]): "a QOS" for qos in facts.qos}
    for preemption in preemptions:
        if preemption.scope:
            summaries[preemption.scope] += f"; {preemption}"
    return Site(
        title=_title(facts, partitions),
        settings=settings,
        remarks=[
            *_remarks(facts, partitions),
            *(f"{preemption}." for preemption in preemptions if preemption.scope is None),
            *([] if {"scratch", "runs-dir"} & {*shipped_keys} else _remarks_on_runs(facts)),
        ],
        tables={scope: text for scope, text in summaries.items() if scope in scopes},
    )


def _title(facts: ClusterFacts, partitions: Sequence[Partition]) -> str:
    """Return a sentence on the cluster: its name, Slurm's version, the numbers of partitions, nodes
    and nodes with GPUs."""
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
    """Return a setting, as a list of one, that names Slurm's default partition: so the partition's
    table counts for jobs that name no partition. [] where none of the `settings` is for this
    partition. The setting is a comment if its whole table is."""
    for p in partitions:
        table = [setting for setting in settings if setting.scope == ("partition", p.name)]
        if p.is_default and table:
            why = f"Slurm's default; named, so that [when.partition.{p.name}] counts"
            is_certain = any(setting.is_certain for setting in table)
            return [Setting("partition", p.name, why, is_certain=is_certain)]
    return []


def _account(facts: ClusterFacts) -> list[Setting]:
    """Return the setting, not certain, of the user's default account, or of the first; [] for a
    user with less than two accounts on this cluster."""
    cluster = facts.value("ClusterName")
    rows = [row for row in facts.accounts if row.get("Cluster") in ("", cluster)]
    names = list(dict.fromkeys(row["Account"] for row in rows if row["Account"]))
    default = next((row["DefaultAccount"] for row in rows), "")
    if len(names) < 2:
        return []
    why = f"yours: {', '.join(names)} (sacctmgr show user); default: {default or 'none'}"
    return [Setting("account", default or names[0], why, is_certain=False)]


def _chains(preemptions: Sequence[Preemption]) -> list[Setting]:
    """Return ``continue-by = "resubmit"`` for each of `preemptions` (a partition, a QOS, or all
    jobs) in which Slurm cancels the preempted jobs."""
    why = "PreemptMode=CANCEL: a preempted job is not requeued"
    return [
        Setting("continue-by", "resubmit", why, preemption.scope)
        for preemption in preemptions
        if "CANCEL" in preemption.mode
    ]


def _expedited_requeue(facts: ClusterFacts) -> list[Setting]:
    """Return the option of sbatch with which a requeued job gets the highest priority (Slurm 25.11
    and later); [] where the cluster does not enable it."""
    if "enable_expedited_requeue" not in facts.value("SlurmctldParameters"):
        return []
    return [Setting("sbatch", ["--requeue=expedite"], "a requeued job comes first, without a wait")]


def _requests(facts: ClusterFacts, partitions: Sequence[Partition]) -> list[Setting]:
    """Return settings for the partitions that have GPUs: a request for all GPUs of a node, one for
    each type and number; and, where jobs share nodes, a request for all CPUs of a node. A request
    for GPUs is certain in a partition of whole nodes that are all of one kind, with one type of
    GPUs; other requests are not certain.

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
            # The first kind is the most common one.
            settings.append(Setting("cpus-per-node", p.kinds[0].cpus, why, scope, is_certain=False))
    return settings


def _default_cpus(facts: ClusterFacts, partition: Partition) -> str:
    """Return the CPUs that a job in a partition gets without a request, as text."""
    # The partition's value stands first, so that it is found first.
    defaults = f"{partition.value('JobDefaults')},{facts.value('JobDefaults')}"
    match = re.search(r"DefCpuPerGPU=(\d+)", defaults)
    return f"{match[1]} per GPU (DefCpuPerGPU)" if match else "one core for all workers"


def _scratch(facts: ClusterFacts) -> list[Setting]:
    """Return the setting of the disk for runs: the first that can be written. [] where this is
    hpc-ddp's default ($SCRATCH), where no disk is known, or where HPC_DDP_RUNS names the folder."""
    writable = [disk.variable for disk in facts.scratch if disk.is_writable]
    if not writable or writable[0] == "SCRATCH" or facts.runs:
        return []
    return [Setting("scratch", f"${writable[0]}", "set in this shell, and writable")]


def _container_tool(facts: ClusterFacts) -> list[Setting]:
    """Return the setting of the first container tool that is installed; [] where this is hpc-ddp's
    default, or where no tool is installed."""
    if not facts.containers or facts.containers[0] == DEFAULT_TOOL:
        return []
    return [Setting("container-tool", facts.containers[0], "installed here, for --image")]


def _stage(facts: ClusterFacts) -> list[Setting]:
    """Return the setting ``stage``, not certain, where this Python's environment is on a network
    file system; else []."""
    folder, network = facts.python_disk
    why = f"{folder} is on {network}: try it where `hpc-ddp explain` says that imports are slow"
    return [Setting("stage", True, why, is_certain=False)] if network else []


def _remarks(facts: ClusterFacts, partitions: Sequence[Partition]) -> list[str]:
    """Return sentences on what keeps jobs from starting here, or needs a decision of the user's:
    Slurm's version, no default partition, no GPUs, no arrays, no account."""
    remarks = []
    match = re.match(r"(\d+)\.(\d+)", facts.value("SLURM_VERSION"))
    if match and (int(match[1]), int(match[2])) < OLDEST_SLURM:
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


def _remarks_on_runs(facts: ClusterFacts) -> list[str]:
    """Return sentences on the folder where runs are kept, and, unless HPC_DDP_RUNS names that
    folder, on disks for it that can't be written."""
    if facts.runs:
        return [f"Runs are kept in {facts.runs} (HPC_DDP_RUNS)."]
    remarks = [
        f"${disk.variable} ({disk.folder}) is not writable here."
        for disk in facts.scratch
        if not disk.is_writable
    ]
    writable = [disk.variable for disk in facts.scratch if disk.is_writable]
    if writable:
        return [*remarks, f"Runs are kept in ${writable[0]}/hpc-ddp."]
    return [*remarks, 'Runs are kept in ./runs; scratch = "/folder" names a disk of all nodes.']
