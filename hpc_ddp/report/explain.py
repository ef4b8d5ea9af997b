"""What became of a run, in one paragraph for a person: what happened, where, why, what was lost,
and what to do. Pure: `hpc_ddp.report.evidence` gathers the facts.
"""

from __future__ import annotations

import re
import shlex
import textwrap
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_ddp.report.causes import SIGNALS, Cause, recognise
from hpc_ddp.report.evidence import Facts, Failure, gather, number, place_in, text_of
from hpc_ddp.report.reasons import in_words
from hpc_ddp.report.status import age
from hpc_ddp.run import goodput
from hpc_ddp.run.folder import RunFolder
from hpc_ddp.run.journal import Event, is_finished, last_event
from hpc_ddp.run.ranks import slow_rank

WIDTH = 100  # of the paragraph, in characters
QUIET_S = 600.0  # a running job that has said nothing for so long may hang


@dataclass(frozen=True)
class Explanation:
    """What became of a run.

    Attributes
    ----------
    kind
        one to three words for programs: ``finished``, ``running``, ``waiting``, ``preempted``,
        ``python error``, ``cuda out of memory`` …
    text, hint
        for people: a paragraph, and one thing to do ('' where there is nothing to do)
    node, rank
        where it happened, None where that is not known, or nowhere
    step, lost_steps, lost_s
        the last step that is known to be done; how many of the last attempt's steps no checkpoint
        has, and the seconds that they took
    """

    kind: str
    text: str
    hint: str = ""
    job_id: str | None = None
    attempt: int | None = None
    node: str | None = None
    rank: int | None = None
    step: int | None = None
    lost_steps: int | None = None
    lost_s: float | None = None
    tasks: Mapping[str, Explanation] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def explain_run(run: RunFolder) -> Explanation:
    """Read all that is known of a run, ask Slurm, and explain it."""
    return explain(gather(run))


def paragraph(found: Explanation) -> str:
    """Return an explanation as it is shown. A command in the hint can be copied from one line."""
    lines = textwrap.fill(found.text, WIDTH, break_long_words=False, break_on_hyphens=False)
    return f"{lines}\nhint: {found.hint}" if found.hint else lines


def explain(facts: Facts) -> Explanation:
    """Return what became of a run. The order of the questions matters: what is so for good,
    then what goes on now, then how it ended."""
    if facts.tasks:
        found = _array(facts)
    elif is_finished(list(facts.events)):
        found = _finished(facts)
    elif _is_over(facts):
        found = _ended(facts)
    elif facts.live or (facts.record and facts.record.state in _LIVE):
        found = _going_on(facts)
    elif facts.newest is None and not facts.of("submitted", "queued"):
        found = _rendered(facts)
    else:
        found = _ended(facts)
    if found.kind in ("waiting", "ending") and facts.newest is not None:
        last = _end(facts)
        found = replace(found, text=f"{found.text} Its last attempt {last.text}")
        if last.kind in _SILENT_KINDS:  # it would come again
            found = replace(found, hint=last.hint)
        elif last.kind == "preempted" and facts.record and facts.record.reason in _QUEUE:
            found = replace(found, hint="wait: it starts by itself")
    lost_steps, lost_s = _lost(facts)
    found = replace(
        found,
        job_id=facts.job_id,
        attempt=facts.newest,
        step=_last_step(facts),
        lost_steps=lost_steps,
        lost_s=lost_s,
    )
    of = "".join(f"It is a rerun of {text_of(event, 'of')}." for event in facts.of("rerun")[:1])
    text = [f"{_name(facts.path)} {found.text}", _before(facts), _loss(facts, found), of]
    return replace(found, text=" ".join(filter(None, text)))


def _name(path: Path) -> str:
    task = path.name.startswith("task-")
    run = path.parent if task else path
    of = f"Task {path.name.removeprefix('task-')} of run" if task else "Run"
    return f"{of} {run.parent.name} ({run.name})"


# --- what is so for good, and what goes on --------------------------------------------------

_LIVE = ("PENDING", "RUNNING", "CONFIGURING", "SUSPENDED", "COMPLETING", "REQUEUED", "STOPPED")
_QUEUE = ("Priority", "Resources")  # it just has to wait its turn
_GOES_ON = ("waiting", "running", "suspended", "ending")


