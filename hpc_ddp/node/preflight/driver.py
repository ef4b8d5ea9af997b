"""The driver of the preflight: asks all nodes, judges their answers, journals the outcome.

``python <run>/lib/node.py preflight.driver <srun …> <python> <run>/lib/node.py preflight.checks``

The batch script runs it; it starts `checks` as one task per node. The outcome is journalled as the
event `preflight`; exit code 0 means that the training can start.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from hpc_ddp import slurm
from hpc_ddp.core.attempt_env import AttemptEnv, variable
from hpc_ddp.core.checkpoints import published, read_manifest
from hpc_ddp.core.console.terminal import say
from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.core.file_io import read_seconds, read_word
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.core.journal.events import PreflightEnded
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.net.names_and_ports import listen_on_any_port
from hpc_ddp.node.preflight.bandwidth import TIMEOUT_S
from hpc_ddp.node.preflight.blame import (
    DOUBTFUL,
    Reports,
    blame_exchange,
    blame_fabric,
    blame_pairs,
    blame_slow,
    blame_torch,
    drop_unconfirmed,
    outcome,
    strain,
)
from hpc_ddp.node.preflight.dialogue import (
    CHECKS_S,
    AgentLostError,
    Command,
    Dialogue,
    LaunchError,
    NoticeError,
)
from hpc_ddp.node.preflight.links import has_content

CLOSE_S = 5.0
# As `join_timeout` of the rendezvous: nodes that take longer could not train either.
START_S, START_AFTER_SETUP_S = 600.0, 3600.0
AGENTS_S = 60.0  # for the first agent, which has to import torch
NEEDED_BYTES = 100 << 20  # in the run folder, as long as the size of a checkpoint is not known


def examine_nodes(
    run: RunFolder,
    nodes: Sequence[str],
    commands: Sequence[Command],
    read_notice: Callable[[], str],
) -> dict[str, Any]:
    """Test all `nodes`, in the order of srun's tasks, by `commands`, whose processes end with the
    test; return the fields of the event `preflight`. A second test, with other partners, follows
    where the first has found a `DOUBTFUL` fault.

    `read_notice` returns '' until the attempt is asked to end, then the notice's source: the
    outcome is then not ok, and blames no node. Where Slurm can't start the task of a node, the test
    of all nodes ends early. The environment of the first command names the attempt. Printed lines
    that are no messages go to the attempt's ``preflight.log``.

    Raises OSError if the run's folder can't be read or written, or a command can't be started;
    UsageError for a broken job.json.
    """
    spec = JobSpec.from_json(run.job_json.read_bytes())
    env = AttemptEnv.from_env(commands[0].env)
    begin = time.monotonic()
    log = env.attempt_folder.path / "preflight.log"

    def test_nodes(first_reports: Reports | None) -> Reports:
        """Test all nodes once, and return their reports, as `_ask_and_close` does."""
        dialogue = Dialogue(nodes, commands, read_notice, log)
        first_s = start_limit(spec, env)
        return _ask_and_close(dialogue, spec, run, first_reports, first_s, env)

    try:
        reports = test_nodes(None)
        if has_doubt(reports):
            reports = test_nodes(reports)
        fields = outcome(reports)
    except NoticeError as error:
        fields = _fields_without_blame(f"ended early: {error}") | {"notice": str(error)}
    return {**fields, "seconds": round(time.monotonic() - begin, 1)}


def has_doubt(reports: Reports) -> bool:
    """Return whether a node has a `DOUBTFUL` fault, for which a second test is needed."""
    return any(DOUBTFUL & dict(report.faults).keys() for report in reports.values())


def _ask_and_close(
    dialogue: Dialogue,
    spec: JobSpec,
    run: RunFolder,
    first_reports: Reports | None,
    first_s: float,
    env: AttemptEnv,
) -> Reports:
    """Call `ask_questions`, with a new folder in the run; then end the dialogue, remove the folder,
    and return the reports. Where no second test follows, tell the nodes before whether they are
    fit; if they are, the attempt's file ``fit`` gets a word. SIGUSR1 has no effect from then on.

    `first_reports` are those of the first test in the second, in which nodes have other partners;
    what only one of the two has found becomes a note. `first_s` is as in `ask_questions`, `env` has
    the attempt. A LaunchError only ends the questions early; other errors of `ask_questions`
    are raised, and OSError where the folder can't be made.
    """
    folder = run.path / f".preflight-{secrets.token_hex(8)}"
    patience_s, again = CLOSE_S, first_reports is not None
    try:
        folder.mkdir(mode=0o700)
        with contextlib.suppress(LaunchError):
            ask_questions(dialogue, spec, run, folder, again, first_s, env.preflight_shell)
        if first_reports is not None:
            drop_unconfirmed(first_reports, dialogue.reports)
        if again or not has_doubt(dialogue.reports):
            is_fit = outcome(dialogue.reports)["ok"]
            if env.preflight_shell:
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # agents that know it may end at once
            if is_fit and env.preflight_shell:
                env.attempt_folder.fit.write_text("fit")  # for agents that the word does not reach
            dialogue.send(fit=is_fit)
    except NoticeError:
        patience_s = 0.5  # the attempt has little time left
        raise
    finally:
        dialogue.close(patience_s)
        shutil.rmtree(folder, ignore_errors=True)
    return dialogue.reports


def _fields_without_blame(why: str) -> dict[str, Any]:
    """Return the fields of the event, without ``seconds``, for a preflight that has failed for the
    reason `why`, which is no node's fault."""
    return {"ok": False, "bad_nodes": [], "hopeless": False, "why": why, "report": {}}


