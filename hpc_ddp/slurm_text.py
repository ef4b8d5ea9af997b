"""Parses what Slurm's commands print: jobs, the queue, the configuration.

Only the plain text formats are read: the JSON ones changed shape from version to version.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hpc_ddp.core.job.slurm_options import SBATCH, SHORT_OPTIONS, full_name
from hpc_ddp.core.job.slurm_values import array_indexes, slurm_seconds

# Printed by a command to which the controller has not answered; another try may do better.
NO_ANSWER = re.compile(
    r"Socket timed out|Unable to contact slurm controller|Zero Bytes were transmitted"
    r"|backup controller in standby|temporarily unable to accept|Connection (refused|reset)"
    r"|authentication error|Munge (en|de)code failed|Invalid authentication credential"
    # A name server that is away, as on a node that has just booted.
    r"|getaddrinfo|Unable to resolve|Unable to establish (control|configuration)"
    r"|Could not establish a configuration|No route to host|Network is unreachable"
    r"|error while loading shared libraries|Stale file handle",  # Slurm's files are away
    re.I,
)

# A command that shows the accepted values, by a part of Slurm's reason for refusing a job.
_HINTS = {
    "job submit limit": "fewer jobs or tasks at once: sacctmgr show qos, and show assoc user=$USER",
    "Invalid job array": "fewer tasks: scontrol show config | grep MaxArraySize",
    "Pathname of a file": "fewer tasks: scontrol show config | grep MaxArraySize",
    "nvalid partition": "sinfo -s shows the partitions",
    "node configuration": "sinfo -o '%P %D %c %m %G' shows nodes, CPUs, MB and GPUs by partition",
    "nvalid account": "sacctmgr show associations user=$USER shows your accounts and partitions",
    "nvalid qos": "sacctmgr show associations user=$USER format=account,partition,qos shows yours",
    "nvalid feature": "sinfo -o '%P %f' shows the features that --constraint takes",
    "nvalid node name": "sinfo -N shows the nodes",
    "(gres) specification": "sinfo -o '%P %G' shows the GPUs of each partition",
    "dependency problem": "squeue --me: Slurm no longer knows the job that --dependency names",
    "time limit": "sinfo -o '%P %l' shows the longest --time of each partition",
    "partition not available": "sinfo -o '%P %a' shows which partitions are up",
    "eservation": "scontrol show reservation shows them",
}
# No character that the names and paths of jobs have in practice: users put any other into them.
SEPARATOR = "\x1f"
QUEUE_COLUMNS = SEPARATOR.join(("%F", "%A", "%K", "%T", "%r", "%N", "%L", "%j", "%Z", "%o"))
_JOB_ID = re.compile(r"\d+(;\S+)?")


LIVE = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING")


# States that nothing comes after. PREEMPTED is none of them: a requeue may follow.
OVER = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE"),
    *("OUT_OF_MEMORY", "REVOKED"),
)
CANCELLED = ("CANCELLED", "DEADLINE", "REVOKED")  # by a person, or by Slurm for good


# States of a job whose batch script has not begun, or ends.
HAS_NO_NODES = (*OVER, "PREEMPTED", "PENDING", "REQUEUED", "REQUEUE_FED", "COMPLETING")


# Slurm shows a flag in the place of the state that it belongs to. A job that is being signalled,
# as at a preemption, is SIGNALING until all of its nodes have answered: seconds, where one is slow.
_STATE_OF = {
    **dict.fromkeys(("SIGNALING", "STOPPED", "RESIZING"), "RUNNING"),
    **dict.fromkeys(("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "EXPEDITING"), "PENDING"),
}


_PAIR = re.compile(r"(?:^|\s)([A-Z]\w*)=(\S*)")


@dataclass(frozen=True)
class Job:
    """A job as ``scontrol show job`` prints it; times in unix seconds.

    `limit_s` is its time limit and `left_s` what is left of it, in seconds; both are inf without a
    limit, None where Slurm does not say. Unlike `end_time`, by the controller's clock and in local
    time, they hold on a host whose clock is off, and in the hour that comes twice a year.

    `preempted_at` is when a preemption began, or, without a grace time or after it, when it ended
    the job. `expedited` marks a job of Slurm 25.11 or later with ``--requeue=expedite``: if its
    batch script ends with a code other than 0, Slurm holds the job in the queue as REQUEUE_HOLD.
    `may_be_requeued` is False where Slurm starts no job again after the loss of a node. `excluded`
    are the nodes that Slurm keeps the job off, as ``n[1-2]``, '' without any; `script` is the batch
    script, and `output` the file of its output, '' where Slurm does not say.
    """

    state: str
    reason: str
    restarts: int
    preempted_at: float | None
    end_time: float | None
    left_s: float | None = None
    limit_s: float | None = None
    expedited: bool = False
    excluded: str = ""
    script: str = ""
    output: str = ""
    may_be_requeued: bool = True

    @property
    def is_cancelled(self) -> bool:
        """True if the job was cancelled, by a person or by Slurm for good.

        Reliable only while the job's batch script runs, or before: then COMPLETING without a reason
        is a scancel. A job whose batch script has ended by itself looks the same for a moment.
        """
        is_ending = self.state == "COMPLETING" and self.reason == "None" and not self.preempted
        return is_ending or self.state in CANCELLED

    @property
    def preempted(self) -> bool:
        """True if a preemption has begun, and the job runs in its grace time or was ended by it.

        False for a job that was cancelled within its grace time: it ended after the preemption
        began. Where PreemptMode is REQUEUE, a job that was ended has a higher restart count.
        """
        if self.preempted_at is None:
            return False
        # Without a grace time, or after it, Slurm notes the end as the time of the preemption.
        return self.state == "RUNNING" or (self.end_time or 0) <= self.preempted_at


@dataclass(frozen=True)
class QueuedJob:
    """A line of the queue: a job, a task of an array, or all tasks of an array that wait.

    Attributes
    ----------
    reason
        Slurm's word for why the job waits
    nodes, time_left
        in Slurm's notation, as ``n[1-2]`` ('' before the start) and ``1-02:30:00``
    script
        a real path; ``(null)`` for one that came through a pipe
    name
        the job's
    array, tasks
        the array's job id, and the index of this task, or those of all that wait, as ``0-5%2``; ''
        for a job without an array
    """

    state: str
    reason: str
    nodes: str
    time_left: str
    script: str = ""
    name: str = ""
    array: str = ""
    tasks: str = ""

    def has_task(self, array: str, index: int) -> bool:
        """Return whether the line is of task `index` of the array with the job id `array`: of this
        task alone, or of all tasks that wait, this one among them. Raise UsageError where `tasks`
        is no list of indexes."""
        return self.array == array and bool(self.tasks) and index in array_indexes(self.tasks)


@dataclass(frozen=True)
class JobRecord:
    """A job as Slurm still remembers it, in Slurm's words.

    `exit_code` is ``code:signal``; `start_time` is in unix seconds, for a waiting job Slurm's
    guess.
    """

    state: str
    reason: str
    exit_code: str
    nodes: str
    start_time: float | None


def parse_job_id(printed: str) -> str | None:
    """Return ``id`` or ``id;cluster`` from what ``sbatch --parsable`` printed: the last line of
    this form, since some sites' sbatch prints a banner, too. None where no line has it."""
    lines = [line.strip() for line in printed.splitlines()]
    return next((line for line in reversed(lines) if _JOB_ID.fullmatch(line)), None)