def _is_over(facts: Facts) -> bool:
    """Nothing more is to come by itself, whatever Slurm may still show of the job."""
    verdict = facts.verdict
    if verdict is None:
        return facts.cancelled and not facts.live
    if text_of(verdict, "cause") == "superseded":
        return False
    # Nobody requeues those two: another attempt is made at once, or by the user.
    here = facts.spec.get("backend") in ("local", "salloc") and not facts.live
    return facts.cancelled or here or text_of(verdict, "action") != "requeue"


def _finished(facts: Facts) -> Explanation:
    step = _last_step(facts)
    steps = f" after {step} steps" if step is not None else ""
    took = age(facts.events[-1]["time"] - facts.events[0]["time"])
    text = f"is finished{steps}, in {_count(len(_ends(facts)), 'attempt')} and {took}."
    good = goodput.share(goodput.account(facts.events))
    if good is not None:
        text += f" Its goodput was {good:.0%}."
    export = f"python -m hpc_ddp.training.export {_path(facts)} model.safetensors"
    return Explanation("finished", text, export if facts.saved is not None else "")


def _rendered(facts: Facts) -> Explanation:
    text = "was rendered but never submitted: nothing has happened to it yet."
    return Explanation("rendered", text, f"sbatch {shlex.quote(str(facts.path / 'job.sbatch'))}")


def _array(facts: Facts) -> Explanation:
    """Sum an array up by its tasks, and tell in full of one that did not go well."""
    tasks = {name: explain(task) for name, task in facts.tasks.items()}
    kinds = Counter(task.kind for task in tasks.values())
    sums = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    text = f"is an array, of which {_count(len(tasks), 'task')} have begun: {sums}."
    bad = [name for name, task in tasks.items() if task.kind not in ("finished", *_GOES_ON)]
    if facts.record and facts.record.state == "PENDING":
        words, _ = in_words(facts.record.reason, facts.job_id or "")
        text += f" Others wait: {words}."
    if not bad:
        return Explanation("array", text, "", tasks=tasks)
    task = tasks[bad[0]]
    if bad[1:]:
        text += f" Of the others see: hpc-ddp explain {_path(facts)}/task-{bad[1]}."
    return Explanation("array", f"{text} {task.text}", task.hint, tasks=tasks)


def _going_on(facts: Facts) -> Explanation:
    """Explain a job that waits, runs, or is on its way to one of both."""
    record = facts.record
    state = record.state if record else "RUNNING"
    if record and state in ("PENDING", "REQUEUED"):
        words, hint = in_words(record.reason, facts.job_id or "")
        text = f"waits in the queue as job {facts.job_id}: {words} ({record.reason or 'None'})."
        if record.start_time and record.start_time > facts.now:
            when = time.strftime("%a %H:%M", time.localtime(record.start_time))
            text += f" Slurm expects to start it on {when}."
        return Explanation("waiting", text, hint)
    if record and state in ("SUSPENDED", "STOPPED"):
        text = f"is suspended on {record.nodes}: Slurm has stopped it, and lets it go on later."
        return Explanation("suspended", text, "wait")
    if facts.verdict or state == "COMPLETING":
        return Explanation("ending", "is just ending.", f"hpc-ddp explain {_path(facts)}")
    return _running(facts, record.nodes if record else "this machine")


def _running(facts: Facts, where: str) -> Explanation:
    events = [e for e in facts.events if e["attempt"] == facts.newest]
    started = last_event(events, "started")
    if started is None:
        return Explanation("running", f"has just been started on {where}.", "wait")
    hint = "" if facts.by_hand else f"hpc-ddp logs -f {_path(facts)}"
    text = f"has been running on {where} for {age(max(0.0, facts.now - started['time']))}"
    if not last_event(events, "first_step"):
        known = "has not done its first step yet" if facts.is_ours else "has told of no step yet"
        return Explanation("running", f"{text}, and {known}.", hint)
    metrics = last_event(events, "metrics") or {}
    total, loss = number(metrics, "total_steps"), metrics.get("loss")
    text += f", and is at step {_last_step(facts)}" + (f" of {total}" if total else "")
    text += f" (loss {loss:.4g})." if isinstance(loss, (int, float)) else "."
    saved, failed = last_event(list(facts.events), "checkpoint"), last_event(events, "save_failed")
    if failed and (not saved or failed["time"] > saved["time"]):
        error = text_of(failed, "error")
        found = recognise(error)
        return Explanation(
            "running",
            f"{text} ITS LAST SAVE FAILED ({_short(error)}); the third in a row ends it.",
            _hint(facts, found[0].hint if found else "df -h {path}", {}),
        )
    if saved:
        text += f" Its newest checkpoint is of step {number(saved, 'step')}, and"
        text += f" {age(max(0.0, facts.now - saved['time']))} old."
    else:
        text += " It has saved nothing yet."
    good = goodput.share(goodput.account(facts.events, facts.now))
    if good is not None:
        text += f" Goodput {good:.0%}."
    if slow := slow_rank(events):
        text += f" But {slow}: the others wait for it."
    quiet_s = facts.now - events[-1]["time"]
    if quiet_s > QUIET_S:
        text += f" But nothing was heard of it for {age(quiet_s)}: it may hang."
    return Explanation("running", text, hint)


