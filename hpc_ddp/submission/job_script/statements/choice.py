"""The launch that is the training, among those of a job script."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpc_ddp.submission.job_script.bash import syntax
from hpc_ddp.submission.job_script.conversion import STARTS_PYTHON, TAKEN, Conversion
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.statements.open_commands import leave_empty
from hpc_ddp.submission.job_script.statements.reader import Reader
from hpc_ddp.submission.job_script.statements.statement import Statement

_TRAINS = re.compile(
    r"(?:^|[_/.-])(?:pre|re)?train(?:er|ing)?(?![a-z])|fine[_-]?tun"
    r"|(?:^|[_/.-])(?:sft|dpo|ddp|main|run)(?![a-z])", re.I
)  # fmt: skip
# Options of torchrun by which its nodes meet.
_MEETS = {
    *("nnodes", "nnode", "node-rank", "rdzv-endpoint", "rdzv-backend", "rdzv-id", "rdzv-conf"),
    *("master-addr", "master-port", "hostfile", "num-nodes", "world-size", "base-rank"),
}
_TESTS = re.compile(r"eval|test|infer|predict|bench|plot", re.I)
_PREPARES = re.compile(
    r"(?:^|[_/.-])(?:prep|download|data|convert|tokeni|extract|split|cache|build|setup|install|check|clean"
    r"|copy|stage|unzip|fetch)", re.I
)  # fmt: skip


def choose_launch(reader: Reader, result: Conversion) -> tuple[Launch | None, int]:
    """Return the launch that is the training, and the index of its statement.

    It is the first of the launches that weigh most, on all nodes if there is one, but for
    preparations; None where there is none, or where a step starts it on fewer nodes than the job
    has. Without a launch the index is that of a statement which may have one, else the number of
    statements.

    Launches before one on all nodes that weigh less, are on fewer nodes or prepare it, and checks
    of each node, become plain commands (their `launch` is None). All others get `lost`. `result`
    gets notes.
    """
    statements, nodes = reader.statements, reader.scope.numbers.get("SLURM_NNODES", 1)
    _drop_node_checks(statements)
    _join_first_node(reader)
    statements = reader.statements
    launches = [(i, s, s.launch) for i, s in enumerate(statements) if s.launch and not s.lost]
    if not launches:
        result.note(0, "no launch of a training was found: name the script with script = …")
        lost = (i for i, s in enumerate(statements) if "launch" in s.lost)
        return None, next(lost, len(statements))
    best = max(launch.weight for _, _, launch in launches)
    same = [entry for entry in launches if entry[2].weight == best]
    partial = [entry for entry in same if _is_partial(entry[2], nodes)]
    # One on the first node and others elsewhere, each with words of its own, are no training.
    is_split = any(launch.node_words for _, _, launch in partial)
    complete = [] if is_split else [entry for entry in same if entry not in partial]
    candidates = complete or same
    first = _count_preparations([launch for _, _, launch in candidates])
    start = candidates[first][1]  # in the text of one bash -c the last one counts
    at, chosen, training = [
        entry for entry in candidates
        if entry[1] is start or (entry[1].in_task and entry[1].text == start.text)
    ][-1]  # fmt: skip
    for index, statement, launch in launches:
        entry = (index, statement, launch)
        is_preparation = entry not in complete or entry in candidates[:first]
        if index < at and complete and is_preparation:
            _make_plain(statement)
        elif statement is not chosen:
            statement.lost = "a second launch: a job has one; submit this one as its own job"
    if training.in_loop and training.kind == "torchrun" and not _MEETS & training.options.keys():
        chosen.lost = "a training of its own on each node: hpc-ddp sweep, or a job for each"
        return None, at
    if chosen.output:
        text = f"its output is in the run's log, not in {chosen.output}: hpc-ddp logs"
        result.note(chosen.lines[0], text)
    if text := _fewer_nodes(training, nodes):
        if training.step:
            chosen.lost = f"{text}: submit it as a job of its own: --nodes N"
            return None, at
        result.note(chosen.lines[0], f"{text}: hpc-ddp starts it on all")
    leave_empty(training, statements, reader.open_commands)
    return training, at


def _count_preparations(launches: Sequence[Launch]) -> int:
    """Return how many of the first `launches` prepare a training, by their names; 0 where none of
    the others trains by its name."""
    count = next((i for i, launch in enumerate(launches) if not _prepares(launch)), 0)
    return count if any(map(_trains, launches[count:])) else 0


def _fewer_nodes(training: Launch, nodes: int) -> str:
    """Return a text that says on how many of the job's `nodes` a launch is; '' if on all."""
    count = training.nodes or (0 if training.step else 1)
    is_on_fewer = 0 < count < nodes and not training.in_loop
    return f"a launch on {count} of {nodes} nodes" if is_on_fewer else ""


