"""What follows for hpc-ddp from what a cluster says of itself. Pure: no Slurm, no disk.

Slurm's own words are taken as ``scontrol`` and ``sacctmgr`` print them, by name. A value that a
version does not print leaves out what would follow from it.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hpc_ddp.launch.container import DEFAULT_TOOL
from hpc_ddp.run.errors import UsageError
from hpc_ddp.run.slurm_values import parse_time

Record = Mapping[str, str]

OLDEST = (20, 11)
SHOWN = 6  # names in a row, before the rest is only counted
_GRES = re.compile(r"(?P<name>\w+)(?P<type>(:[A-Za-z][\w.-]*)*)(:(?P<count>\d+))?")
_NOTHING = ("", "(null)", "N/A", "NONE", "UNLIMITED", "INFINITE")


@dataclass(frozen=True)
class Facts:
    """What a login node tells.

    Attributes
    ----------
    config
        ``scontrol show config``
    partitions, nodes
        ``scontrol show partition`` and ``node``, in order
    qos, accounts
        of the accounting; empty without one
    scratch
        variables of the shell that name a shared disk, with the folder, and whether it can be
        written
    runs
        what HPC_DDP_RUNS says
    containers
        the tools that are there, by the names of ``templates/containers``
    modules
        environment modules with torch in their name; None where there are no modules at all
    """

    config: Record
    partitions: Sequence[Record]
    nodes: Sequence[Record]
    qos: Sequence[Record] = ()
    accounts: Sequence[Record] = ()
    scratch: Sequence[tuple[str, str, bool]] = ()
    runs: str = ""
    containers: Sequence[str] = ()
    modules: Sequence[str] | None = None

    def value(self, name: str) -> str:
        """Return a value of slurm.conf, '' where it is not set."""
        said = self.config.get(name, "")
        return "" if said in _NOTHING else said

    @property
    def kill_wait_s(self) -> int:
        return _seconds(self.value("KillWait")) or 30


@dataclass(frozen=True)
class Setting:
    """A line of the site file. Without `sure` it is a suggestion, and stands behind a ``#``.

    `when` is the partition or QOS that it is for, as ``("partition", "low")``.
    """

    key: str
    value: str | int | list[str]
    why: str
    when: tuple[str, str] | None = None
    sure: bool = True


@dataclass(frozen=True)
class Site:
    """A site file to be, and in words what follows for a job."""

    title: str
    settings: Sequence[Setting]
    remarks: Sequence[str]
    tables: Mapping[tuple[str, str], str]

    def words(self) -> list[str]:
        """Return what follows, in lines of a width that can be read."""
        wrapper = textwrap.TextWrapper(96, initial_indent="- ", subsequent_indent="  ")
        return [line for text in self.remarks for line in wrapper.wrap(text)]

    def to_toml(self, date: str) -> str:
        """Return the file, as it was found on a day."""
        lines = [f"# {self.title}", f"# As `hpc-ddp site detect` found it on {date}.", "#"]
        lines += [f"# {line}" for line in self.words()]
        lines += [_line(each) for each in self.settings if each.when is None]
        for (kind, name), summary in self.tables.items():
            bare = re.fullmatch(r"[\w-]+", name, re.A)
            lines += ["", f"[when.{kind}.{name if bare else json.dumps(name)}]  # {summary}"]
            lines += [_line(each) for each in self.settings if each.when == (kind, name)]
        return "\n".join(lines) + "\n"


def _line(setting: Setting) -> str:
    mark = "" if setting.sure else "# "
    return f"{mark}{setting.key} = {json.dumps(setting.value)}  # {setting.why}"


# --- what the nodes are --------------------------------------------------------------------


class Kind(NamedTuple):
    """What nodes have in common: GPUs as (type, number) with type '' where it has none; MB."""

    gpus: tuple[tuple[str, int], ...]
    cpus: int
    memory: int

    @property
    def asked(self) -> list[str]:
        """What --gpus-per-node takes for all GPUs of such a node, for each of their types."""
        return [f"{type}:{count}" if type else str(count) for type, count in self.gpus]

    @property
    def gpu_count(self) -> int:
        return sum(count for _, count in self.gpus)

    def __str__(self) -> str:
        gpus = "".join(f", {count} {f'{type} GPUs'.strip()}" for type, count in self.gpus)
        return f"{self.cpus} CPUs, {self.memory / 1000:.0f} GB{gpus}"


def gpus_of(gres: str) -> tuple[tuple[str, int], ...]:
    """Return the GPUs in a Gres value such as ``gpu:a100:4(S:0-1),nvme:1``."""
    found = []
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        match = _GRES.match(part)
        if match and match["name"] == "gpu":
            types = [t for t in match["type"].split(":") if t not in ("", "no_consume")]
            found.append((types[0] if types else "", int(match["count"] or 1)))
    return tuple(found)


@dataclass(frozen=True)
class Partition:
    """A partition, its nodes' kinds (the most common first), and the nodes' names."""

    values: Record
    kinds: Sequence[Kind]
    nodes: frozenset[str]

    @property
    def name(self) -> str:
        return self.values["PartitionName"]

    @property
    def is_default(self) -> bool:
        return self.values.get("Default") == "YES"

    @property
    def is_whole(self) -> bool:
        """Its nodes are given to one job as a whole. Slurm 26.05 says so in another place."""
        told = self.values.get("OverSubscribe", ""), self.values.get("Exclusive", "")
        return told[0].startswith("EXCLUSIVE") or told[1] == "NODE"

    @property
    def tier(self) -> int:
        return int(self.values.get("PriorityTier") or 1)

    @property
    def has_gpus(self) -> bool:
        return any(kind.gpus for kind in self.kinds)

    @cached_property
    def asked(self) -> list[str]:
        """What --gpus-per-node takes for all GPUs of a node, for each kind of node that has any."""
        return list(dict.fromkeys(each for kind in self.kinds for each in kind.asked))

    def value(self, name: str) -> str:
        said = self.values.get(name, "")
        return "" if said in _NOTHING else said

    def __str__(self) -> str:
        default = "the default; " if self.is_default else ""
        count = f"{len(self.nodes)} node{'s' * (len(self.nodes) != 1)}"
        return f"{default}{count}: {', or '.join(map(str, self.kinds[:3])) or 'unknown'}"


def partitions_of(facts: Facts) -> list[Partition]:
    """Return the partitions with what their nodes are, in Slurm's order."""
    found = []
    for values in facts.partitions:
        name = values["PartitionName"]
        nodes = [n for n in facts.nodes if name in n.get("Partitions", "").split(",")]
        kinds = Counter(
            Kind(
                gpus_of(node.get("Gres", "")),
                int(node.get("CPUEfctv") or node.get("CPUTot") or 0),
                int(node.get("RealMemory") or 0),
            )
            for node in nodes
        )
        names = frozenset(node["NodeName"] for node in nodes)
        found.append(Partition(values, [kind for kind, _ in kinds.most_common()], names))
    return found