# --- how it ended --------------------------------------------------------------------------

_BY_STATE = {  # what Slurm's last state of a job without a verdict means
    "TIMEOUT": "time limit",
    "DEADLINE": "time limit",
    "NODE_FAIL": "node lost",
    "BOOT_FAIL": "node lost",
    "PREEMPTED": "preempted",
    "CANCELLED": "cancelled",
    "OUT_OF_MEMORY": "host out of memory",
}


def _ended(facts: Facts) -> Explanation:
    """Explain a run that does not go on by itself now, by the end of its newest attempt."""
    verdict = facts.verdict
    if facts.cancelled and verdict is None:
        when = " before it began" if facts.newest is None else _at(facts)
        return Explanation("cancelled", f"was cancelled{when}.", facts.again)
    found = _end(facts)
    goes_on = verdict is not None and text_of(verdict, "action") == "requeue"
    in_queue = goes_on and facts.record is not None and facts.record.state == "CANCELLED"
    if found.kind != "cancelled" and (facts.cancelled or in_queue) and not _had_ended(facts):
        text = f"was cancelled. Its last attempt {found.text}"
        return replace(found, kind="cancelled", text=text, hint=facts.again)
    if goes_on:
        text = f"{found.text} It can go on, but nobody has requeued it."
        return replace(found, text=text, hint=facts.again)
    why = text_of(verdict or {}, "why")
    told = found.kind in _GIVEN_UP or _is_hopeless(verdict or {})
    if verdict and text_of(verdict, "action") == "give up" and not told:
        found = replace(found, text=f"{found.text} It was given up: {why.rpartition('; ')[2]}.")
    return found


def _had_ended(facts: Facts) -> bool:
    """Tell whether it had been given up already, and was not submitted again since."""
    last = last_event(list(facts.events), "submitted", "verdict")
    return last is not None and text_of(last, "action") == "give up"


_GIVEN_UP = ("no progress", "unfinished", "budget spent")  # they say so themselves


def _is_hopeless(verdict: Event) -> bool:
    """Tell whether a preflight has found what would be the same on other nodes."""
    why = text_of(verdict, "why")
    return text_of(verdict, "cause") == "failed" and why.startswith("preflight: ")


def _end(facts: Facts) -> Explanation:
    """Explain the end of the newest attempt; the text is what a sentence on it goes on with."""
    verdict = facts.verdict or {}
    state = facts.record.state if facts.record else ""
    cause = text_of(verdict, "cause") or _BY_STATE.get(state, "")
    if "without a newer checkpoint" in text_of(verdict, "why"):
        return _no_progress(facts, cause)
    if cause == "bad node" or _is_hopeless(verdict):
        return _unfit(facts, verdict)
    if cause == "budget":
        text = f"was not started again: {text_of(verdict, 'why')}."
        return Explanation("budget spent", text, f"{facts.again} --budget-gpu-hours HOURS")
    if cause == "failed" and "node" not in verdict:
        text = "left its training loop, but the script ended without run.finish()."
        return Explanation("unfinished", text, f"call run.finish() at its end; then {facts.again}")
    stopped = facts.of("stopped", attempt=facts.newest)
    if facts.by_hand and not verdict and stopped and not facts.failure:
        source = text_of(stopped[-1], "source")
        text = f"was asked to stop{_at(facts)}{source and f' ({source})'}, and did."
        return Explanation("stopped", text, facts.again)
    if facts.failure and cause in ("failed", "", "host out of memory"):
        return _failed(facts, facts.failure)
    if cause == "time limit":
        return _time_limit(facts)
    if cause in _PLAIN:
        kind, words = _PLAIN[cause]
        return Explanation(kind, words.format(at=_at(facts)), facts.again)
    return _silent(facts, cause)