def host_names(text: str, node_list: str) -> list[str]:
    """Return the names that ``scontrol show hostnames`` printed, `text`, for a host list, in order.
    A line that begins as no name of the list does is a site's banner, and left out."""
    # n[1-2],m3 becomes n[,m3, and that n and m3.
    starts = tuple(re.findall(r"[^,[]+", re.sub(r"\[[^]]*\]", "[", node_list)))
    return [name for name in re.findall(r"^\w[\w.-]*$", text, re.M) if name.startswith(starts)]


def parse_job(text: str) -> Job:
    """Return the job that ``scontrol show job`` printed in several lines; a missing field is '',
    None, 0 or False. Fields are looked for at line starts: a job's name, which stands on the first
    line, may hold anything."""
    field = partial(_field, text)
    limit = field(r"^\s+RunTime=\S+ TimeLimit=(\S+)")
    end = field(r"^\s+StartTime=\S+ EndTime=(\S+)")
    return Job(
        state=_state(field(r"^\s+JobState=(\S+)")),
        reason=field(r"^\s+JobState=\S+ Reason=(\S+)"),
        restarts=int(field(r"^\s+Requeue=\S+ Restarts=(\d+)") or 0),
        preempted_at=_unix(field(r"^\s+PreemptEligibleTime=\S+ PreemptTime=(\S+)")),
        end_time=_unix(end),
        left_s=_left_s(field(r"^\s+RunTime=(\S+)"), limit),
        limit_s=_left_s("00:00:00", limit),
        excluded=field(r"^\s+ReqNodeList=\S+ ExcNodeList=(\S+)").replace("(null)", ""),
        expedited=field(r"^\s+ExpeditedRequeue=(\S+)") == "Yes",
        may_be_requeued=field(r"^\s+Requeue=(\d)") != "0",
        script=field(r"^\s+Command=(.+)"),
        output=field(r"^\s+StdOut=(.+)"),
    )


