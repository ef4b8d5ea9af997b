"""Which launch of a job script is the training, and what becomes of the other launches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from hpc_ddp.submission.job_script.bash.values import Counted
from hpc_ddp.submission.job_script.conversion import TAKEN, Conversion
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.launchers.program_names import (
    PREPARES,
    TESTS,
    TRAINS,
    follows_training,
    only_ends_run,
    prepares_training,
    program_name,
)
from hpc_ddp.submission.job_script.statements.open_commands import leave_empty
from hpc_ddp.submission.job_script.statements.reader import Reader
from hpc_ddp.submission.job_script.statements.rules import ENDED, FINALLY, PRINTS, STARTS_PYTHON
from hpc_ddp.submission.job_script.statements.statement import Statement, calls_function, names_file

# Options of torchrun by which its nodes meet.
_MEETS = {
    *("nnodes", "nnode", "node-rank", "rdzv-endpoint", "rdzv-backend", "rdzv-id", "rdzv-conf"),
    *("master-addr", "master-port", "hostfile", "num-nodes", "world-size", "base-rank"),
}


class LaunchEntry(NamedTuple):
    """A launch that the training may be, with its statement and that one's index (`position`)."""

    position: int
    statement: Statement
    launch: Launch


def choose_launch(reader: Reader, result: Conversion) -> tuple[Launch | None, int]:
    """Return the launch that is the training, and the index of its statement. Change the statements
    of `reader`, and add notes to `result`.

    The training is the first of the launches with the highest weight that prepare nothing; if some
    of them are on all nodes, the first of these. The result is None and an index where a step
    starts it on fewer nodes than the job has, or each node would train for itself: then its
    statement gets `lost`. Without any launch it is None, and the index of a lost statement that may
    have one, else the number of statements.

    Launches in front of the training become plain commands (`launch` is None) if they have less
    weight, are on fewer nodes or prepare it; so do checks of each node. Other launches get `lost`.
    A first node's part of the training is removed. Variables that hold the training's words are
    left empty (`leave_empty`).
    """
    nodes = reader.scope.numbers.get("SLURM_NNODES", 1)
    _make_node_checks_plain(reader.statements)
    _remove_launch_of_first_node(reader)
    statements = reader.statements
    launches = [
        LaunchEntry(index, s, s.launch)
        for index, s in enumerate(statements)
        if s.launch and not s.lost
    ]
    if not launches:
        result.note(0, "no launch of a training was found: name the script with script = …")
        lost = (i for i, s in enumerate(statements) if "launch" in s.lost)
        return None, next(lost, len(statements))
    at, chosen, training = _set_others_aside(launches, nodes)
    _keep_choices_of_steps(statements[:at], training, nodes)
    _join_other_calls(statements, chosen)
    at = next(index for index, statement in enumerate(statements) if statement is chosen)
    early = [
        entry for entry in launches if not (entry.statement.launch or entry.statement.limit.test)
    ]
    for statement in (entry.statement for entry in early if _trains(entry.launch)):
        reason = "it may be a training of its own, and runs before each attempt"
        result.note(statement.lines[0], f"{reason}: submit it as a job of its own")
    if training.in_loop and training.kind == "torchrun" and not _MEETS & training.options.keys():
        chosen.lost = "a training of its own on each node: hpc-ddp sweep, or a job for each"
        return None, at
    output, _ = result.values.get("output", ("", 0))  # which has a link to the log
    files = dict.fromkeys((chosen.output, *training.outputs))  # each once
    files = {name: None for name in files if name not in ("", output)}
    readers = _find_readers(reader.statements[at + 1 :], [*files])
    if readers and (link := _link_to_log(chosen, [*readers])):
        reader.statements.insert(at, link)
        result.note(chosen.lines[0], "lines read its output: the file is a link to the run's log")
        at += 1
    else:
        for name, line in readers.items():
            result.note(line, f"nothing writes {name}: $HPC_DDP_RUN/logs/slurm.out has the output")
        text = f"its output is in the run's log, not in {' and '.join(files)}: hpc-ddp logs"
        result.notes += [(chosen.lines[0], text)] * bool(files)
    behind = statements[statements.index(chosen) + 1 :]
    if chosen.in_background and not any(re.match(r"wait\b", s.text) for s in behind):
        text = "nothing waits for it, so that the script's job would end at once: hpc-ddp waits"
        result.note(chosen.lines[0], text)
    if text := _describe_fewer_nodes(training, nodes):
        if training.step:
            chosen.lost = f"{text}: submit it as a job of its own: --nodes N"
            return None, at
        if "no-python" in training.settings:
            chosen.lost = f"it may be the launch, {text.removeprefix('a launch ')}: script = …"
            return None, at
        if training.nodes:
            result.values["nodes"] = training.nodes, chosen.lines[0]
        kind = f"nodes = {training.nodes}" if training.nodes else "hpc-ddp starts it on all"
        result.note(chosen.lines[0], f"{text}: {kind}")
    leave_empty(training, statements, reader.open_commands)
    return training, at