# --- who is preempted ----------------------------------------------------------------------


@dataclass(frozen=True)
class Preempted:
    """Jobs that others may end: of a partition, of a QOS, or, where nobody tells, any."""

    when: tuple[str, str] | None
    mode: str
    grace_s: int
    by: Sequence[str]


def preempted(facts: Facts, partitions: Sequence[Partition]) -> list[Preempted]:
    """Return who may be preempted, how, and with how much notice (s)."""
    how = facts.value("PreemptType").rpartition("/")[2]
    if how == "partition_prio":
        return [each for p in partitions for each in _by_partition(p, partitions)]
    if how != "qos":
        return []
    everybody = Preempted(None, facts.value("PreemptMode"), 0, ())
    found = [] if facts.qos else [everybody]
    for qos in facts.qos:
        by = [q["Name"] for q in facts.qos if qos["Name"] in q.get("Preempt", "").split(",")]
        mode = qos.get("PreemptMode", "").upper()
        mode = facts.value("PreemptMode") if mode in ("", "CLUSTER") else mode
        if by and mode != "OFF":
            grace_s = _seconds(qos.get("GraceTime", ""))
            found.append(Preempted(("qos", qos["Name"]), mode, grace_s, by))
    return found


def _by_partition(one: Partition, partitions: Sequence[Partition]) -> list[Preempted]:
    mode = one.value("PreemptMode")
    by = [p.name for p in partitions if p.tier > one.tier and p.nodes & one.nodes]
    if not by or mode in ("", "OFF"):
        return []
    return [Preempted(("partition", one.name), mode, _seconds(one.value("GraceTime")), by)]