def parse_record(text: str) -> JobRecord:
    """Return the record of the job that ``scontrol show job`` printed; of several jobs, as an
    array's tasks, the first one. The reason has blanks in place of ``_``; a missing field is '' or
    None."""
    # A record's NodeList may be empty: the next record's would be found for it.
    field = partial(_field, re.split(r"\n(?=JobId=)", text.strip(), maxsplit=1)[0])
    return JobRecord(
        state=_state(field(r"^\s+JobState=(\S+)")),
        reason=field(r"^\s+JobState=\S+ Reason=(\S+)").replace("_", " "),
        exit_code=field(r"^\s+Requeue=.* ExitCode=(\S+)"),
        nodes=field(r"^\s+NodeList=(\S+)").replace("(null)", ""),
        start_time=_unix(field(r"^\s+StartTime=(\S+)")),
    )


def parse_accounting(text: str) -> JobRecord | None:
    """Return the record of a job that ``sacct --format=State,Reason,ExitCode,NodeList,Start``
    printed; None where no line has these columns.

    The last line counts: of a job that was requeued, it is the newest start. A state such as
    ``CANCELLED by 1000`` is cut after its first word.
    """
    rows = parse_table(text, 5)
    if not rows:
        return None
    state, reason, code, nodes, start = rows[-1]
    return JobRecord(state.partition(" ")[0], reason, code, nodes, _unix(start))


def parse_queue(text: str) -> dict[str, QueuedJob]:
    """Return the jobs that squeue printed with `QUEUE_COLUMNS`, by their ids. Malformed lines are
    left out. A script's path is resolved on this machine, to a real path.

    %A is a task's own id, %F its array's. Pending tasks, and the task that starts last, have the
    array's id as their own. When that task has ended, the array would look finished while others
    still run; so the array's id then maps to a task that is live.
    """
    jobs: dict[str, QueuedJob] = {}
    live_tasks: dict[str, QueuedJob] = {}
    for array_id, job_id, tasks, *row, name, folder, script in parse_table(text, 10, SEPARATOR):
        state, reason, nodes, time_left = row
        if script != "(null)":
            script = os.path.realpath(os.path.join(folder, script))
        array = ("", "") if tasks == "N/A" else (array_id, tasks)
        job = QueuedJob(_state(state), reason, nodes, time_left, script, name, *array)
        jobs[job_id] = job
        if job.state in LIVE:
            live_tasks[array_id] = job
    for array_id, job in live_tasks.items():
        if array_id not in jobs or jobs[array_id].state not in LIVE:
            jobs[array_id] = job
    return jobs


def parse_table(text: str, columns: int, separator: str = "|") -> list[list[str]]:
    """Return the fields of each line that has `columns` fields with a separator between them; lines
    with fewer fields are left out.

    The last field may hold a separator itself, as a path may a ``|``.
    """
    rows = [line.split(separator, columns - 1) for line in text.split("\n")]
    return [row for row in rows if len(row) == columns]


