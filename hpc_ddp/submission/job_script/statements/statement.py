"""A statement of a job script, its relations to functions and files, and exit codes that others ask
for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hpc_ddp.submission.job_script.bash import blocks, syntax
from hpc_ddp.submission.job_script.bash.values import Value
from hpc_ddp.submission.job_script.bash.words import Word, literal
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.statements.rules import (
    DECIDED,
    ENDED,
    ON_EXIT,
    PRINTS,
    Limit,
    first_reason,
)

_LOADS = re.compile(r"\s*(module|ml|source|\.|conda|spack|eval)\s")
_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.S)  # a text, or one character
# Parts of code that change nothing outside of it: output that nobody gets, a trap that is taken
# away, and the exit code in a variable.
_LEAVES_NOTHING = re.compile(
    r"(?P<redirect>[12&]?>>?\s*/dev/null|[12]?>&[12])|\btrap\s+-(\s+[A-Z]\w*)*"
    r"|\b(local\s+)?\w+=\$\?"
)
# Variables that each login exports.
_OF_A_LOGIN = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "MANPATH", "HOME", "TMPDIR", "LANG")
_EXIT_CODE = re.compile(r"\$\?|\$\{PIPESTATUS\[0\]\}")
_ASKS = re.compile(r"\$\?|\bPIPESTATUS\b")
_COMMANDS = {"command", "test_command", "variable_assignment", "declaration_command"}
# A command, or a list of processes, for those that the script itself has started.
_ENDS_CHILDREN = re.compile(
    r"\bpkill\s+(-\w+\s+)*(-P|--parent)\s+[\"']?\$\$[\"']?"
    r"|\bkill\s+(-\w+\s+)*[\"']?(\$\(|`)jobs\s+-\w+[)`][\"']?"
)
# Words of a kill: an option, a signal, jobs of this shell, and variables, whose name is [1].
_OF_A_KILL = re.compile(r"-[\w-]*|[A-Z]+\d?|0|%\S*|-?\$(?:\{?(\w+)(?:\[[@*]\])?\}?|[$!]|\{!\})")


@dataclass(frozen=True)
class Place:
    """Where a text that is read stands in the script."""

    lines: tuple[int, int] | None = None  # first and last line of the statement around the text
    shift: int | None = None  # from the text's lines to the script's, if they correspond
    step: str = ""  # the command that starts the tasks that run it; '' in the batch script
    in_loop: bool = False  # over the nodes
    in_text: bool = False  # of a bash -c or an eval
    in_image: bool = False  # of a container
    call: Statement | None = None  # the outermost call of a function in whose body it stands
    leave_commands: str = ""  # commands that leave the function or the loop that is taken apart

    def search_place(self, step: str) -> Place:
        """Return the place for a search of the text for launches, in tasks of `step`, which is as
        here for ''. It counts as one in a loop over the nodes, where `read_launch` sees most."""
        return replace(self, lines=None, shift=None, step=step or self.step, in_loop=True)

    def of_call(self, definition: Place, call: Statement) -> Place:
        """Return the place of the body of a function, with that of its `definition`, for a `call`
        of it here."""
        place = replace(self, leave_commands="return", call=self.call or call)
        return replace(place, lines=definition.lines, shift=definition.shift)

    @property
    def in_task(self) -> bool:
        """Return whether each task runs the text, also in a container, and not the batch script."""
        return bool(self.step) or self.in_image


class KnownFunction(NamedTuple):
    """A function of the script: the node and the statement of its definition, and its place."""

    node: syntax.Node
    statement: Statement
    place: Place


@dataclass
class Statement:
    """One statement of a script: an assignment (of `assigned` to `name`), a launch, the definition
    of a function (`defines`, its name), or another command or block, which may set the variables
    `sets`.

    `lines` are its first and last line in the script; `in_task` says that each task runs it, in
    ``bash -c``; `output` is the file that a launch writes to. `lost` is the reason why the
    statement can't be taken over, `decided` the reason why hpc-ddp itself does what the statement
    does; each is '' without such a reason.
    """

    text: str
    lines: tuple[int, int]
    words: list[Word] = field(default_factory=list)
    name: str = ""
    assigned: Value = None
    exported: bool = False
    launch: Launch | None = None
    in_task: bool = False
    output: str = ""
    # Commands of the script that were read in parts, of which it is one; the outermost is first.
    enclosing: tuple[Statement, ...] = ()
    is_step: bool = False  # a launch that is not the training: it stays bash, as a whole
    lost: str = ""
    choices: list[Launch] = field(default_factory=list)  # of a condition or loop that is lost
    decided: str = ""
    defines: str = ""
    limit: Limit = field(default_factory=Limit)  # when the line that it becomes runs: `ONCE`, say
    # Of the other side of a launch's list, as ``|| exit 1``: whether it only prints, keeps the exit
    # code or ends the script, and the launch. None for a statement that is no such side.
    is_report: bool | None = None
    reported_launch: Launch | None = None
    uses_own_code: bool = False  # its ``$?`` is the exit code of a command of its own
    sets: set[str] = field(default_factory=set)
    of_script: bool = True  # False for one made of a part of a word
    outer: Launch | None = None  # around the bash -c in whose text it stands
    call: Statement | None = None  # as in its `Place`
    shells: tuple[int, ...] = ()  # the child shells that run it, each by a number of its own

    @property
    def in_background(self) -> bool:
        """Whether an ``&`` stands behind a command that the statement is a part of."""
        return any(command.text.endswith(" &") for command in self.enclosing)

    @property
    def first(self) -> str:
        """The first word of a command; '' for a statement without `words`."""
        return self.words[0].text if self.words else ""

    @property
    def names(self) -> set[str]:
        """The variables and functions that the statement may need; some other words may be among
        them."""
        return syntax.names_needed(self.text, self.name)

    def only_ends(self, processes: Set[str], functions: Mapping[str, Statement]) -> bool:
        """Return whether the statement, or the text or function (of `functions`, by name) that a
        trap runs, does no more than print, wait and end processes, one at least: its own, or those
        whose numbers are in the variables `processes`. ``kill $PID || true`` is one. Raise as
        `syntax.parse`."""
        text = self.text
        if self.first == "trap":
            text = next((word.text for word in self.words[1:] if word.text != "--"), "")
            body = re.search(r"\{(.*)\}", functions[text].text, re.S) if text in functions else None
            text = body[1] if body else text
        text = _LEAVES_NOTHING.sub(lambda m: " " if m["redirect"] else ":", text)
        root = syntax.parse(_ENDS_CHILDREN.sub("kill $!", text))
        commands = [[*command.named_children] for command in syntax.commands_of(root)]
        kills = [words for words in commands if words and syntax.source(words[0]) == "kill"]
        loops = {
            syntax.source(node.child_by_field_name("variable"))
            for node in syntax.all_below(root) if node.type == "for_statement"
            and all(_is_among(n, processes) for n in node.children_by_field_name("value"))
        }  # fmt: skip
        are_own = all(_is_among(n, processes | loops) for words in kills for n in words[1:])
        return bool(kills) and are_own and blocks.only_reports(root, {"kill", "sleep"})

    def reports_status(self, variables: set[str]) -> bool:
        """Return whether the statement only reports how the command before it ended: an assignment
        keeps the exit code (``rc=$?``); another statement uses ``$?``, or one of the `variables`,
        and only prints, keeps the code or ends the script (``exit $rc``). Raise as
        `syntax.parse`."""
        if self.is_report is not None:
            return self.is_report
        if self.name:
            return bool(re.fullmatch(r"\w+=[\"']?\$(\?|\{PIPESTATUS\[0\]\})[\"']?", self.text))
        asks = not self.uses_own_code and re.search(r"\$(\?|\{PIPESTATUS)", self.text)
        uses_status = self.names & variables or asks
        code = re.sub(r"\b\w+=[\"']?\$\?[\"']?", ":", self.text)
        return bool(uses_status) and blocks.only_reports(syntax.parse(code))


def _is_among(node: syntax.Node, processes: Set[str]) -> bool:
    """Return whether a word of a kill names no process but the shell's own, and those whose numbers
    are in the variables `processes`."""
    match = _OF_A_KILL.fullmatch(re.sub("[\"']", "", syntax.source(node)))
    return match is not None and (match[1] is None or match[1] in processes)


def mark_exported(statements: Sequence[Statement], shell_names: Set[str]) -> None:
    """Set `exported` of each assignment whose variable is exported already: by an earlier
    statement, by each login (PATH, say), or by the shell that submits (`shell_names`). bash then
    exports the new value, too."""
    exported = {*_OF_A_LOGIN, *shell_names}
    for statement in statements:
        statement.exported |= statement.name in exported
        exported |= {statement.name} if statement.exported else set()


def first_load(statements: Sequence[Statement]) -> int:
    """Return the index of the first statement that loads a module, a file or an environment, or
    evaluates a text: each may set any variable. Without one return the number of statements."""
    loads = (i for i, s in enumerate(statements) if s.words and _LOADS.match(s.text))
    return next(loads, len(statements))


def _is_right_behind(statements: Sequence[Statement], launch_index: int) -> bool:
    """Return whether ``$?`` behind all `statements` is the exit code of the launch, which has the
    `launch_index`: the last of them is a ``wait``, or all behind the launch are lines of its tasks,
    or keep its process id."""
    between = statements[launch_index + 1 :]
    is_end = any(re.match(r"wait\b|for\s[^;\n]*[;\n]\s*do\s+wait\b", s.text) for s in between[-1:])
    return is_end or all(s.in_task or re.match(r"\w+=\"?\$!", s.text) for s in between)


def _asks_for_earlier_code(text: str) -> bool:
    """Return whether bash code, `text`, asks by ``$?`` for the exit code of the command before it:
    none of its own commands but ``wait`` comes before the first ``$?``. Raise as `syntax.parse`."""
    if not _ASKS.search(text):
        return False
    root = syntax.parse(text)
    match = _ASKS.search(syntax.source(root))
    at = len(syntax.source(root)[: match.start()].encode()) if match else 0
    ended = (n for n in syntax.descend(root) if n.type in _COMMANDS and n.end_byte <= at)
    return all(syntax.source(node).startswith("wait") for node in ended)


def join_exit_codes(statements: list[Statement], launch_index: int) -> None:
    """Join each statement that asks for the exit code of the command before it, and stands behind
    the launch, which has the `launch_index`, to that command's statement: both stay, or neither.
    Behind a command with the code 0, as a print, it stays apart, with 0 for the code. Set
    `uses_own_code` of all statements behind the launch. Raise as `syntax.parse`."""
    functions = {s.defines: s for s in statements if s.defines}
    commands = statements[: launch_index + 1]
    for statement in statements[launch_index + 1 :]:
        before, is_behind = commands[-1], _is_right_behind(commands, launch_index)
        texts = [s.text for s in with_functions(statement, functions)]
        is_apart = (
            statement.in_task or statement.defines or statement.reported_launch or statement.launch
        )
        statement.uses_own_code = not (is_apart or _asks_for_earlier_code(statement.text))
        if is_behind:
            statement.uses_own_code &= not any(map(_ASKS.search, texts[1:]))
        elif not is_apart and any(map(_asks_for_earlier_code, map(_body_of, texts))):
            statement.uses_own_code = True
            if _has_code_0(before):
                is_code = statement.name and "$?" in statement.text
                statement.text = f"{statement.name}=0" if is_code else f":\n{statement.text}"
                statement.assigned = literal("0") if is_code else statement.assigned
            elif statement.shells == before.shells:
                _join(before, statement)
                continue
        commands.append(statement)
    statements[:] = commands


def _body_of(text: str) -> str:
    """Return the lines of a function that a `text` defines, else the text."""
    match = re.match(r"(?:function\s+)?[\w-]+\s*(?:\(\s*\))?\s*\{(.*)\}", text, re.S)
    return match[1] if match else text


def _has_code_0(statement: Statement) -> bool:
    """Return whether a statement surely ends with 0, or hpc-ddp does what it does."""
    is_value = statement.name and not re.search(r"\$\(|`", statement.text)
    is_print = re.match(r"(echo|printf|date)\b[^|&]*$", statement.text)
    is_done = statement.is_report or first_reason(DECIDED, statement.text, is_after=True)
    return bool(is_value or is_print or is_done or statement.defines)


def _join(before: Statement, statement: Statement) -> None:
    """Add the text of a statement, its lines and what it sets to those of the statement `before`
    it, which is no assignment any more."""
    for part in (before, statement):
        part.text = f"export {part.text}" if part.name and part.exported else part.text
    before.sets |= {before.name, statement.name, *statement.sets} - {""}
    before.text, before.name, before.uses_own_code = f"{before.text}\n{statement.text}", "", True
    before.lines = before.lines[0], statement.lines[1]


def _asks_exit_code(statement: Statement) -> bool:
    """Return whether a statement behind the launch asks by ``$?`` for the exit code of the launch,
    and not of a command of its own; the other side of the launch's list does not count."""
    asks = statement.is_report is None and _EXIT_CODE.search(statement.text)
    return bool(asks) and not statement.uses_own_code