def _preemption_remark(each: Preempted, facts: Facts) -> str:
    by = f" by {_names(each.by)}" if each.by else ""
    if "SUSPEND" in each.mode:
        return (
            f"jobs can be suspended{by} (PreemptMode={each.mode}), and then go on where they stood;"
            " a stop longer than start(hang_after=…), 30 min, is taken for a hang, and the run goes"
            " on from its last save."
        )
    has = (
        f"the {each.grace_s} s of GraceTime"
        if each.grace_s
        else f"the {facts.kill_wait_s} s of KillWait, since GraceTime is 0"
    )
    lost = f"A save then has {has}; one that takes longer is lost, and the one before it counts."
    if "CANCEL" in each.mode:
        return (
            f"jobs can be preempted{by}, and Slurm requeues none of them (PreemptMode=CANCEL): so"
            ' each queues the next one as soon as it starts (continue-by = "resubmit"). Arrays and'
            f" sweeps can't do that; they requeue themselves while they still can. {lost}"
        )
    return f"jobs can be preempted{by}, are requeued, and go on. {lost}"


# --- all of it -----------------------------------------------------------------------------


def describe(facts: Facts, known: Collection[str] = ()) -> Site:
    """Return the site file for a cluster, and what follows in words.

    `known` are the keys that a file for this site has already, by people who know it: left out.
    """
    partitions = partitions_of(facts)
    threats = preempted(facts, partitions)
    found = [*_chains(threats), *_expedited(facts), *_requests(partitions), *_scratch(facts)]
    found += _tool(facts)
    found = [each for each in [*_accounts(facts), *found] if each.key not in known]
    settings = [each for each in _default(partitions, found) if each.key not in known] + found
    tables = {("partition", p.name): str(p) for p in partitions}
    tables |= {("qos", qos["Name"]): "a QOS" for qos in facts.qos}
    return Site(
        title=_title(facts, partitions),
        settings=settings,
        remarks=[
            *_version(facts),
            *_partition_remarks(partitions),
            *_share(facts, partitions),
            *_limits(facts, partitions),
            *_grouped((each.when, _preemption_remark(each, facts)) for each in threats),
            *_going_on(facts),
            *_accounting(facts),
            *([] if {"scratch", "runs-dir"} & {*known} else _place(facts)),
            *_software(facts),
        ],
        tables={when: tables[when] for when in tables if any(s.when == when for s in settings)},
    )


def _title(facts: Facts, partitions: Sequence[Partition]) -> str:
    name = facts.value("ClusterName") or "this cluster"
    version = facts.value("SLURM_VERSION") or "of unknown version"
    gpus = sum(1 for node in facts.nodes if gpus_of(node.get("Gres", "")))
    return (
        f"Cluster {name}: Slurm {version}, {len(partitions)} partitions, {len(facts.nodes)} nodes,"
        f" {gpus} of them with GPUs."
    )


def _version(facts: Facts) -> list[str]:
    match = re.match(r"(\d+)\.(\d+)", facts.value("SLURM_VERSION"))
    if match and (int(match[1]), int(match[2])) < OLDEST:
        return [f"Slurm {match[0]} is older than 20.11, the oldest that hpc-ddp knows."]
    return []


def _default(partitions: Sequence[Partition], settings: Sequence[Setting]) -> list[Setting]:
    """Name Slurm's default partition, where its table is to count for jobs that name none."""
    for p in partitions:
        if p.is_default and any(s.when == ("partition", p.name) for s in settings):
            sure = any(s.sure and s.when == ("partition", p.name) for s in settings)
            why = f"Slurm's default; named, so that [when.partition.{p.name}] counts"
            return [Setting("partition", p.name, why, sure=sure)]
    return []


def _accounts(facts: Facts) -> list[Setting]:
    here = facts.value("ClusterName")
    mine = [row for row in facts.accounts if row.get("Cluster") in ("", here)]
    names = list(dict.fromkeys(row["Account"] for row in mine if row["Account"]))
    default = next((row["DefaultAccount"] for row in mine), "")
    if len(names) < 2:
        return []
    why = f"yours: {_names(names)}; {default or 'none'} unless it is named (sacctmgr show user)"
    return [Setting("account", default or names[0], why, sure=False)]


def _chains(threats: Sequence[Preempted]) -> list[Setting]:
    source = {"partition": "scontrol show partition", "qos": "sacctmgr show qos"}
    return [
        Setting(
            "continue-by",
            "resubmit",
            f"PreemptMode=CANCEL ({source[each.when[0]] if each.when else 'scontrol show config'})",
            each.when,
        )
        for each in threats
        if "CANCEL" in each.mode
    ]