_PLAIN = {
    "preempted": ("preempted", "was preempted{at}: a job of higher priority took its nodes."),
    "notice": ("stopped", "was asked to stop{at}, and did."),
    "cancelled": ("cancelled", "was cancelled{at}."),
}


def _unfit(facts: Facts, verdict: Event) -> Explanation:
    found, kind, hint = text_of(verdict, "why").removeprefix("preflight: "), "bad node", facts.again
    if _is_hopeless(verdict):
        known = recognise(found.removesuffix(" (the same on all nodes)"))
        if known:
            kind, hint = known[0].kind, _hint(facts, known[0].hint, known[1])
    elif text_of(verdict, "action") == "give up":  # what follows is told by the caller
        found = found.rpartition("; ")[0]
    text = f"began no training, since its preflight failed: {found}."
    return Explanation(kind, text, hint)


def _time_limit(facts: Facts) -> Explanation:
    limit = facts.spec.get("time")
    limit = f"{limit} min" if str(limit).isdigit() else limit
    text = f"ran into its time limit{f' of {limit}' if limit else ''}{_at(facts)}."
    if "starts from its beginning" in text_of(facts.verdict or {}, "why"):
        text += " It began anew in each attempt, and told of no step."
        return Explanation("time limit", text, f"a longer --time; or save: {_MODULE}")
    return Explanation("time limit", text, facts.again)


_MODULE = "hpc_ddp.training in the script (docs/adopt)"


def _no_progress(facts: Facts, cause: str) -> Explanation:
    text = "was given up: two attempts in a row have ended without a newer checkpoint."
    if cause == "failed" and facts.failure:
        last = _failed(facts, facts.failure)
        return replace(last, kind="no progress", text=f"{text} The last one {last.text}")
    hint = f"save more often, start(save_every=…), or more --time; then {facts.again}"
    return Explanation("no progress", f"{text} The last one {_time_limit(facts).text}", hint)


def _failed(facts: Facts, failure: Failure) -> Explanation:
    """Explain a failure of a rank, or of torchrun itself."""
    rank = failure.rank
    who = "torchrun" if rank is None else f"rank {rank}"
    who += f" on {failure.node}" if failure.node else ""
    logs = _hint(facts, "{logs}", {}, rank)
    error = failure.error
    found = recognise(error) if error else _in_logs(facts)

    def told(kind: str, text: str, hint: str) -> Explanation:
        return Explanation(kind, text, hint, node=failure.node or None, rank=rank)

    if found:
        return told(*_known(facts, *found, who=who))
    said = _SAID.search(facts.rank_log)
    if said and (not error or said["text"][:60] in error):
        text = f"failed{_at(facts)}: {who} said: {said['text']}."
        return told("script error", text, said["hint"] or logs)
    if error:
        place = place_in(facts.rank_log.rpartition("Traceback (most recent call last)")[2])
        text = f"failed{_at(facts)}: {who} raised {_short(error)}{place and f', in {place}'}."
        return told("python error", text, f"mend it, then {facts.again}")
    if failure.code < 0:
        words = SIGNALS.get(-failure.code, f"it was ended by signal {-failure.code}")
        return told("killed", f"failed{_at(facts)}: {who} died; {words}.", logs)
    text = f"failed{_at(facts)}: {who} ended with exit code {failure.code}."
    return told("exit code", text + _last_line(facts.rank_log), logs)


_SAID = re.compile(r"^(?:error|\S+\.py: error): (?P<text>.+)(\nhint: (?P<hint>.+))?", re.M)


def _in_logs(facts: Facts) -> tuple[Cause, dict[str, str]] | None:
    """Look for the cause of a death without an error in what was printed last."""
    failure = facts.failure
    is_rank = failure is not None and failure.rank is not None
    return recognise((facts.rank_log if is_rank else facts.agent_log)[-8000:])


def _known(facts: Facts, row: Cause, named: dict[str, str], who: str) -> tuple[str, str, str]:
    """Return kind, text and hint of a failure that the table knows."""
    words = row.words.format(**named)
    error = facts.failure.error if facts.failure else ""
    if row.kind == "hang":
        text = f"hung ({who}): {words}.{_stood(facts)}"
    else:
        text = f"failed{_at(facts)} ({who}): {words}."
        text += f' It said: "{_short(error)}".' if error and "by the kernel" not in error else ""
    rank = facts.failure.rank if facts.failure else None
    if "waited" in row.words and facts.ended:
        text += f" Until then {_ranks(facts.ended)} had said nothing."
        rank = facts.ended[0]
    if row.kind in ("communication", "hang"):
        text += _fabrics(facts)
    return row.kind, text, _hint(facts, row.hint, named, rank)


