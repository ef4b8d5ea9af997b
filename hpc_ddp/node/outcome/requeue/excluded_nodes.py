"""The nodes that the next attempt is kept off: those that verdicts have blamed lately."""

from __future__ import annotations

import re
import time
from contextlib import suppress

from hpc_ddp import slurm
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.file_io import read_json, write_json
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.job.task_folder import job_folder
from hpc_ddp.core.journal.events import JournalEvent, VerdictGiven
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome.gather_facts import since_submit
from hpc_ddp.node.outcome.requeue.job_change import JobChange
from hpc_ddp.slurm_text import parse_job

# Options of sbatch by the names of `scontrol show job`.
REQUESTS = {"Partition": "partition", "Reservation": "reservation", "Features": "constraint"}
# By these answers sbatch tells that the other nodes do not suffice. Any other refusal, as by a
# limit on the user's jobs or by a site that forbids sbatch on its nodes, says nothing of them.
TOO_FEW = re.compile("Requested (?:node|topology)|Required node not available|Invalid node name")
KIND = ("CPUTot", "RealMemory", "Gres")  # of a node, by `scontrol show node`
FREE = ("IDLE", "MIXED")  # states of nodes that may take a job soon
KEPT_OFF_S = 24 * 3600.0  # as long as a node takes to be looked after, or to prove itself again


def exclusion_of(run: RunFolder, job_id: str, give_up: float | None = None) -> list[JobChange]:
    """Return the change by which a job is kept off the nodes of `excluded_nodes`, and off no
    others: nodes that were blamed more than a day ago are used again. [] where that returns None;
    asks Slurm, and raises, as that. The change prints the blamed nodes."""
    nodes = excluded_nodes(run, job_id, give_up)
    if nodes is None:
        return []
    # The user has excluded the other nodes of the list.
    blamed = [n for n in _bad_nodes(run, since_submit(run.events()), since=0.0) if n in nodes]
    done = f"kept off: {', '.join(blamed)}" if blamed else ""
    return [JobChange(f"ExcNodeList={','.join(nodes)}", done)]


def excluded_nodes(run: RunFolder, job_id: str, give_up: float | None = None) -> list[str] | None:
    """Return the nodes to keep a job off: first those that Slurm keeps the job off already and that
    no verdict has blamed; then, sorted, those that verdicts have blamed within the last day
    (`KEPT_OFF_S`), unless the nodes that are left do not suffice, which is printed; and, where
    enough others are free, those on which starts have failed twice.

    sbatch tells in a test whether they suffice; where it refuses the test for another reason, or
    gives no answer, `_has_other_nodes` decides.

    None where nothing since the last submit has blamed a node, or where Slurm refuses its list,
    or gives no answer until `give_up`, a time of ``time.monotonic()`` (None: two minutes). Refusals
    of Slurm are printed. Raises OSError if the journal can't be read.
    """
    events = since_submit(run.events())
    blamed = set(_bad_nodes(run, events, since=0.0))
    if not blamed:
        return None
    try:
        text = slurm.job_text(job_id, slurm.deadline(give_up))
        node_list = parse_job(text).excluded
        excluded = slurm.expand_hosts(node_list) if node_list else []
    except HpcDdpError as error:
        say(error.message)
        return None
    excluded_before = [node for node in excluded if node not in blamed]
    since, requests = time.time() - KEPT_OFF_S, _requests_in(text)
    bad, suspects = _blamed_nodes(events, since), _suspects(run, since)
    all_bad = sorted({*bad, *suspects})
    # What failed there may have been away for all nodes: a busy one would be waited for for days.
    if suspects and _has_other_nodes(
        requests, all_bad, [*excluded_before, *all_bad], _least_nodes(run), FREE
    ):
        bad = all_bad
    if not bad:
        return excluded_before
    nodes = [*excluded_before, *bad]
    words = [f"--{REQUESTS[name]}={text}" for name, text in requests.items() if name in REQUESTS]
    script = job_folder(run).script
    reason = slurm.why_refused(script, f"--exclude={','.join(nodes)}", *words)
    # A job that has too few other nodes would wait for good: Slurm tells so (BadConstraints) only
    # when the job may start again, and no process of the job is left then.
    if reason and not TOO_FEW.search(reason):
        has_others = _has_other_nodes(requests, bad, nodes, _least_nodes(run))
        reason = "" if has_others else f"too few other nodes; no test of them, since {reason}"
    if reason:
        say(f"not kept off {', '.join(bad)}: {reason}")
        return excluded_before
    return nodes