def _keep_choices_of_steps(before: Sequence[Statement], training: Launch, nodes: int) -> None:
    """Take back `lost` of each condition and loop `before` the `training`, on all `nodes`, all of
    whose launches prepare it, or weigh less and do not train by their names: bash decides."""
    for statement in (s for s in before if s.choices and not _is_partial(training, nodes)):
        launches = (launch for launch in statement.choices if not prepares_training(launch))
        if not any(_trains(step) or step.weight >= training.weight for step in launches):
            statement.lost = ""


def _join_other_calls(statements: list[Statement], training: Statement) -> None:
    """Replace, in `statements`, those of each other call of the function whose body has the
    `training` by one statement, the call, if the launch in them is lost: the call is lost for the
    same reason."""
    name = training.call.text.split()[0] if training.call else ""
    launches = [s for s in statements if s.call and s.launch and s.lost]
    for statement in (s for s in launches if s.call is not training.call):
        call = statement.call
        body = [s for s in statements if s.call is call]
        if call and body and call.text.split()[0] == name:
            call.shells = body[0].shells
            call.lost, call.sets = statement.lost, {n for s in body for n in (s.name, *s.sets) if n}
            at = next(index for index, s in enumerate(statements) if s.call is call)
            statements[:] = [s for s in statements if s.call is not call]
            statements.insert(at, call)


def _find_readers(statements: Sequence[Statement], files: Sequence[str]) -> dict[str, int]:
    """Return the line of the first of `statements`, those behind the launch, that names one of the
    `files` which the launch writes, and does more than print, by the file."""
    readers = dict[str, int]()
    for statement in statements:
        if not (statement.in_task or PRINTS.match(statement.text)):
            for file in files:
                name = re.sub(r"\$\{(\w+)\}", r"$\1", file.strip("\"'"))
                if names_file(statement.text, name):
                    readers.setdefault(file, statement.lines[0])
    return readers


def _link_to_log(launch: Statement, files: Sequence[str]) -> Statement | None:
    """Return a line before the `launch` that makes the `files` links to the run's log. None where a
    task makes one, where the launch adds to it, or where its name has other code than variables."""
    adds = re.search(
        r">>|\btee\s+(-a|--append)", "\n".join(command.text for command in launch.enclosing)
    )
    if adds or launch.in_task or not all(re.fullmatch(r'("?)[\w./${}:-]+\1', f) for f in files):
        return None
    lines = (f'ln -sf "$HPC_DDP_RUN/logs/slurm.out" {file}' for file in files)
    return Statement("\n".join(lines), (launch.lines[0],) * 2, shells=launch.shells)


