"""Commands that requeue the job, and deletions: how they are taken out of statements, and which
deletions can stay."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from hpc_ddp.submission.job_script.bash import blocks, syntax
from hpc_ddp.submission.job_script.bash.syntax import Node, source
from hpc_ddp.submission.job_script.statements.rules import DELETES, REFUSED, REQUEUES, first_reason
from hpc_ddp.submission.job_script.statements.statement import Statement, with_functions

# A here-document that a shell reads, with its text.
_DOCUMENT = re.compile(
    r"\b(?:ba)?sh\b[^\n;|&]*<<-?\s*(?P<quote>[\"']?)(?P<end>\w+)(?P=quote)[^\n]*\n"
    r"(?P<text>.*?)^\s*(?P=end)$", re.S | re.M
)  # fmt: skip
# Commands beside a requeue by which a statement does not do more.
_IDLE = {
    *blocks.REPORTING,
    *["sleep", "[", "trap", "kill", "set", "cd", "module", "scontrol", "squeue"],
}


def does_more(text: str, functions: Iterable[str] = ()) -> bool:
    """Return whether bash code, `text`, that requeues the job does more: it has a command that
    neither requeues, prints, waits, asks Slurm, ends something, nor calls one of the `functions`,
    which are names. Raise as `syntax.parse`."""
    commands, idle = map(source, syntax.commands_of(syntax.parse(text))), {*_IDLE, *functions}
    return any(not (_command_name(c) in idle or re.search(REQUEUES, c)) for c in commands)


def only_reports_or_requeues(node: Node) -> bool:
    """Return whether a block only prints, ends the script (`blocks.only_reports`) or requeues the
    job."""
    text = source(node)
    return blocks.only_reports(node) or bool(re.search(REQUEUES, text) and not does_more(text))


def ends_in_place_of_requeue(text: str) -> bool:
    """Return whether bash code, `text`, that requeues the job ends it where it does not: its
    ``exit`` does not stand behind the requeue, as that of ``[ -f a ] && sbatch $0 || exit``. Raise
    as `syntax.parse`."""
    if text.startswith("trap") or not re.search(REQUEUES, text):
        return False
    exits = (
        c for c in syntax.commands_of(syntax.parse(text)) if _command_name(source(c)) == "exit"
    )
    return not all(map(_follows_requeue, exits))


def own_names(texts: Iterable[str], name: str) -> set[str]:
    """Return the names of the batch script's files: its `name`, if it is not '', and those of the
    copies that a statement of the `texts` makes of it, as ``cp $0 a/run.sh``."""
    script = rf"\$\{{?(?:0|BASH_SOURCE)\b\S*|(?:\S*/)?{re.escape(name or '$0')}[\"']?"
    copies = (
        re.match(rf"cp\s+(?:-\w+\s+)*[\"']?(?:{script})\s+\S*?([\w.-]+)[\"']?$", text)
        for text in texts
    )
    return {name, *(match[1] for match in copies if match)} - {""}


def with_own_name(text: str, names: Iterable[str]) -> str:
    """Return bash code, `text`, with ``$0`` for each of the script's own file `names`."""
    for name in names:
        text = re.sub(rf"(?<=[\s/\"']){re.escape(name)}(?=[\s\"';)]|$)", "$0", text)
    return text


def _follows_requeue(command: Node) -> bool:
    """Return whether a `command` stands behind one that requeues the job, which runs first."""
    around = source(command.parent)
    before = [n for n in command.parent.named_children if n.end_byte <= command.start_byte]
    is_other_case = command.parent.type == "list" and "||" in around and "&&" in around
    return not is_other_case and any(re.search(REQUEUES, source(node)) for node in before)


def separate_requeue(statement: Statement, functions: Mapping[str, Statement]) -> None:
    """Take the commands that requeue the job out of a statement's text, if that does more: a ``:``
    stands in their place. Where they stand in a trap, or in one of the `functions` (by name) that
    the statement calls, set `lost`. A launch, an assignment and a definition stay as they are.
    Raise as `syntax.parse`."""
    text = "\n".join(s.text for s in with_functions(statement, functions))
    is_plain = not (statement.launch or statement.name or statement.defines or statement.lost)
    if not (is_plain and re.search(REQUEUES, text)):
        return
    inner = statement.words[1].text if statement.first == "trap" and statement.words[1:] else ""
    called = "\n".join(source(syntax.body_of(d)) for d in syntax.functions_in(syntax.parse(text)))
    if does_more(inner, functions) or does_more(called, functions):
        statement.lost = (
            "it requeues the job, which hpc-ddp does, and does more: teardown, if needed"
        )
    elif not inner and does_more(statement.text, functions):
        root = syntax.parse(statement.text)
        code = root.text
        for command in reversed(syntax.commands_of(root)):
            if re.search(REQUEUES, source(command)):
                code = code[: command.start_byte] + b":" + code[command.end_byte :]
        statement.text = code.decode().strip()


def separate_deletions(statements: list[Statement], at: int) -> int:
    """Take each command that deletes something out of the here-documents which a shell reads
    (``bash <<EOT``), of `statements` before the launch, whose index is `at`. A ``:`` stands in its
    place, and the command is a lost statement behind. Return the launch's new index. Raise as
    `syntax.parse`."""
    parts = list[Statement]()
    for statement in statements[:at]:
        parts.append(statement)
        document = _DOCUMENT.search(statement.text)
        has_own_lines = statement.text.count("\n") == statement.lines[1] - statement.lines[0]
        if statement.lost or statement.launch or not (document and has_own_lines):
            continue
        for command in map(source, syntax.commands_of(syntax.parse(document["text"]))):
            before, sign, behind = statement.text.partition(command)
            if sign and first_reason(REFUSED, command, is_after=False) == DELETES:
                first = statement.lines[0] + before.count("\n")
                lines = first, first + command.count("\n")
                parts.append(Statement(command, lines, lost=DELETES, shells=statement.shells))
                statement.text = before + ":" + " \\\n" * command.count("\n") + behind
    parts += statements[at:]
    shift, statements[:] = len(parts) - len(statements), parts
    return at + shift


def deletes_below_missing(text: str) -> bool:
    """Return whether bash code, `text`, is an ``if [ ! -d FOLDER ]`` that deletes nothing but this
    folder, and what is below it, which is not there before."""
    text = re.sub("[\"']", "", text)
    folder = re.match(r"if\s+\[\[?\s+!\s+-[def]\s+(\S+)\s+\]", text)
    if folder is None or re.search(r"\belse\b|\belif\b|\.\./", text):
        return False
    commands = map(syntax.source, syntax.commands_of(syntax.parse(text)))
    deleted = [word for c in commands if c.startswith("rm ") for word in c.split()[1:]]
    paths = [word for word in deleted if word[:1] != "-"]
    return bool(paths) and all(f"{path}/".startswith(f"{folder[1]}/") for path in paths)


def only_tidies(text: str) -> bool:
    """Return whether bash code, `text`, is an ``if`` of commands that delete or make folders, print
    or test."""
    root = syntax.parse(text)
    is_if = [child.type for child in root.named_children] == ["if_statement"]
    return is_if and blocks.only_reports(root, {"rm", "mkdir", "["})


def _command_name(command: str) -> str:
    """Return the first word of a command."""
    return re.split(r"\s", command.strip(), maxsplit=1)[0]