def needs_exit_code(statements: Sequence[Statement], launch_index: int) -> bool:
    """Return whether a line behind the launch, which has the `launch_index`, does more than print
    and depends on how the launch ended: it uses the exit code, or a line before it may end the
    script by that."""
    status, may_end, of_others = set[str](), False, set[str]()
    functions = {s.defines: s for s in statements if s.defines}
    for statement in statements[launch_index + 1 :]:
        is_of_other = statement.reported_launch not in (None, statements[launch_index].launch)
        is_line = not (statement.launch or statement.defines or statement.in_task)
        if statement.lost or is_of_other or not is_line:
            continue
        of_others |= statement.sets if statement.uses_own_code else set()
        is_of_both = bool(statement.names & status and statement.names & of_others)
        if is_of_both or (status & statement.sets and statement.uses_own_code):
            return True  # a code that is another command's in the end, or is printed beside one
        if statement.reports_status(status):
            status |= {*statement.sets, statement.name} - {""}
            code = "\n".join(s.text for s in with_functions(statement, functions))
            may_end |= bool(re.search(r"\bexit\b", code.replace(ENDED, "")))
            continue
        status -= {statement.name}
        depends = statement.is_report is False or statement.names & status
        if depends or _asks_exit_code(statement):
            return True
        is_idle = statement.name or PRINTS.match(statement.text)
        if may_end and not (is_idle or first_reason(DECIDED, statement.text, is_after=True)):
            return True
    return False