def _set_others_aside(launches: list[LaunchEntry], nodes: int) -> LaunchEntry:
    """Return the entry of the training, by the rules of `choose_launch`, and make the other
    launches plain commands, behind the training with the limit `FINALLY`, or `lost`. `nodes` is the
    job's number of nodes."""
    aside = [entry for entry in launches if _only_prepares(entry.launch)]
    counted = [entry for entry in launches if entry not in aside] or launches
    most = max(launch.weight for _, _, launch in counted)
    heaviest = [entry for entry in counted if entry.launch.weight == most]
    partial = [entry for entry in heaviest if _is_partial(entry.launch, nodes)]
    # A launch on the first node and others elsewhere, each with words of its own, are no training.
    is_split = any(launch.names_nodes for _, _, launch in partial)
    complete = [] if is_split else [entry for entry in heaviest if entry not in partial]
    candidates = complete or heaviest
    count = _count_preparations([launch for _, _, launch in candidates])
    first = candidates[count].statement
    # Launches in the text of one bash -c have the same text: the last of them is the training.
    training = [
        entry
        for entry in candidates
        if entry.statement is first
        or (entry.statement.in_task and entry.statement.outer is first.outer)
    ][-1]
    for entry in launches:
        index, statement, launch = entry
        words = " ".join(word.text for word in launch.args)
        is_preparation = entry not in complete or entry in candidates[:count]
        is_plain = index < training.position and complete and is_preparation
        if is_plain or (entry in aside and counted is not launches):
            _make_plain(statement)
        elif index > training.position and _ends_run(launch, words, training.launch):
            _make_plain(statement)
            statement.limit = FINALLY
        elif statement is not training.statement:
            statement.lost = "a second launch: a job has one; submit this one as its own job"
    return training


def _ends_run(launch: Launch, words: str, training: Launch) -> bool:
    """Return whether a launch with the arguments `words` behind the `training` is no training of
    its own: it tests a model, finishes the run, or is plain Python that does not seem to train."""
    is_plain = not launch.step and launch.weight == 1
    name = program_name(launch)
    ends = follows_training(name, words, training) if is_plain else only_ends_run(name, words)
    return ends and not launch.in_loop


def _only_prepares(launch: Launch) -> bool:
    """Return whether a launch is that of a command or a shell script that prepares a training by
    its name, or cleans up: ``srun bash clean.sh``."""
    return "no-python" in launch.settings and prepares_training(launch)


def _count_preparations(launches: Sequence[Launch]) -> int:
    """Return how many `launches` at the beginning prepare a training, by the names of their
    programs; 0 where none of the launches behind them trains by its name."""
    count = next((i for i, launch in enumerate(launches) if not prepares_training(launch)), 0)
    return count if any(map(_trains, launches[count:])) else 0


def _describe_fewer_nodes(training: Launch, nodes: int) -> str:
    """Return "a launch on 1 of 4 nodes" for a training on fewer than the job's `nodes`, as one that
    the batch script runs. '' for one on all, also by deepspeed's ssh, or in a loop over them."""
    if {"hostfile", "num-nodes", "deepspeed-hostfile"} & training.options.keys():
        return ""
    count = training.nodes or (0 if training.step else 1)  # 0: on all
    is_on_fewer = 0 < count < nodes and not training.in_loop
    return f"a launch on {count} of {nodes} nodes" if is_on_fewer else ""


def _make_node_checks_plain(statements: Sequence[Statement]) -> None:
    """Make plain commands of launches in a loop over the nodes that weigh less than Python in a
    task (3), and stand before a line that starts Python: they check each node before the
    training."""
    starts = [i for i, s in enumerate(statements) if re.match(STARTS_PYTHON, s.text, re.S)]
    for statement in statements[: max(starts, default=0)]:
        launch = None if statement.lost else statement.launch
        if launch and launch.in_loop and launch.weight < 3:
            _make_plain(statement)


def _remove_launch_of_first_node(reader: Reader) -> None:
    """Remove each launch on one node that a loop over the nodes makes as well: it is the first
    node's part of the training, and the loop starts those of the others. A ``sleep`` between it and
    the loop is removed, too. The lines of both are noted in ``reader.other_marks``."""
    launches = [(s, s.launch) for s in reader.statements if s.launch and not s.lost]
    for statement, launch in launches:
        same = [pair for pair in launches if pair[1].training_key == launch.training_key]
        in_loops = [s for s, candidate in same if candidate.in_loop]
        is_on_one = launch.nodes == 1 or not launch.step
        if launch.in_loop or not (is_on_one and in_loops):
            continue
        at = reader.statements.index(statement)
        # Empty where the loop comes first.
        between = reader.statements[at : reader.statements.index(in_loops[0])]
        if any(part.name for part in between) or (between and not statement.in_background):
            continue  # the loop's launches have other variables, or start after it has ended
        for removed in [statement, *(s for s in between if s.first == "sleep")]:
            for line in range(removed.lines[0], removed.lines[1] + 1):
                reader.other_marks[line] = (
                    TAKEN,
                    "the first node's launch: hpc-ddp starts all nodes",
                )
            reader.statements.remove(removed)
        if not between:  # the removed launch was the last, and the script waited for its end
            in_loops[0].enclosing = ()