def _expedited(facts: Facts) -> list[Setting]:
    """Return what gives a requeued job the highest priority, at once (Slurm 25.11 and later)."""
    if "enable_expedited_requeue" not in facts.value("SlurmctldParameters"):
        return []
    return [Setting("sbatch", ["--requeue=expedite"], "a requeued job comes first, without a wait")]


def _requests(partitions: Sequence[Partition]) -> list[Setting]:
    """Return what to ask of partitions with GPUs; decided only where nodes are given whole."""
    found = []
    for p in partitions:
        when = ("partition", p.name)
        sure = p.is_whole and len(p.kinds) == 1
        for asked in p.asked:
            why = "all of a node's (Gres of scontrol show node)"
            found.append(Setting("gpus-per-node", asked, why, when, sure and len(p.asked) == 1))
        if p.asked and not p.is_whole and p.kinds[0].cpus:
            why = "all of a node's (scontrol show node); with fewer GPUs, the share of those"
            found.append(Setting("cpus-per-node", p.kinds[0].cpus, why, when, sure=False))
    return found


def _scratch(facts: Facts) -> list[Setting]:
    """Name the disk for runs, where it is not the one that is taken without a word."""
    good = [name for name, _, writable in facts.scratch if writable]
    if not good or good[0] == "SCRATCH" or facts.runs:
        return []
    return [Setting("scratch", f"${good[0]}", "is set here, and can be written")]


def _tool(facts: Facts) -> list[Setting]:
    if not facts.containers or facts.containers[0] == DEFAULT_TOOL:
        return []
    return [Setting("container-tool", facts.containers[0], "what there is here for --image")]


# --- in words ------------------------------------------------------------------------------


def _partition_remarks(partitions: Sequence[Partition]) -> list[str]:
    with_gpus = [p.name for p in partitions if p.has_gpus]
    default = next((p for p in partitions if p.is_default), None)
    found = []
    if partitions and default is None:
        found.append("There is no default partition: name one (--partition).")
    elif default and with_gpus and not default.has_gpus:
        found.append(
            f"Jobs go to {default.name}, which has no GPUs, unless they name another partition;"
            f" with GPUs: {_names(with_gpus)}."
        )
    if partitions and not with_gpus:
        found.append(
            "Slurm knows of no GPUs here, and would refuse a request for them. If nodes have some,"
            ' they come with the node: gpu-request = "none" beside gpus-per-node = "N".'
        )
    return found + _grouped((("partition", p.name), _gpu_remark(p)) for p in partitions)


def _gpu_remark(p: Partition) -> str:
    whole = "nodes are given whole (OverSubscribe=EXCLUSIVE), so a job has all their CPUs"
    if p.is_whole and not p.asked:
        return f"{whole} without asking."
    if p.is_whole:  # measured: the batch shell sees the GPUs, a step that has not asked does not
        return f"{whole}; for their GPUs it must ask all the same: --gpus-per-node {_or(p.asked)}."
    if not p.asked:
        return ""
    if len(p.asked) > 1:
        return f"nodes differ: ask for one type, --gpus-per-node {_or(p.asked)}."
    return f"--gpus-per-node {p.asked[0]} asks for all of a node's GPUs."


def _share(facts: Facts, partitions: Sequence[Partition]) -> list[str]:
    """Say what a job has of a shared node when it says nothing."""
    if not re.search(r"CR_(CORE|CPU)", facts.value("SelectTypeParameters").upper()):
        return []
    rows = []
    for p in partitions:
        kind = next((kind for kind in p.kinds if kind.gpus), None)
        if p.is_whole or kind is None:
            continue
        told = f"{p.value('JobDefaults')},{facts.value('JobDefaults')}"
        default = re.search(r"DefCpuPerGPU=(\d+)", told)
        has = (
            f"{default[1]} CPUs for each of its GPUs"
            if default
            else "one core of each node for torchrun's workers"
        )
        memory = p.value("DefMemPerCPU") or facts.value("DefMemPerCPU")
        has += f", and {memory} MB of memory for each CPU" if memory else ""
        even = f"{kind.cpus // kind.gpu_count} for each GPU"
        text = f"without --cpus-per-node a job has {has}; an even share of the CPUs is {even}."
        rows.append((("partition", p.name), text))
    return _grouped(rows)