def settle_exit_code(
    statements: Sequence[Statement], launch_index: int, index: int, status: set[str], is_kept: bool
) -> bool:
    """Return whether a statement, of an `index`, only asks how the launch ended, so that nothing is
    left of it. If the exit code `is_kept` (`needs_exit_code`), one that stands right behind the
    launch stays: its text gets `ENDED` in front, whose exit code is the launch's. `status` has the
    variables with the code; one that the statement sets anew is removed from it."""
    statement = statements[index]
    if index < launch_index or statement.reported_launch not in (
        None,
        statements[launch_index].launch,
    ):
        return statement.reported_launch is not None  # of another command, which stays with it
    if is_kept and _asks_exit_code(statement):
        code = _EXIT_CODE.sub("$?", re.sub(r"wait\b[^|&;\n]*", f"{ENDED} ", statement.text))
        statement.text = code if code.startswith(ENDED) else f"{ENDED}\n{code}"
        return False
    status -= {statement.name} if not statement.reports_status(status) else set()
    is_own = bool(statement.is_report is not None or statement.names & status)
    return statement.reports_status(status) and not (is_kept and is_own)


def with_functions(statement: Statement, functions: Mapping[str, Statement]) -> list[Statement]:
    """Return the statement, and behind it the definitions of those `functions` (by name) that it
    needs, directly or through another function; each once."""
    needed, pending = {statement.defines: statement}, [statement]  # so that none needs itself
    while pending:
        for name in (pending.pop().names & functions.keys()) - needed.keys():
            needed[name] = functions[name]
            pending.append(functions[name])
    return [*needed.values()]