def start_limit(spec: JobSpec, env: AttemptEnv) -> float:
    """Return for how many seconds the driver waits for the first message of the nodes: as long as
    the rendezvous would wait, or half of the time that the job has left if that is shorter, but at
    least `CHECKS_S`. A node may first have to fetch a container, and the set-up lines of nodes
    (`spec.node_setup`) may copy data to it. `env` has the attempt and the end of its time."""
    end_time = read_seconds(env.attempt_folder.end_time) or env.end_time or math.inf
    longest_s = START_AFTER_SETUP_S if spec.node_setup else START_S
    return max(CHECKS_S, min(longest_s, (end_time - time.time()) / 2))


def ask_questions(
    dialogue: Dialogue,
    spec: JobSpec,
    run: RunFolder,
    folder: Path,
    again: bool,
    first_s: float = START_S,
    shell: int = 0,
) -> None:
    """Send the questions that `checks` answers to all nodes of a dialogue, and add to its `reports`
    the faults that only all answers together show.

    The nodes write files into `folder`; with `again` they have other partners. `first_s` is the
    limit in seconds for the nodes' first messages. Where torchrun's agents take part, `shell` is
    the process id of the batch script, else 0: it gets SIGUSR1 to start them, before the questions
    that need torch, which are asked only if no node has failed before. Raises as `Dialogue.wait`
    and `_needed_bytes`, OSError where the batch script is gone.
    """
    reports, secret = dialogue.reports, secrets.token_hex(16)
    with listen_on_any_port() as server:
        port = server.getsockname()[1]  # free on this node, and most likely on the others
    order = {"folder": str(folder), "secret": secret, "port": port, "again": again}
    dialogue.send(nodes=[*reports], **order, gpus=spec.gpu_count, needed=_needed_bytes(run))
    dialogue.wait("start", list(reports), first_s=first_s)
    fit = dialogue.wait("local", [node for node in reports if "start" in reports[node].stages])
    ports = {node: reports[node].contact["port"] for node in fit}
    missing = [node for node in reports if node not in ports]
    # Only what differs from the order: a question must not grow with the number of nodes.
    other_ports = {node: number for node, number in ports.items() if number != port}
    dialogue.send(missing=missing, ports=other_ports)
    fit = dialogue.wait("partners", fit)
    # The batch script is one more observer of the disk: of two nodes it shows which is cut off.
    unseen = [("the batch shell", node) for node in fit if not has_content(folder / node, secret)]
    blame_pairs(reports, "scratch", unseen)
    blame_pairs(reports, "link")
    if spec.gpu_count and spec.fabric != "ethernet":
        blame_fabric(reports)
    fit = [node for node in fit if not reports[node].faults]
    if not shell or len(fit) == len(reports):
        _ask_about_torch(dialogue, fit, spec, again, shell)


def _ask_about_torch(
    dialogue: Dialogue, nodes: Sequence[str], spec: JobSpec, again: bool, shell: int
) -> None:
    """Ask `nodes` for their torch and the speeds between them, and add the faults that the answers
    show. `again` and `shell` are as in `ask_questions`; so are the errors, but for that of
    `_needed_bytes`."""
    reports = dialogue.reports
    if shell:
        os.kill(shell, signal.SIGUSR1)
        # Slurm may start no step that shares GPUs or memory with one that runs.
        dialogue.wait("torch", nodes, first_s=AGENTS_S, late_is_fault=False)
    dialogue.send()  # now a node without an answer imports torch by itself
    fit = dialogue.wait("torch", nodes)
    blame_torch(reports)
    members = [node for node in fit if not reports[node].faults]
    if len(members) > 1:
        _ask_for_speeds(dialogue, members, spec, again)