def _ranks(ranks: Sequence[int]) -> str:
    told = ", ".join(map(str, ranks[:8])) + (" and others" if ranks[8:] else "")
    return f"{'ranks' if ranks[1:] else 'rank'} {told}"


def _stood(facts: Facts) -> str:
    """Return where the ranks stood as they hung, by place."""
    places: dict[str, list[int]] = {}
    for rank, place in sorted(facts.stands.items()):
        places.setdefault(place, []).append(rank)
    told = [f"{_ranks(ranks)} at {place}" for place, ranks in places.items()]
    return f" There stood {'; '.join(told[:4])}." if told else ""


def _fabrics(facts: Facts) -> str:
    """Return which nodes had another interconnect than most, where NCCL needs the same of all."""
    told = facts.of("fabric", attempt=facts.newest)
    seen = {text_of(event, "node"): text_of(event, "name") for event in told}
    if len(set(seen.values())) < 2:
        return ""
    usual = Counter(filter(None, seen.values())).most_common(1)[0][0]
    odd = [f"{node} ({name or 'none'})" for node, name in seen.items() if name != usual]
    more = f" and {len(odd) - 3} more" if odd[3:] else ""
    return f" The interconnect was {usual}, but not on {', '.join(odd[:3])}{more}."


def _silent(facts: Facts, cause: str) -> Explanation:
    """Explain an end that no rank has told of, by what the job printed and by what Slurm says."""
    verdict, record = facts.verdict or {}, facts.record
    log = _last_part(facts)
    found = recognise(log) or recognise(facts.agent_log)
    stepped = facts.of("first_step", attempt=facts.newest)
    if found and found[0].kind in _SILENT_KINDS:
        row, named = found
        begin = f"ended{_at(facts)}" if stepped else "did not come to life"
        text = f"{begin}: {row.words.format(**named)}."
        return Explanation(row.kind, text, _hint(facts, row.hint, named))
    if cause == "host out of memory":
        text = f"ended{_at(facts)}: Slurm says that it used more memory than it may."
        return Explanation(cause, text, "more --mem, or fewer DataLoader workers")
    logs = f"{_logs(facts)}; then {facts.again}"
    if cause in ("node lost", "superseded"):
        quiet = text_of(verdict, "why") or "so Slurm says"
        given_up = text_of(verdict, "action") == "give up"
        text = f"lost a node{_at(facts)} ({quiet})."
        return Explanation("node lost", text, logs if given_up else facts.again)
    if record and record.exit_code.endswith(":53"):
        text = "never began: on the node Slurm could not open its output file or enter its folder."
        hint = "put the runs on a disk that the nodes see: --runs-dir"
        return Explanation("bad environment", text, hint)
    if record:
        state = f" Slurm's word for job {facts.job_id} is {record.state} ({record.exit_code})."
    else:
        state = f" Of job {facts.job_id}: {facts.refusal}." if facts.refusal else ""
    begun = "ended" if facts.newest is not None else "never began"
    text = f"{begun}{_at(facts)}, and nothing tells why.{state}{_last_line(log)}"
    return Explanation("lost", text, logs)


_SILENT_KINDS = (
    *("bad environment", "host out of memory", "disk full", "disk read-only", "disk failed"),
)


# --- what all of them tell -----------------------------------------------------------------

_ENDS = {  # verdict's cause: how it is summed up
    "preempted": "was preempted",
    "time limit": "ran into its time limit",
    "notice": "was asked to stop",
    "failed": "failed",
    "cancelled": "was cancelled",
    "finished": "finished",
    "superseded": "was requeued by Slurm itself",
    "node lost": "lost a node",
    "bad node": "met a bad node",
}
_NO_WORD = "ended without a word"


def _ends(facts: Facts) -> dict[int, str]:
    """Return how each attempt ended, by number."""
    hands = {e["attempt"] for e in facts.of("started") if e.get("backend") == "local"}
    told = [e for e in facts.of("stopped", "failed") if e["attempt"] in hands]
    found = {e["attempt"]: _ENDS["notice" if e["event"] == "stopped" else "failed"] for e in told}
    for e in facts.of("verdict"):
        found[e["attempt"]] = _ENDS.get(text_of(e, "cause"), _NO_WORD)
    for event in facts.of("verdict"):
        # Where nothing came to life at all, the node may be well.
        if event.get("cause") == "node lost" and event.get("step") is None:
            found[event["attempt"]] = _NO_WORD
    numbers = {*facts.attempts, *found, *(e["attempt"] for e in facts.of("started"))}
    return {n: found.get(n, _NO_WORD) for n in sorted(numbers)}