def _least_nodes(run: RunFolder) -> int:
    """Return the least number of nodes that a run's job asks for. Raise OSError or UsageError where
    its job.json can't be used."""
    return JobSpec.from_json(run.job_json.read_bytes()).node_range[0]


def note_vain_node(run: RunFolder, node: str) -> None:
    """Note that a start which has worked before has failed on a node, for all tasks of an array:
    after a second time `excluded_nodes` counts the node as bad. Nothing is noted where the disk
    refuses."""
    with suppress(OSError):
        nodes = read_json(run.vain_nodes)
        write_json(run.vain_nodes, {**nodes, node: [*nodes.get(node, []), time.time()]})


def _requests_in(text: str) -> dict[str, str]:
    """Return what a job asks for now, by which nodes it may have, by the names in `text`, that of
    `scontrol show job`: its user may have moved the job to another partition."""
    # Not NumNodes, which is that of the nodes that have not ended yet.
    names = (*REQUESTS, "ReqNodeList")
    matches = {name: re.search(rf"\b{name}=(\S+)", text) for name in names}
    return {name: m[1] for name, m in matches.items() if m and m[1] != "(null)"}


def _has_other_nodes(
    requests: dict[str, str],
    bad: list[str],
    excluded: list[str],
    least: int,
    states: tuple[str, ...] = ("",),
) -> bool:
    """Return whether a job with `requests` (`_requests_in`) has its `least` number of nodes without
    those of `excluded`: usable ones of its partition, or reservation, of the `KIND` of a `bad` one,
    with its features if the job has a constraint, and with a state that begins with one of
    `states`. True where Slurm tells nothing of the nodes, False where the job asks for nodes by
    name."""
    if "ReqNodeList" in requests:
        return False
    partitions = set(requests.get("Partition", "").split(","))
    try:
        records = {record.get("NodeName", ""): record for record in slurm.show_all("node")}
        candidates = [
            name
            for name, record in records.items()
            if partitions & {*record.get("Partitions", "").split(",")}
        ]
        if reservation := requests.get("Reservation"):
            rows = slurm.show_all("reservation")
            nodes_of = {row.get("ReservationName"): row.get("Nodes", "") for row in rows}
            candidates = slurm.expand_hosts(nodes_of.get(reservation, ""))
    except HpcDdpError:
        return True
    # Some sites name the rack, say, among a node's features.
    fields = (*KIND, "ActiveFeatures") if "Features" in requests else KIND
    kinds = {name: [record.get(field) for field in fields] for name, record in records.items()}
    bad_kinds = [kinds[name] for name in bad if name in kinds]
    alternatives = [
        name
        for name in candidates
        if kinds.get(name) in bad_kinds and name not in excluded
        if records[name].get("State", "").startswith(states)
    ]
    count = len(alternatives) - len(slurm.unusable_nodes(alternatives))
    return not bad_kinds or count >= least


def _bad_nodes(run: RunFolder, events: list[JournalEvent], since: float) -> list[str]:
    """Return the nodes, sorted, of `_blamed_nodes` and `_suspects`."""
    return sorted({*_blamed_nodes(events, since), *_suspects(run, since)})


def _blamed_nodes(events: list[JournalEvent], since: float) -> list[str]:
    """Return the nodes, sorted, that verdicts after the time `since`, in unix seconds, blame."""
    verdicts = [event for event in events if isinstance(event, VerdictGiven) and event.time > since]
    return sorted({node for verdict in verdicts for node in verdict.bad_nodes})


def _suspects(run: RunFolder, since: float) -> list[str]:
    """Return the nodes, sorted, on which starts that had worked before have failed twice
    (`note_vain_node`) since the time `since`, in unix seconds."""
    times_by_node = read_json(run.vain_nodes).items()
    return sorted(n for n, times in times_by_node if len([t for t in times if t > since]) > 1)