def _ask_for_speeds(dialogue: Dialogue, members: Sequence[str], spec: JobSpec, again: bool) -> None:
    """Have the nodes `members` measure the speeds between them, and add the faults of nodes whose
    exchanges have failed or were slow; with `again` they have other partners. Raises as
    `Dialogue.wait`."""
    reports = dialogue.reports
    kinds = {reports[node].values["device"] or "cpu" for node in members}
    device = kinds.pop() if spec.gpu_count and len(kinds) == 1 else "cpu"
    host = reports[members[0]].contact  # of the store, on rank 0
    slack = strain(reports)
    limits = {"first": 1 + 2 * again, "timeout_s": slack * TIMEOUT_S}
    address = {"host": host["host"], "port": host["store_port"]}
    dialogue.send(members=members, device=device, **address, **limits)
    dialogue.wait("exchange", members, slack)
    blame_exchange(reports)
    blame_slow(reports)


def _needed_bytes(run: RunFolder) -> int:
    """Return how many bytes must be free for the run's folder: as many as the newest checkpoint
    has; `NEEDED_BYTES` without a checkpoint, and where its size can't be read. Raise OSError if the
    checkpoints can't be listed."""
    for path in published(run.checkpoints)[:1]:  # the newest, if there is one
        with contextlib.suppress(OSError, ValueError, KeyError):
            sizes = [facts["size"] for facts in read_manifest(path)["files"].values()]
            return int(sum(sizes))
    return NEEDED_BYTES


def record_outcome(run: RunFolder, attempt: int, fields: Mapping[str, Any]) -> bool:
    """Write the outcome of an attempt's preflight, the `fields` of `examine_nodes`, to the journal.
    Print the faults and notes, and that all nodes are fit if they are. Return whether the training
    can start."""
    run.journal("batch", attempt).write(PreflightEnded(**fields))
    summary = fields.get("summary") or {"texts": {}}
    for text, (count, node) in summary["texts"].items():
        more = f" and {count - 1} more" if count > 1 else ""
        say(f"preflight: {node}{more}: {text}")
    if fields["ok"]:
        count = summary["nodes"]
        are = "nodes are" if count > 1 else "node is"
        say(f"preflight: {count} {are} fit, after {fields['seconds']} s")
    return bool(fields["ok"])


def _leave(number: int, _: FrameType | None) -> None:
    """Exit with 1, without an outcome; the dialogue and its files end first. The signal `number`
    has no effect from now on."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(1)


def main(argv: list[str]) -> int:
    """Make the preflight of the attempt that the environment names, with `argv` as the command of
    its step; journal and print the outcome; return 0 if the training can start, else 1.

    Where the environment names no attempt, in an allocation, the next attempt is claimed. After a
    notice the code is 1: SIGTERM, SIGINT or SIGHUP, which this process handles from now on, or the
    attempt's file ``notice``. SIGUSR1 says that torchrun's agents, which take part, have ended: the
    process then exits with 1, as after an AgentLostError, and the attempt's records say why.
    HpcDdpErrors and OSErrors are printed, and journalled as the outcome. Raises KeyError without
    attempt and allocation, KeyError or ValueError for a damaged file of the attempt.
    """
    environ = dict(os.environ)
    signals: list[str] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: signals.append(signal.Signals(number).name))
    signal.signal(signal.SIGUSR1, _leave)
    run = AttemptEnv.from_env(environ).run_folder
    try:
        if variable("attempt") not in environ:  # a person has started this in an allocation
            names = slurm.expand_hosts(environ["SLURM_JOB_NODELIST"])
            new_attempt = run.claim_attempt({"nodes": names}, lambda _: False)
            environ[variable("attempt")] = str(new_attempt.number)
        spec = JobSpec.from_json(run.job_json.read_bytes())
        environ.setdefault(variable("fabric"), spec.fabric)
        attempt = AttemptEnv.from_env(environ).attempt_folder
        nodes = attempt.node_names
        commands = [Command(argv, environ)]
        fields = examine_nodes(
            run, nodes, commands, lambda: signals[0] if signals else read_word(attempt.notice)
        )
    except AgentLostError:
        return 1  # the attempt's records say why
    except (HpcDdpError, OSError) as error:  # no answer of Slurm, no srun, a full disk
        why = f"the preflight could not be made: {error}"
        fields = _fields_without_blame(why) | {"seconds": 0.0}
        say(f"preflight: {why}")
    return 0 if record_outcome(run, AttemptEnv.from_env(environ).attempt, fields) else 1