def parse_options(script: str, more: Sequence[str] = ()) -> dict[str, str]:
    """Return the options in the ``#SBATCH`` lines before the first command of a batch script's
    text, and in the words `more` of a command line, by whole long name; the last of a name counts.
    The value is '' for a flag, and also where a blank stands between option and value."""
    head = re.split(r"^\s*[^\s#]", script, maxsplit=1, flags=re.M)[0]
    lines = re.findall(r"^#SBATCH\s(.*)", head, flags=re.M)
    words = [word for line in lines for word in _split_words(line)] + [*more]
    options = {}
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            options[full_name(name, SBATCH)] = value
        elif word[:1] == "-" and word[1:2] in SHORT_OPTIONS:  # as -N2
            options[SHORT_OPTIONS[word[1]]] = word[2:]
    return options


def _split_words(line: str) -> list[str]:
    """Return the words of a line as a shell splits it, without a comment; where its quotes do not
    match, split at blanks."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.split()


def parse_reason(command: str, printed: str) -> str:
    """Return the text of a failure that a Slurm command printed, on one line, without the command's
    name."""
    return re.sub(rf"^{command}: (error: )?", "", printed, flags=re.M).replace("\n", "; ")


def last_line(printed: object) -> str:
    """Return ``: `` and the last line of what a command has printed; '' without a line. `printed`
    is text, bytes or None, as in an error of `subprocess`."""
    text = printed.decode(errors="replace") if isinstance(printed, bytes) else str(printed or "")
    lines = text.strip().splitlines()
    return f": {lines[-1].strip()}" if lines else ""


def hint_for(reason: str) -> str:
    """Return the hint for a reason that Slurm gave; '' where there is none for it."""
    return next((hint for part, hint in _HINTS.items() if part in reason), "")


def parse_config(text: str) -> dict[str, str]:
    """Return the values of the lines ``Name = value`` by name, as ``scontrol show config`` prints
    them. Where a name comes again, in another section, the first value stays."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            values.setdefault(name.strip(), value.strip())
    return values


def parse_codes(text: str) -> list[int]:
    """Return the exit codes of a list such as ``1,75-80``; [] for ``(null)`` and ''."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", text)
    return [code for first, last in spans for code in range(int(first), int(last or first) + 1)]


def parse_cluster(config: Mapping[str, str]) -> str:
    """Return the cluster as `JobRef` has it, ``name@host:port`` with the first controller's host
    and port, from a configuration of `parse_config`: ``name`` where that names no controller, ''
    where it has no name."""
    name, host = config.get("ClusterName", ""), config.get("SlurmctldHost[0]", "").partition("(")[0]
    place = f"@{host}:{config.get('SlurmctldPort', '')}" if host else ""
    return f"{name}{place}" if name else ""


def parse_records(text: str) -> list[dict[str, str]]:
    """Return a record for each line that ``scontrol --oneliner`` printed: its values by name, since
    their order differs between versions. A line without a value is left out.

    A value with blanks, such as a reason's, is cut after its first word. Where a later word of such
    a value looks like ``Name=value``, a value of this name that stands before stays.
    """
    rows = []
    for line in text.splitlines():
        row: dict[str, str] = {}
        for name, value in _PAIR.findall(line):
            row.setdefault(name, value)
        if row:
            rows.append(row)
    return rows


def _state(shown: str) -> str:
    """Return the state for which Slurm shows the flag `shown` (`_STATE_OF`); any other text is a
    state, and returned as it is."""
    return _STATE_OF.get(shown, shown)


def _field(text: str, pattern: str) -> str:
    """Return the first group of a pattern in ``scontrol show``'s lines; '' without a match."""
    match = re.search(pattern, text, re.M)
    return match[1] if match else ""


def _left_s(run_time: str, limit: str) -> float | None:
    """Return the seconds from a job's run time to its limit, negative beyond it; inf without a
    limit, None where one of the two is unknown. Both are in Slurm's notation, as ``1-12:00:00``."""
    elapsed_s, limit_s = slurm_seconds(run_time), slurm_seconds(limit)
    if limit == "UNLIMITED":
        return math.inf
    return None if elapsed_s is None or limit_s is None else float(limit_s - elapsed_s)


def _unix(text: str) -> float | None:
    """Return the unix seconds of a local time as Slurm prints it; None for any other text, as
    ``Unknown``, ``None`` and ''."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:  # Unknown, None
        return None
