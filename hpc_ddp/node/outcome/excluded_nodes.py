"""The nodes that the next attempt is kept off: those that verdicts have blamed lately."""

from __future__ import annotations

import re
import time

from hpc_ddp import slurm
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.job.task_folder import job_folder
from hpc_ddp.core.journal.events import JournalEvent, VerdictGiven
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome.gather_facts import since_submit

# Options of sbatch by the names of `scontrol show job`.
REQUESTS = {"Partition": "partition", "Reservation": "reservation", "Features": "constraint"}
KEPT_OFF_S = 24 * 3600.0  # as long as a node takes to be looked after, or to prove itself again


def keep_off(run: RunFolder, job_id: str, give_up: float | None = None) -> None:
    """Have Slurm keep a waiting job off the nodes of `excluded_nodes`, and off no others: nodes
    that were blamed more than a day ago are used again. Do nothing where that returns None.

    The blamed nodes that the job is kept off are printed; so is a refusal of Slurm, which leaves
    the job as it is. A silent Slurm is waited for until `give_up`, a time of ``time.monotonic()``
    (None: two minutes), for its list, and two minutes for the change. Raises OSError if the journal
    can't be read.
    """
    nodes = excluded_nodes(run, job_id, give_up)
    if nodes is None:
        return
    try:
        slurm.update_job(job_id, f"ExcNodeList={','.join(nodes)}")
    except HpcDdpError as error:
        say(error.message)
    else:
        blamed = [n for n in _bad_nodes(since_submit(run.events()), since=0.0) if n in nodes]
        if blamed:  # the user has excluded the other nodes of the list
            say(f"kept off: {', '.join(blamed)}")


def excluded_nodes(run: RunFolder, job_id: str, give_up: float | None = None) -> list[str] | None:
    """Return the nodes to keep a job off: first those that Slurm keeps the job off already and that
    no verdict has blamed; then, sorted, those that verdicts have blamed within the last day
    (`KEPT_OFF_S`), unless sbatch, in a test, refuses the job without them, which is printed.

    None where no verdict since the last submit has blamed a node, or where Slurm refuses its list,
    or gives no answer until `give_up`, a time of ``time.monotonic()`` (None: two minutes). Refusals
    of Slurm are printed. Raises OSError if the journal can't be read.
    """
    events = since_submit(run.events())
    blamed = set(_bad_nodes(events, since=0.0))
    if not blamed:
        return None
    try:
        node_list = slurm.show_job(job_id, give_up).excluded
        excluded = slurm.expand_hosts(node_list) if node_list else []
    except HpcDdpError as error:
        say(error.message)
        return None
    excluded_before = [node for node in excluded if node not in blamed]
    bad = _bad_nodes(events, since=time.time() - KEPT_OFF_S)
    if not bad:
        return excluded_before
    # sbatch refuses where too few other nodes are left; a site may forbid sbatch on its nodes, too.
    nodes = [*excluded_before, *bad]
    options = [f"--exclude={','.join(nodes)}", *_changed_requests(job_id)]
    reason = slurm.why_refused(job_folder(run).script, *options)
    if reason:
        say(f"not kept off {', '.join(bad)}: {reason}")
        return excluded_before
    return nodes


def _changed_requests(job_id: str) -> list[str]:
    """Return options of sbatch for what a job asks for now, by which nodes it may have: its user
    may have moved the job to another partition. [] where Slurm refuses, or gives no answer."""
    try:
        text = slurm.job_text(job_id)
    except HpcDdpError:
        return []
    matches = (re.search(rf"\b{field}=(\S+)", text) for field in REQUESTS)
    pairs = zip(REQUESTS.values(), matches, strict=True)
    return [f"--{option}={m[1]}" for option, m in pairs if m and m[1] != "(null)"]


def _bad_nodes(events: list[JournalEvent], since: float) -> list[str]:
    """Return the nodes, sorted, that verdicts after the time `since`, in unix seconds, blame."""
    verdicts = [event for event in events if isinstance(event, VerdictGiven) and event.time > since]
    return sorted({node for verdict in verdicts for node in verdict.bad_nodes})