def _drop_node_checks(statements: Sequence[Statement]) -> None:
    """Make plain commands of launches in a loop over the nodes, except the surest, before a line
    that starts Python: they check each node before the training."""
    starts = [i for i, s in enumerate(statements) if re.match(STARTS_PYTHON, s.text, re.S)]
    for statement in statements[: max(starts, default=0)]:
        launch = None if statement.lost else statement.launch
        if launch and launch.in_loop and launch.weight < 3:
            _make_plain(statement)


def _join_first_node(reader: Reader) -> None:
    """Remove a launch on one node that a loop over the nodes makes as well: it is the first node's
    part of the training, and the loop starts the others. So is a pause between both."""
    launches = [(s, s.launch) for s in reader.statements if s.launch and not s.lost]
    for statement, launch in launches:
        same = [pair for pair in launches if _command_of(pair[1]) == _command_of(launch)]
        of_nodes = [s for s, candidate in same if candidate.in_loop]
        is_on_one = launch.nodes == 1 or not launch.step
        if launch.in_loop or not (is_on_one and of_nodes):
            continue
        at = reader.statements.index(statement)
        between = reader.statements[at : reader.statements.index(of_nodes[0])]
        if any(part.name for part in between) or (between and not statement.text.endswith(" &")):
            continue  # the others get other variables, or start behind it
        for one in [statement, *(s for s in between if s.first == "sleep")]:
            for line in range(one.lines[0], one.lines[1] + 1):
                reader.resolved[line] = TAKEN, "the first node's launch: hpc-ddp starts all nodes"
            reader.statements.remove(one)
        if not between:  # it was the last one, and was waited for
            of_nodes[0].text = of_nodes[0].text.removesuffix(" &")


def _make_plain(statement: Statement) -> None:
    """Make a statement's launch a plain command, with the list or condition around it; one in a
    function has the words that it is called with."""
    statement.launch, statement.text = None, statement.around or statement.text
    if syntax.uses_arguments(statement.text):
        statement.text = " ".join(word.as_bash() for word in statement.words)


def _trains(launch: Launch) -> bool:
    """Return whether the name of a launch's program says that it trains."""
    name = launch.program.text if launch.program else ""
    return bool(_TRAINS.search(name)) and not (_TESTS.search(name) or _PREPARES.search(name))


def _prepares(launch: Launch) -> bool:
    """Return whether the name of a launch's program says that it prepares a training."""
    return bool(launch.program and _PREPARES.search(launch.program.text))


def _command_of(launch: Launch) -> tuple[str, ...]:
    """Return the launcher's kind, its number of workers, its variables, and the words of the
    program that it starts."""
    words = [*launch.settings.get("module", ()), launch.program, *launch.args]
    variables = (f"{name}={word.text}" for name, word in sorted(launch.env.items()))
    return launch.kind, str(launch.workers), *variables, *(word.text for word in words if word)


def has_launch(statements: Sequence[Statement]) -> bool:
    """Return whether a launch other than plain Python is among the statements, or may be."""
    return any((s.launch and s.launch.weight > 1) or "launch" in s.lost for s in statements)


def _is_partial(launch: Launch, nodes: int) -> bool:
    """Return whether a launch is on fewer than the job's `nodes`, and in no loop over them."""
    count = launch.nodes or (launch.tasks if not launch.kind else None) or nodes
    return count < nodes and not launch.in_loop
