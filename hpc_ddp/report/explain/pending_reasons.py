"""Slurm's reasons for a waiting job, in plain words.

The first row counts whose pattern matches the start of a reason. ``{job}`` stands for the job id,
other fields for groups of the pattern; `RESOURCES` has the words for the resource of a limit.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Reason(NamedTuple):
    pattern: str
    words: str
    hint: str


_WAIT = "wait: it starts by itself"
_LIMITS = "wait, or see the limits: sacctmgr show assoc user=$USER; sacctmgr show qos"
_LESS = "it will not start as it is: cancel it, and ask for less"

REASONS = (
    Reason(r"None|$", "Slurm has not looked at it yet", _WAIT),
    Reason(
        r"Priority",
        "jobs of higher priority come first",
        "wait; a shorter --time may let it in between them",
    ),
    Reason(
        r"Resources",
        "it is next, and waits for nodes to become free",
        "wait; fewer --nodes or a shorter --time may start earlier",
    ),
    Reason(
        r"BeginTime",
        "its earliest start has not come; after a requeue Slurm waits some two minutes",
        _WAIT,
    ),
    Reason(
        r"DependencyNeverSatisfied",
        "the job that it depends on has ended otherwise than it asks for, so it never starts",
        "scontrol update JobId={job} Dependency=  (to start without), or hpc-ddp cancel {job}",
    ),
    Reason(r"Dependency", "the job that it depends on has not ended", _WAIT),
    Reason(
        r"job[_ ]requeued[_ ]in[_ ]held[_ ]state",
        "it ended with an error, and Slurm keeps it in the queue, held",
        "scontrol release {job} starts it again; hpc-ddp cancel ends it",
    ),
    Reason(
        r"JobHeldUser", "it is held, by you or an account's coordinator", "scontrol release {job}"
    ),
    Reason(
        r"JobHeldAdmin",
        "it is held by an administrator, or by Slurm after too many requeues",
        "ask your site's support why; then scontrol release {job}",
    ),
    Reason(
        r"JobHoldMaxRequeue|launch failed requeued held|.*requeued held",
        "Slurm holds it: it could not be started on its nodes, or was requeued too often",
        "scontrol release {job}; if that comes again, tell your site's support",
    ),
    Reason(
        r"ReqNodeNotAvail|Nodes required for job are",
        "a node that it needs is down, drained or reserved, perhaps for a maintenance that begins"
        " before the job would end",
        "scontrol show reservation; then a --time that ends before it, or no --nodelist",
    ),
    Reason(
        r"ReservationDeleted",
        "its reservation is gone",
        "scontrol update JobId={job} ReservationName=",
    ),
    Reason(r"Reservation", "its reservation has not begun", _WAIT),
    Reason(
        r"PartitionTimeLimit",
        "it asks for more time than its partition allows",
        "a shorter --time; sinfo --format='%P %l' shows the limits",
    ),
    Reason(
        r"PartitionNodeLimit",
        "it asks for more nodes than its partition allows, or nodes that are down",
        "fewer --nodes; sinfo shows the partitions",
    ),
    Reason(
        r"PartitionDown|PartitionInactive",
        "its partition starts no jobs now",
        "wait, or another --partition; sinfo shows them",
    ),
    Reason(
        r"PartitionConfig",
        "its partition does not allow such a job",
        "scontrol show partition; then another --partition",
    ),
    Reason(
        r"BadConstraints",
        "no node has what it asks for, so it never starts",
        "other --constraint, --gpus-per-node, --cpus-per-node or --mem; sinfo --Node --long",
    ),
    Reason(r"Constraints", "no node has what it asks for at this time", "wait, or ask for less"),
    Reason(
        r"InvalidAccount|AccountNotAllowed",
        "the account is not valid, or not here",
        "sacctmgr show assoc user=$USER format=account,partition; then --account",
    ),
    Reason(
        r"InvalidQOS|QOSNotAllowed",
        "the QOS is not valid, or not for this account or partition",
        "sacctmgr show assoc user=$USER format=account,qos; then --qos",
    ),
    Reason(r"Licenses", "a license that it asks for is in use", _WAIT),
    Reason(r"JobArrayTaskLimit", "as many tasks of the array run as its %N allows", _WAIT),
    Reason(r"NodeDown", "a node that it needs is down", "wait, or leave out --nodelist"),
    Reason(r"Cleaning", "its previous start is still being cleaned up", _WAIT),
    Reason(r"Prolog", "its nodes are being prepared", _WAIT),
    Reason(r"BurstBuffer", "its burst buffer is not ready", _WAIT),
    Reason(r"MaxMemPerLimit", "it asks for more memory per node or CPU than allowed", _LESS),
    Reason(r"DeadLine", "it can not end before its --deadline", _LESS),
    Reason(
        r"(?P<owner>Assoc|QOS)Grp(?P<limit>\w+?)(Run)?Minutes(Limit)?$",
        "{owner} has used up its {limit} minutes",
        "sshare shows the budget; ask its owner, or use another --account",
    ),
    Reason(
        r"(?P<owner>Assoc|QOS)Grp(?P<limit>\w+?)(Limit)?$",
        "all jobs of {owner} together use as much as they may of: {limit}",
        _LIMITS,
    ),
    Reason(
        r"(Assoc|QOS)?Max(?P<limit>\w+?)PerUser(Limit)?$",
        "your jobs together use as much as you may of: {limit}",
        "wait for your other jobs, or ask for less; sacctmgr show qos shows the limits",
    ),
    Reason(
        r"(Assoc|QOS)?Max(?P<limit>\w+?)PerAccount(Limit)?$",
        "the jobs of your account together use as much as they may of: {limit}",
        _LIMITS,
    ),
    Reason(
        r"(Assoc|QOS)?Max(?P<limit>\w+?)(Minutes)?Per(Job|Node)(Limit)?$",
        "it asks for more than one job may have of: {limit}",
        _LESS + "; sacctmgr show qos shows the limits",
    ),
    Reason(
        r"(Assoc|QOS)Max(?P<limit>Jobs|SubmitJob)Limit",
        "you have as many as you may of: {limit}",
        _LIMITS,
    ),
    Reason(
        r"QOSMin(?P<limit>\w+?)(NotSatisfied)?$",
        "it asks for less than its QOS takes of: {limit}",
        "ask for more, or another --qos; sacctmgr show qos shows the limits",
    ),
    Reason(
        r"(Association|QOS)\w*Limit|AccountingPolicy|QOSUsageThreshold",
        "your account or QOS has reached a limit",
        _LIMITS,
    ),
)

OWNERS = {"Assoc": "your account", "QOS": "your QOS"}
RESOURCES = {
    "gres": "GPUs (GRES)",
    "cpu": "CPUs",
    "node": "nodes",
    "mem": "memory",
    "memory": "memory",
    "jobs": "running jobs",
    "submitjobs": "submitted jobs",
    "submitjob": "submitted jobs",
    "wall": "run time",
    "wallduration": "run time",
    "bb": "burst buffer",
    "license": "licenses",
}


def in_words(reason: str, job: str) -> tuple[str, str]:
    """Return the meaning of a reason and a hint; an unknown reason as it is."""
    for row in REASONS:
        match = re.match(row.pattern, reason)
        if match:
            groups = {name: text or "" for name, text in match.groupdict().items()}
            groups["owner"] = OWNERS.get(groups.get("owner", ""), "")
            limit = groups.get("limit", "")
            groups["limit"] = RESOURCES.get(limit.lower(), limit)
            return row.words.format(**groups), row.hint.format(job=job)
    return f"Slurm gives the reason {reason}", f"scontrol show job {job}"
