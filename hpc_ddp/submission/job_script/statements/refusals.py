"""Reasons why statements of a job script can't be taken over, or why hpc-ddp does what they do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Set

from hpc_ddp.submission.job_script.bash import syntax
from hpc_ddp.submission.job_script.bash.quotes import split_quoted
from hpc_ddp.submission.job_script.bash.words import Word, split_text
from hpc_ddp.submission.job_script.conversion import (
    DECIDED,
    DELETES,
    ONLY_DELETES,
    PRINTS,
    REFUSED,
    RELATIVE,
    STARTS_PYTHON,
    VERDICT,
    Rules,
    first_reason,
)
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.launchers.options import is_launcher
from hpc_ddp.submission.job_script.secrets import looks_secret
from hpc_ddp.submission.job_script.statements.reader import Reader
from hpc_ddp.submission.job_script.statements.statement import Statement, with_functions

_STEP = re.compile(r"(?!echo|printf|\w+=).*\b(srun|mpirun|mpiexec|ibrun)\s", re.S)
# A command whose first word is a variable's.
_BY_VARIABLE = re.compile(r"(?:(?:eval|exec|time|nohup)\s+)*[\"']?\$\{?(\w+)")
# A node's address, asked for by ssh.
_ASKS_ADDRESS = re.compile(
    r"(export\s+)?\w+=[\"']?(\$\(|`)\s*ssh\s[^|`)]*\bhostname\b[^|`)]*(\|\s*(awk|cut|head|tr|sed)\b[^|`)]*)*[)`][\"']?"
)
# Lines of a task that do the same inside of its container.
_IN_BOTH = re.compile(r"(cd|set|unset|export|ulimit|umask|echo|printf|date|hostname)\b")
# What a loop that writes a file of hosts may do beside that.
_DOES_MORE = re.compile(
    r"&&|\|\||\b(cp|mv|rm|mkdir|touch|ln|dd|tar|rsync|scp|chmod|pip|conda|module|source|export|cd"
    r"|kill|pkill|killall|bash|sh|python[\d.]*)\b"
)
_BESIDE = "it runs beside the launch: setup with & at its end, or in the program"
_OUTSIDE = "a task runs it before it enters the container: setup, or worker-setup inside of it"


class Refusals:
    """Sets `lost` and `decided` of the statements of `reader`. `name` is the script's file name or
    ''; `launch` is the training, None without one, and `at` the index of its statement."""

    def __init__(self, reader: Reader, launch: Launch | None, at: int, name: str) -> None:
        self._statements, self._of_nodes = reader.statements, reader.of_nodes
        self.launch, self._at, self._name = launch, at, name
        # Assignments of the batch script, definitions, and values of what is temporary, by name.
        self.assigned = {s.name: s for s in self._statements if s.name and not s.in_task}
        self.functions = {s.defines: s for s in self._statements if s.defines}
        counts = Counter(name for s in self._statements for name in {s.name, *s.sets})
        self._temporary = {
            name: (s.assigned.text, s.lines[0])
            for name, s in self.assigned.items()
            if counts[name] == 1 and isinstance(s.assigned, Word)
            and re.match(r"/tmp/|/dev/shm/|\$(SLURM_)?TMPDIR\b", s.assigned.text)
        }  # fmt: skip
        self._loads = [s.lines[0] for s in self._statements if syntax.sets_anything(s.text)]
        # Variables that hold a launch, or its beginning.
        of_words = ((s.name, s.assigned) for s in self._statements if s.name and not s.in_task)
        self._launching = {
            name
            for name, assigned in of_words
            for word in (split_text(assigned) if isinstance(assigned, Word) else assigned or [])[:1]
            if is_launcher(word.text)
        }

    def set_reasons(self) -> tuple[dict[str, str], int]:
        """Set `lost`, a reason, of statements that can't be taken over, and of those that need a
        name which a lost statement or a loop over the nodes sets, or a file that one writes. A
        statement that only reports how the launch ended, or that asks the first node for its
        address by ssh, gets `decided`. Return these names, each with the place that sets it, and
        the index of the launch: without one, that of the first statement that may be one."""
        unknown = dict.fromkeys(self._of_nodes, "a loop")
        training = next((s for s in self._statements if s.launch and s.launch is self.launch), None)
        is_beside = False  # the launch runs in the background there
        has_no_hostfile = False
        status: set[str] = set()  # variables that have the launch's exit code
        files: dict[str, str] = {}  # that a lost statement writes, with its line
        of_address: set[str] = set()  # variables that only serve to find the first node's address
        started = {s.name for s in self._statements[: self._at] if s.text.endswith("=$!")}
        for index, statement in enumerate(self._statements):
            if statement.launch and not statement.lost:
                is_beside |= statement.launch is self.launch and statement.text.endswith(" &")
                continue
            is_beside &= not re.match(r"wait\b", statement.text)
            if index > self._at and self.launch and statement.reports_status(status):
                statement.decided = VERDICT
                status |= {statement.name} - {""}
                unknown |= dict.fromkeys({statement.name} - {""}, f"line {statement.lines[0]}")
                continue
            if index > self._at and statement.only_ends(started):
                statement.decided = "the end of the job ends it"
                continue
            if not statement.lost and self._finds_address(statement, of_address, unknown):
                statement.decided = "workers have hpc-ddp's MASTER_ADDR, the first node's"
                names = {*statement.sets, statement.name} - {""}
                of_address |= names
                unknown |= dict.fromkeys(names, f"line {statement.lines[0]}")
                continue
            if not statement.lost:
                statement.lost = self._refusal(statement, index, training, is_beside)
            if (statement.lost or has_no_hostfile) and self._is_for_hostfile(statement):
                statement.lost, statement.decided = "", "hpc-ddp starts the workers on all nodes"
                has_no_hostfile, line = True, f"line {statement.lines[0]}"
                files |= dict.fromkeys(syntax.files_written(statement.text), line)
                unknown |= dict.fromkeys({*statement.sets, statement.name} - {""}, line)
                continue
            reads = () if PRINTS.match(statement.text) else files
            for file in (file for file in reads if _names_file(statement.text, file)):
                statement.lost = statement.lost or f"it needs {file}, of {files[file]}"
            if statement.lost:
                written = syntax.files_written(statement.text)
                files |= dict.fromkeys(written, f"line {statement.lines[0]}")
            for name in sorted(statement.names & unknown.keys()):
                statement.lost = statement.lost or f"it needs {name}, of {unknown[name]}"
            for name in {*statement.sets, statement.name, statement.defines} - {""}:
                if statement.lost:
                    unknown[name] = f"line {statement.lines[0]}"
                elif statement.name:
                    unknown.pop(name, None)
        return unknown, self._at

    def _is_for_hostfile(self, statement: Statement) -> bool:
        """Return whether a statement only writes the launcher's file of hosts, or prints it."""
        options = self.launch.options if self.launch else {}
        operands = [options[name][0] for name in ("hostfile", "machinefile") if name in options]
        if not operands or operands[0] is None:
            return False
        file = operands[0].text.removeprefix("./")
        files = {*map(self._path_of, syntax.files_written(statement.text))}
        match = re.fullmatch(r"cat\s+[\"']?([^\s\"']+)[\"']?", statement.text)
        is_print = match and self._path_of(match[1]) == file
        pieces = (text for text, _ in split_quoted(statement.text) if text[:1] != "#")
        is_only_that = files == {file} and not _DOES_MORE.search(" ".join(pieces))
        return is_only_that or bool(is_print)

    def _with_values(self, text: str) -> str:
        """Return code with the values, in place of their names, of variables that are known."""
        values = {
            name: s.assigned.text
            for name, s in self.assigned.items()
            if isinstance(s.assigned, Word) and s.assigned.is_static and s.assigned.text
        }
        return re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda m: values.get(m[1] or m[2], m[0]), text)

    def _path_of(self, text: str) -> str:
        """Return a path, in which variables that are set once have their values."""
        name = re.match(r"\$\{?(\w+)\}?", text)
        assigned = self.assigned[name[1]].assigned if name and name[1] in self.assigned else None
        start = assigned.text if isinstance(assigned, Word) and name else ""
        return (start + text[name.end() :] if start and name else text).removeprefix("./")

    def _finds_address(
        self, statement: Statement, of_address: Set[str], unknown: Mapping[str, str]
    ) -> bool:
        """Return whether a statement asks a node for its address by ssh, or takes it from variables
        `of_address`, and nothing else that is `unknown`, into a variable or to print it."""
        if _ASKS_ADDRESS.fullmatch(statement.text):
            return True
        names = statement.names & unknown.keys()
        is_plain = statement.name or statement.first == "read" or PRINTS.match(statement.text)
        return bool(names) and names <= of_address and bool(is_plain)

    def _refusal(
        self, statement: Statement, index: int, training: Statement | None, is_beside: bool
    ) -> str:
        """Return why a statement can't be taken over; '' if it can. One that only deletes, before
        the launch, gets `is_once`: before each attempt it would delete checkpoints.

        `training` is the statement of the launch, None without one; `is_beside` says that the
        training runs in the background by then. Without a training the first statement
        that may be one counts as the launch from then on.
        """
        text, is_after = statement.text, index > self._at
        is_settled = statement.name or self.reason(DECIDED, statement, is_after=True)
        if is_after and not (self.launch or is_settled):
            return "behind a launch that is not taken over: setup or teardown"
        shells = training.shells if training else ()
        is_of_another = statement.shells != shells[: len(statement.shells)]
        if is_of_another or statement.outer not in (None, training and training.outer):
            return "of a launch that is not taken over: setup, if needed"
        if statement.defines:
            return ""
        if training and is_after and (reason := self._outer_reason(statement, training)):
            return reason
        reason = self.reason(REFUSED, statement, is_after)
        is_of_batch = not (statement.in_task or is_after)
        if reason == DELETES and is_of_batch and ONLY_DELETES.fullmatch(self._with_values(text)):
            statement.is_once, reason = True, ""
        may_launch = _STEP.match(text) or re.match(STARTS_PYTHON, text, re.S)
        by_variable = _BY_VARIABLE.match(text)
        is_launching = by_variable and by_variable[1] in self._launching
        if (may_launch or is_launching) and not (self.launch or reason):
            self._at = min(self._at, index)
            reason = "it may be the launch: script = …, args = […]"
        if looks_secret(text) and not statement.name:
            return "it has what looks like a secret: pass it on with --env NAME"
        if is_beside and not (reason or is_settled or PRINTS.match(text)):
            return _BESIDE
        is_outside = self.launch and self.launch.enters_container and index < self._at
        is_outside = is_outside and statement.in_task and not statement.name
        return reason or (_OUTSIDE if is_outside and not _IN_BOTH.match(text) else "")

    def _outer_reason(self, statement: Statement, training: Statement) -> str:
        """Return why a statement behind the child shell of the `training` can't be a clean-up line:
        it needs a name that the shell sets, or a path where the shell has changed the folder. ''
        without a reason; a task's shell changes nothing for these lines."""
        depth = len(statement.shells)
        if len(training.shells) <= depth:
            return ""
        shell = training.shells[depth]
        inner = [s for s in self._statements if shell in s.shells and not s.in_task]
        if names := {n for s in inner for n in (s.name, s.defines, *s.sets)} & statement.names:
            return f"the shell around the launch sets another {min(names)}: teardown, if needed"
        is_moved = any(s.first in ("cd", "pushd") for s in inner)
        is_of_folder = is_moved and RELATIVE.search(statement.text)
        return "the launch has another folder: teardown, if needed" if is_of_folder else ""

    def reason(self, rules: Rules, statement: Statement, is_after: bool) -> str:
        """Return the reason of the first rule that fits a statement behind the launch (`is_after`)
        or before it, '' if none does; its text is read with the functions that it needs, with
        ``$0`` for the script's file name, and with the values of paths of what is temporary."""
        text = "\n".join(s.text for s in with_functions(statement, self.functions))
        line = statement.lines[0]
        values = {
            name: path
            for name, (path, at) in self._temporary.items()
            if at <= line and not any(at < load < line for load in self._loads)
        }
        text = re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda m: values.get(m[1] or m[2], m[0]), text)
        if self._name:
            text = re.sub(rf"(?<=[\s/\"']){re.escape(self._name)}(?=[\s\"';)]|$)", "$0", text)
        return first_reason(rules, text, is_after)


def _names_file(text: str, file: str) -> bool:
    """Return whether some code names a file, as by `files_written`, and not one whose path only has
    its name in it."""
    text = re.sub(r"\$\{(\w+)\}", r"$\1", text)
    text = re.sub(r">>?\s*[\"']?[^\s;&|]+", " ", text)  # it is written there
    return bool(
        re.search(rf"(?<![\w./-])(\.|\$PWD)?\"?/?\"?{re.escape(file)}(?![\w/-]|\.\w)", text)
    )