def names_set_by_calls(node: syntax.Node, functions: Mapping[str, KnownFunction]) -> set[str]:
    """Return the variables that a block may set by calls of functions. `functions` has, by name,
    definition, statement and place of each that is known."""
    names = {syntax.source(c.child_by_field_name("name")) for c in syntax.commands_of(node)}
    called = (functions[name] for name in names & functions.keys())
    return {name for function in called for name in function.statement.sets}


def changes_folder(name: str, functions: Mapping[str, KnownFunction]) -> bool:
    """Return whether a call of the function `name` may leave the script in another folder: by a
    ``cd``, or a ``pushd`` without its ``popd``, also in a function that it calls. `functions` is as
    in `names_set_by_calls`."""
    body = syntax.body_of(functions[name].node)
    if body.type != "compound_statement":  # ( … ) is a child shell
        return False
    moves = re.findall(r"(?:^|[\s;&])(cd|pushd|popd)\b", syntax.source(body))
    if "cd" in moves or moves.count("pushd") != moves.count("popd"):
        return True
    inner = {n: entry for n, entry in functions.items() if n != name}
    names = {syntax.source(c.child_by_field_name("name")) for c in syntax.commands_of(body)}
    return any(changes_folder(n, inner) for n in names & inner.keys())


def bash_c_text(word: Word) -> str:
    """Return the text that ``bash -c`` gets, as a script of its own. The outer bash has put the
    values of its variables into the text, also between single quotes; there each variable gets
    double quotes, so that the text means the same where it is read for the first time:
    ``"echo 'a $X'"`` becomes ``echo 'a '"${X}"''``."""
    names = "|".join(word.names) or "!"  # no name
    variable = rf"\$\{{(?:{names})\}}"
    return _QUOTED.sub(
        lambda m: re.sub(variable, r"""'"\g<0>"'""", m[0]) if m[0][0] == "'" else m[0], word.script
    )


def calls_function(statement: Statement, name: str) -> bool:
    """Return whether a statement that may become a line of the job calls the function `name`. A
    launch, an assignment, a lost statement, and a trap other than for the script's end do not."""
    is_notice = statement.first == "trap" and not ON_EXIT.match(statement.text)
    is_line = not (statement.launch or statement.name or statement.lost or is_notice)
    return is_line and name in statement.names


def names_file(text: str, file: str) -> bool:
    """Return whether bash code, `text`, names a `file` of `syntax.files_written` without writing
    it; a longer path that the file's name is a part of does not count."""
    text = re.sub(r"\$\{(\w+)\}", r"$\1", text)  # as `files_written` has variables
    text = re.sub(r">>?\s*[\"']?[^\s;&|]+", " ", text)  # files that it writes
    return bool(
        re.search(rf"(?<![\w./-])(\.|\$PWD)?\"?/?\"?{re.escape(file)}(?![\w/-]|\.\w)", text)
    )