def _limits(facts: Facts, partitions: Sequence[Partition]) -> list[str]:
    limits = facts.value("EnforcePartLimits")
    refused = limits.upper() not in ("", "NO")
    more = "is refused" if refused else "is not refused, but the job would never start"
    more += f" (EnforcePartLimits={limits})" if limits else ""
    rows = []
    for p in partitions:
        longest, default = p.value("MaxTime"), p.value("DefaultTime")
        text = f"without --time an attempt has {default or longest}"
        if longest:
            text += (
                f", and with it at most {longest}; a longer training goes on in the next attempt by"
                f" itself. A longer --time {more}"
            )
        rows.append((("partition", p.name), f"{text}." if default or longest else ""))
    return _grouped(rows)


def _going_on(facts: Facts) -> list[str]:
    found = [
        "Jobs are warned 60 s before their time limit (--signal), and earlier once a save was seen"
        f" to take longer: there no save has to fit into KillWait ({facts.kill_wait_s} s)."
    ]
    if facts.value("JobRequeue") == "0":
        found.append(
            "JobRequeue=0 does no harm: jobs ask to be requeued (--requeue), and where that is"
            " refused go on as a new job."
        )
    found.append(_requeue_delay(facts))
    largest = facts.value("MaxArraySize")
    if largest == "0":
        found.append("There are no job arrays here, and so no sweeps (MaxArraySize=0).")
    elif largest.isdigit():
        found.append(f"A sweep can have {int(largest):,} points (MaxArraySize).")
    return found


def _requeue_delay(facts: Facts) -> str:
    """Say how long a requeued job waits: `requeue_delay` of Slurm 25.11 and later, or cred_expire
    and a second."""
    if _expedited(facts):
        return "A requeued job may start again at once (--requeue=expedite)."
    if delay := re.search(r"requeue_delay=(\d+)", facts.value("SchedulerParameters")):
        return f"A requeued job waits {delay[1]} s before it may start again (requeue_delay)."
    expiry = re.search(r"cred_expire=(\d+)", facts.value("AuthInfo"))
    wait_s = int(expiry[1]) + 1 if expiry else 121
    return f"A requeued job waits {wait_s} s before it may start again (cred_expire)."


def _accounting(facts: Facts) -> list[str]:
    if facts.value("AccountingStorageType") in ("", "accounting_storage/none"):
        return [
            "There is no accounting (sacct): status and explain know from the runs' own journals,"
            " and from Slurm while it still has the job."
        ]
    if "associations" in facts.value("AccountingStorageEnforce") and not facts.accounts:
        return ["No account of yours was found: jobs may be refused. Ask the site for one."]
    return []


def _place(facts: Facts) -> list[str]:
    if facts.runs:
        return [f"Runs are kept in {facts.runs}, as HPC_DDP_RUNS says."]
    bad = [
        f"${name} ({folder}) can't be written here."
        for name, folder, writable in facts.scratch
        if not writable
    ]
    good = [name for name, _, writable in facts.scratch if writable]
    if good:
        return [*bad, f"Runs are kept in ${good[0]}/hpc-ddp."]
    return [
        *bad,
        "No variable of this shell names a scratch disk: runs are kept in ./runs, where you submit,"
        ' unless scratch = "/folder" names one. All nodes must see it.',
    ]


def _software(facts: Facts) -> list[str]:
    found = []
    if facts.containers:
        others = f"; there is {_or(facts.containers[1:], 'and')}, too" * bool(facts.containers[1:])
        found.append(f"--image runs a training in a container by {facts.containers[0]}{others}.")
    if facts.modules is not None:
        named = f", as 'module load {facts.modules[-1]}'" if facts.modules else ""
        found.append(f"There are environment modules: --setup loads them{named}.")
    return found


def _grouped(rows: Iterable[tuple[tuple[str, str] | None, str]]) -> list[str]:
    """Say what is true of several partitions once, with their names before it."""
    groups: dict[str, list[str]] = {}
    for when, text in rows:
        names = groups.setdefault(text, [])
        names += [f"QOS {when[1]}" if when[0] == "qos" else when[1]] if when else []
    return [
        f"{_names(names)}: {text}" if names else text[0].upper() + text[1:]
        for text, names in groups.items()
        if text
    ]


def _names(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names) if more < 2 else f"{', '.join(names[:SHOWN])} and {more} others"


def _or(words: Sequence[str], joint: str = "or") -> str:
    return f" {joint} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _seconds(text: str) -> int:
    """Return seconds: of a number with or without ``sec``, or a time such as ``00:02:00``."""
    if match := re.fullmatch(r"(\d+)( sec)?", text):
        return int(match[1])
    with suppress(UsageError):
        return parse_time(text)
    return 0