def _before(facts: Facts) -> str:
    """Return how the attempts before the newest have ended."""
    ends = [end for n, end in _ends(facts).items() if n != facts.newest]
    sums = [f"{end}{_times(count)}" for end, count in Counter(ends).items()]
    return f"Before that it {' and '.join(sums)}." if sums else ""


def _lost(facts: Facts) -> tuple[int | None, float | None]:
    """Return the newest attempt's steps that no checkpoint has, and how long they took."""
    events = [e for e in facts.events if e["attempt"] == facts.newest]
    begun = last_event(events, "training") or last_event(events, "first_step")
    step = _last_step(facts)
    if begun is None or step is None:
        return None, None
    if last_event(events, "stopped", "finished"):  # both come when all is saved
        return 0, 0.0
    since = begun["time"]
    for saved in (e for e in events if e["event"] == "checkpoint"):
        since = saved["time"] - (saved.get("write_s") or 0.0)  # its state is from before
    done = [e for e in events if e["event"] in _DONE]  # less what is only known after a hang
    last = [e["time"] for e in done if not text_of(e, "error").startswith("HangError")]
    return max(0, step - (facts.saved or 0)), max(0.0, max(last, default=since) - since)


def _loss(facts: Facts, found: Explanation) -> str:
    if found.kind in ("finished", "rendered", "array", "running", "suspended"):
        return ""
    if found.lost_steps is None:
        if facts.newest is None or facts.is_ours or found.kind not in _NO_FAULT:
            return ""
        return "Nothing tells how far it had come: it starts over, or from its own snapshot."
    if not found.lost_steps:
        return f"Nothing is lost: step {found.step} is saved." if found.step else ""
    lost_s = found.lost_s or 0.0
    took = age(lost_s) if lost_s >= 9.95 else f"{lost_s:.1f} s"
    steps = f"{_count(found.lost_steps, 'step')} ({took})"
    if facts.saved is None:
        return f"Nothing had been saved: {steps} are lost."
    return f"The newest checkpoint is of step {facts.saved}: {steps} are to be done again."


_NO_FAULT = ("preempted", "time limit", "stopped", "node lost", "waiting", "killed")

_DONE = ("first_step", "metrics", "checkpoint", "stopped", "finished", "failed", "restored")


def _last_step(facts: Facts) -> int | None:
    """Return the last step that is known to be done, in the newest attempt that did any."""
    steps = (number(e, "step") for e in reversed(facts.events) if e["event"] in _DONE)
    return next((step for step in steps if step is not None), None)


def _at(facts: Facts) -> str:
    """Return `` at step n``, or that it was before the first one."""
    if not facts.is_ours or facts.newest is None:
        return ""
    if not facts.of("first_step", attempt=facts.newest):
        return " before its first step"
    return f" at step {_last_step(facts)}"


def _last_part(facts: Facts) -> str:
    """Return what the job printed since the verdict on the attempt before the newest."""
    before = f"hpc-ddp: attempt {(facts.newest or 0) - 1}: "
    _, found, after = facts.job_log.rpartition(before)
    return after.partition("\n")[2] if found else facts.job_log


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return f' The last that it printed: "{_short(lines[-1])}".' if lines else ""


def _hint(facts: Facts, hint: str, named: Mapping[str, str], rank: int | None = None) -> str:
    """Fill in a hint; `rank` is the one whose log is worth a look."""
    where = "" if rank is None or facts.by_hand else f" --rank {rank} --attempt {facts.newest}"
    known = {
        "again": facts.again,
        "path": _path(facts),
        "python": str(facts.spec.get("python", "python3")),
        "logs": f"{_logs(facts)}{where}",
    }
    return hint.format(**{**named, **known})


def _logs(facts: Facts) -> str:
    if facts.by_hand:
        return "see what it printed, where it was started"
    return f"hpc-ddp logs {_path(facts)}"


def _path(facts: Facts) -> str:
    return shlex.quote(str(facts.path))


def _short(text: str) -> str:
    return text if len(text) <= 240 else f"{text[:240]}…"


def _times(count: int) -> str:
    return {1: " once", 2: " twice"}.get(count, f" {count} times")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