def _make_plain(statement: Statement) -> None:
    """Make a launch a plain command of the set-up lines: set `launch` to None, and `is_step`, by
    which `join_commands_read_in_parts` gives it the text of the whole command."""
    statement.launch, statement.is_step = None, True


def join_commands_read_in_parts(reader: Reader, at: int) -> int:
    """Replace the statements of each command that was read in parts, and in which a step but no
    launch is left (`choose_launch`), by the one statement that the command is: ``(cd a && python
    prepare.py) &``. A statement that asks for the exit code of a step is joined to it. `at` is the
    index of a statement; return the new one."""
    before = reader.statements
    of_launches = {id(command) for s in before if s.launch for command in s.enclosing}
    of_steps = {id(command) for s in before if s.is_step for command in s.enclosing} - of_launches
    statements, index = list[Statement](), at
    for number, part in enumerate(before):
        steps = (command for command in part.enclosing if id(command) in of_steps)
        statement = next(steps, part)
        if (
            part.reported_launch
            and statement is part
            and statements[-1:]
            and statements[-1].is_step
        ):
            statements[-1].text = part.text.replace(ENDED, statements[-1].text)
            continue
        if statement is not part:
            statement.is_step |= part.is_step
            statement.sets |= {part.name, *part.sets} - {""}
            statement.lost, statement.limit = statement.lost or part.lost, part.limit
        if not statements or statements[-1] is not statement:
            statements.append(statement)
        index = len(statements) - 1 if number == at else index
    reader.statements = statements
    return min(index, len(statements))


def _trains(launch: Launch) -> bool:
    """Return whether the name of a launch's program says that it trains, and not that it tests or
    prepares something."""
    name = program_name(launch)
    return bool(TRAINS.search(name)) and not (TESTS.search(name) or PREPARES.search(name))


def keep_one_command(statements: Sequence[Statement]) -> None:
    """Make plain commands of all launches but one, for launches that are commands which only may
    train (``Counted.COMMANDS``). The last that trains by its name stays, else the last of all."""
    launches = [s for s in statements if s.launch and not s.lost]
    trains = [s for s in launches if s.launch and _trains(s.launch)]
    for statement in launches:
        if statement is not (trains or launches)[-1]:
            _make_plain(statement)


def has_launch(statements: Sequence[Statement], counted: Counted) -> bool:
    """Return whether a launch is among the statements, or may be in a lost one (its reason has the
    word "launch"). Plain Python (weight 1) counts only with `counted` above ``PLAIN_PYTHON``."""
    least = 1 if counted == Counted.PLAIN_PYTHON else 0
    return any((s.launch and s.launch.weight > least) or "launch" in s.lost for s in statements)


def _is_partial(launch: Launch, nodes: int) -> bool:
    """Return whether a launch is on fewer than the job's `nodes`, and in no loop over them. Where
    each task is a worker, its number of tasks bounds that of its nodes."""
    count = launch.nodes or (launch.tasks if not launch.kind else None) or nodes
    return count < nodes and not launch.in_loop


def restore_definitions(reader: Reader, index: int) -> int:
    """Put the definition of each function that is read where it is called back before the first
    statement that calls it and is no launch: ``run`` of ``run module load a``. Return the new index
    of the statement that has the `index`."""
    for definition in reader.called_definitions:
        indexes = (
            i for i, s in enumerate(reader.statements) if calls_function(s, definition.defines)
        )
        if (at := next(indexes, None)) is not None:
            reader.statements.insert(at, definition)
            index += at <= index
    return index
