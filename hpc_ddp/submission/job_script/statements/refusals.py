"""Reasons why statements of a job script can't be taken over, or why hpc-ddp does what they do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Set

from hpc_ddp.submission.job_script.bash import blocks, syntax
from hpc_ddp.submission.job_script.bash.quotes import split_quoted
from hpc_ddp.submission.job_script.bash.words import Word, split_text
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.launchers.option_names import is_launcher
from hpc_ddp.submission.job_script.launchers.program_names import (
    may_be_function,
    programs_follow_training,
)
from hpc_ddp.submission.job_script.secrets import is_secret, looks_secret
from hpc_ddp.submission.job_script.statements.reader import Reader
from hpc_ddp.submission.job_script.statements.requeues_and_deletions import (
    deletes_below_missing,
    ends_in_place_of_requeue,
    only_tidies,
    own_names,
    separate_requeue,
    with_own_name,
)
from hpc_ddp.submission.job_script.statements.rules import (
    DECIDED,
    DELETES,
    FINALLY,
    ON_EXIT,
    ONCE,
    ONLY_DELETES,
    PLACEHOLDER,
    PRINTS,
    REFUSED,
    STARTS_PYTHON,
    TRAINS_BEHIND,
    VERDICT,
    Limit,
    Rules,
    first_reason,
)
from hpc_ddp.submission.job_script.statements.statement import (
    Statement,
    names_file,
    needs_exit_code,
    settle_exit_code,
    with_functions,
)

# A line that starts a step, though not in a text that it prints or assigns.
_STEP = re.compile(
    r"(?!echo|printf|\w+=).*\b(srun|mpirun|mpiexec|ibrun)\s(?!(-\S+\s+)*(/\S*/)?(hostname|pwd|date|echo"
    r"|nvidia-smi|env|printenv|mkdir|cp|ls|rm|uname)\b)",
    re.S,
)
# A text that starts with a launcher of a program, or starts one of Python.
_STARTS = re.compile(rf"\b(torchrun|deepspeed|accelerate launch)\s.*\.py\b|{STARTS_PYTHON}", re.S)
# A command whose first word is a variable's.
_BY_VARIABLE = re.compile(r"(?:(?:eval|exec|time|nohup)\s+)*[\"'`]?\$\{?(\w+)")
# A node's address, asked for by ssh.
_ASKS_ADDRESS = re.compile(
    r"(export\s+)?\w+=[\"']?(\$\(|`)\s*ssh\s[^|`)]*\bhostname\b[^|`)]*(\|\s*(awk|cut|head|tr|sed)\b[^|`)]*)*[)`][\"']?"
)
# Lines of a task that do the same inside of its container.
_IN_BOTH = re.compile(r"(cd|set|unset|export|ulimit|umask|echo|printf|date|hostname)\b")
# An assignment of the last started process's number, also to an array.
_STARTED = re.compile(r"^\w+\+?=\(?[\"']?\s*\$(!|\{!\})[\"']?\)?$")
# Words of statements that do more than write a file of hosts.
_DOES_MORE = re.compile(
    r"&&|\|\||\b(cp|mv|rm|mkdir|touch|ln|dd|tar|rsync|scp|chmod|pip|conda|module|source|export|cd"
    r"|kill|pkill|killall|bash|sh|python[\d.]*)\b"
)
# In the assignment of a variable by which the workers meet, or that says how the launch ended.
_OF_LAUNCH = re.compile(
    r"scontrol|srun|hostname|NODELIST|RANDOM|shuf|port|MASTER|socket|getent|nslookup|\bip\b|\$[?!]",
    re.I,
)
_BESIDE = "it runs beside the launch: setup with & at its end, or in the program"
_SECRET = "it has what looks like a secret: pass it on with --env NAME"
_NOTICED = "notices reach the workers, and the end of the job ends what it has started"
_OUTSIDE = "a task runs it before it enters the container: setup, or worker-setup inside of it"


class Refusals:
    """Sets `lost` and `decided` of the statements of `reader` (`set_reasons`). `name` is the
    script's file name or ''; `launch` is the training, None without one, and `at` the index of its
    statement, as from `choose_launch`."""

    def __init__(self, reader: Reader, launch: Launch | None, at: int, name: str) -> None:
        self._statements, self._node_variables = reader.statements, reader.node_variables
        self.launch, self._launch_at = launch, at
        self._own_names = own_names((s.text for s in self._statements), name)
        # By name: the last assignment in the batch script, and the last definition.
        self.assigned = {s.name: s for s in self._statements if s.name and not s.in_task}
        self.functions = {s.defines: s for s in self._statements if s.defines}
        counts = Counter(name for s in self._statements for name in {s.name, *s.sets})
        self._set = {*self.assigned, *(name for s in self._statements for name in s.sets)}
        # Paths of what is temporary, with their lines, by the variables that are set to them once.
        self._temporary = {
            name: (s.assigned.text, s.lines[0])
            for name, s in self.assigned.items()
            if counts[name] == 1 and isinstance(s.assigned, Word)
            and re.match(r"/tmp/|/dev/shm/|\$(SLURM_)?TMPDIR\b", s.assigned.text)
        }  # fmt: skip
        # Lines that may set any variable.
        self._loads = [s.lines[0] for s in self._statements if blocks.may_set_unknown_names(s.text)]
        # Variables that hold a launch, or its beginning: their first word is a launcher.
        assignments = ((s.name, s.assigned) for s in self._statements if s.name and not s.in_task)
        self._launching = {
            name
            for name, assigned in assignments
            for word in (split_text(assigned) if isinstance(assigned, Word) else assigned or [])[:1]
            if is_launcher(word.text)
        }

    def set_reasons(self) -> tuple[dict[str, str], int]:
        """Set the reasons `lost` and `decided` of all statements but launches that are not lost.
        Return the variables and functions that no line of the job sets any more, each with the
        place in the script that sets it, as ``line 7``; and the index of the launch, or without one
        that of the first statement that may be one. To be called once.

        A statement is lost if it can't be taken over (`_find_refusal`), or needs a name or a file
        that a lost statement or a loop over the nodes sets or writes. It is decided if it only
        reports how the launch ended, ends a process that the script has started, asks the first
        node for its address by ssh, or writes a file of hosts.
        """
        unknown = dict.fromkeys(self._node_variables, "a loop")
        training = next((s for s in self._statements if s.launch and s.launch is self.launch), None)
        is_beside = False  # the launch runs in the background there
        keeps_code = self.launch is not None and needs_exit_code(self._statements, self._launch_at)
        has_no_hostfile = False  # a line that writes the file of hosts is left out
        status: set[str] = set()  # variables that have the launch's exit code
        of_finished: set[str] = set()  # variables that a line for a finished run alone sets
        files: dict[str, str] = {}  # that a lost statement writes, with its line
        of_address: set[str] = set()  # variables that only serve to find the first node's address
        # Variables with the numbers of processes that the script starts, the last time anywhere.
        processes = {s.name: i for i, s in enumerate(self._statements) if _STARTED.search(s.text)}
        started = {name for name, index in processes.items() if index < self._launch_at}
        for index, statement in enumerate(self._statements):
            separate_requeue(statement, self.functions)
            line, names = f"line {statement.lines[0]}", {*statement.sets, statement.name} - {""}
            if statement.launch and not statement.lost:
                is_beside |= statement.launch is self.launch and statement.in_background
                continue
            is_beside &= not re.match(r"wait\b", statement.text)
            if settle_exit_code(self._statements, self._launch_at, index, status, keeps_code):
                statement.decided = VERDICT
                status |= names
                unknown |= dict.fromkeys(names, line)
                continue
            is_trap = statement.first == "trap"
            # A trap for the script's end stays, if it ends what the set-up lines start.
            of_trap = processes.keys() - (started if ON_EXIT.match(statement.text) else set())
            targets = of_trap if is_trap else started
            if (is_trap or index > self._launch_at) and statement.only_ends(
                targets, self.functions
            ):
                statement.decided = _NOTICED if is_trap else "the end of the job ends it"
                continue
            of_loops = {name for name in statement.names if unknown.get(name) == "a loop"}
            if of_loops and (statement.name or PRINTS.match(statement.text)):
                statement.lost, statement.decided = "", "a loop over the nodes: hpc-ddp starts all"
                unknown |= dict.fromkeys(names, "a loop")
                continue
            if not statement.lost and self._finds_address(statement, of_address, unknown):
                statement.decided = "workers have hpc-ddp's MASTER_ADDR, the first node's"
                of_address |= names
                unknown |= dict.fromkeys(names, line)
                continue
            if not statement.lost:
                statement.lost = self._find_refusal(statement, index, training, is_beside)
            if statement.names & of_finished and not statement.limit.test:
                statement.limit = Limit(FINALLY.test, "")
            of_finished |= names if statement.limit.test == FINALLY.test else set()
            if (statement.lost or has_no_hostfile) and self._is_for_hostfile(statement):
                statement.lost, statement.decided = "", "hpc-ddp starts the workers on all nodes"
                has_no_hostfile = True
                files |= dict.fromkeys(syntax.files_written(statement.text), line)
                unknown |= dict.fromkeys(names, line)
                continue
            self._refuse_if_it_needs_lost(statement, files, unknown)
        return unknown, self._launch_at

    def _refuse_if_it_needs_lost(
        self, statement: Statement, files: dict[str, str], unknown: dict[str, str]
    ) -> None:
        """Set `lost` of a statement that reads a file which a lost statement writes (`files`), or
        needs a name which a lost statement sets (`unknown`); both have the statement's line, as
        ``line 7``. Then add the files and names of a lost statement to these. A name that an
        assignment which is not lost sets is removed from `unknown`."""
        line = f"line {statement.lines[0]}"
        read_files = () if PRINTS.match(statement.text) else files
        for file in (file for file in read_files if names_file(statement.text, file)):
            statement.lost = statement.lost or f"it needs {file}, of {files[file]}"
        if statement.lost:
            files |= dict.fromkeys(syntax.files_written(statement.text), line)
        for name in sorted(statement.names & unknown.keys()):
            statement.lost = statement.lost or f"it needs {name}, of {unknown[name]}"
        for name in {*statement.sets, statement.name, statement.defines} - {""}:
            if statement.lost:
                unknown[name] = line
            elif statement.name:
                unknown.pop(name, None)

    def _is_for_hostfile(self, statement: Statement) -> bool:
        """Return whether a statement prints the launch's file of hosts by ``cat``, or writes this
        file and no other, by commands none of which is in `_DOES_MORE`."""
        options = self.launch.options if self.launch else {}
        operands = [options[name][0] for name in ("hostfile", "machinefile") if name in options]
        if not operands or operands[0] is None:
            return False
        file = operands[0].text.removeprefix("./")  # the launch's words have their values already
        cat = re.fullmatch(r"cat\s+[\"']?([^\s\"']+)[\"']?", statement.text)
        if cat and self._path_of(cat[1]) == file:
            return True
        files = {*map(self._path_of, syntax.files_written(statement.text))}
        pieces = (text for text, _ in split_quoted(statement.text) if text[:1] != "#")
        return files == {file} and not _DOES_MORE.search(" ".join(pieces))

    def _fill_in_values(self, text: str, is_static: bool = True) -> str:
        """Return bash code, `text`, with the known values of the batch script's variables in place
        of ``$NAME`` and ``${NAME}``: with `is_static` only values without code, which are texts."""
        values = {
            name: s.assigned.text
            for name, s in self.assigned.items()
            if isinstance(s.assigned, Word)
            and s.assigned.text
            and (s.assigned.is_static or not is_static)
        }
        return re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda m: values.get(m[1] or m[2], m[0]), text)

    def _path_of(self, text: str) -> str:
        """Return a path without ``./``, and with the value of the variable that it begins with:
        ``/tmp/hosts`` for ``$DIR/hosts`` after ``DIR=/tmp``."""
        variable = re.match(r"\$\{?(\w+)\}?", text)
        if variable and variable[1] in self.assigned:
            assigned = self.assigned[variable[1]].assigned
            if isinstance(assigned, Word) and assigned.text:
                text = assigned.text + text[variable.end() :]
        return text.removeprefix("./")

    def _finds_address(
        self, statement: Statement, of_address: Set[str], unknown: Mapping[str, str]
    ) -> bool:
        """Return whether a statement only serves to find the first node's address: it asks a node
        by ssh (``A=$(ssh $N hostname -i)``), or it assigns, reads or prints something and needs of
        the `unknown` names only those `of_address`, which other such statements set."""
        if _ASKS_ADDRESS.fullmatch(statement.text):
            return True
        names = statement.names & unknown.keys()
        is_plain = statement.name or statement.first == "read" or PRINTS.match(statement.text)
        return bool(names) and names <= of_address and bool(is_plain)

    def _find_refusal(
        self, statement: Statement, index: int, training: Statement | None, is_beside: bool
    ) -> str:
        """Return the reason why a statement, of an `index`, can't be taken over; '' if it can.

        Its `limit` is set to `ONCE` if it deletes (`_may_delete`), and to `FINALLY` if it stands
        behind the launch and only tests a model, say. `training` is the statement of the launch,
        None without one: then `_launch_at` becomes the index of the first statement that may start
        one. `is_beside` says that the training runs in the background while the statement does.
        """
        text, is_after = statement.text, index > self._launch_at
        is_settled = statement.name or self.find_reason(DECIDED, statement, is_after=True)
        if not is_after and ends_in_place_of_requeue(with_own_name(text, self._own_names)):
            return "hpc-ddp requeues the job; its exit guards the launch: setup, if needed"
        if is_after and not (self.launch or is_settled):
            return "behind a launch that is not taken over: setup or teardown"
        # A statement in a child shell, or in the text of a bash -c, that the training is not in.
        shells = training.shells if training else ()
        is_elsewhere = statement.shells != shells[: len(statement.shells)]
        if is_elsewhere or statement.outer not in (None, training and training.outer):
            return "of a launch that is not taken over: setup, if needed"
        if statement.defines:
            return _SECRET if looks_secret(text) else ""
        if training and is_after and (reason := self._find_shell_reason(statement, training)):
            return reason
        reason = self.find_reason(REFUSED, statement, is_after)
        if reason == PLACEHOLDER and statement.name and is_secret(statement.name):
            reason = ""  # it is left to the submitting shell
        if reason == DELETES and self._may_delete(statement, index):
            reason = ""
        filled = self._fill_in_values(text, is_static=False) if is_after else text
        if is_after and not reason and re.match(STARTS_PYTHON, filled, re.S):
            reason = TRAINS_BEHIND  # python $T | tee log
        if is_after and reason == TRAINS_BEHIND and programs_follow_training(filled, self.launch):
            statement.limit, reason = FINALLY, ""
        if not (self.launch or reason) and (
            self._may_launch(text) or self._names_launch(statement)
        ):
            self._launch_at = min(self._launch_at, index)
            reason = "it may be the launch: script = …, args = […]"
        if looks_secret(text) and not statement.name:
            return _SECRET
        if is_beside and not (reason or is_settled or PRINTS.match(text)):
            return _BESIDE
        is_outside = self.launch and self.launch.enters_container and index < self._launch_at
        is_outside = is_outside and statement.in_task and not statement.name
        commands = map(syntax.source, syntax.commands_of(syntax.parse(text))) if is_outside else ()
        is_in_both = _IN_BOTH.match(text) and all(map(_IN_BOTH.match, commands))
        return reason or (_OUTSIDE if is_outside and not is_in_both else "")

    def _may_delete(self, statement: Statement, index: int) -> bool:
        """Return whether a statement, of an `index`, that deletes something can be a line of the
        job. Behind the launch that is one which only deletes files that lines before it write; in
        front of it in the batch script, one that deletes below a folder which is not there
        (`deletes_below_missing`), or only deletes: the latter gets the limit `ONCE`, since before
        each attempt it would delete checkpoints."""
        if index > self._launch_at:
            return self._only_deletes_written(statement.text, index)
        if statement.in_task:
            return False
        if deletes_below_missing(statement.text):
            return True
        code = self._fill_in_values(statement.text, is_static=False)
        only_deletes = bool(ONLY_DELETES.fullmatch(code)) or only_tidies(statement.text)
        statement.limit = ONCE if only_deletes else statement.limit
        return only_deletes

    def _only_deletes_written(self, text: str, index: int) -> bool:
        """Return whether a command, a `text`, only deletes files that statements before it, up to
        an `index`, write by redirection. Folders that they make do not count: runs may be there."""
        if not ONLY_DELETES.fullmatch(self._fill_in_values(text)):
            return False
        before = (s for s in self._statements[:index] if not s.lost)
        files = {self._path_of(file) for s in before for file in syntax.files_written(s.text)}
        words = re.sub(r"\s*\|\|.*|\d?>.*", "", text).split()[1:]
        paths = [self._path_of(word.strip("\"'")) for word in words if word[:1] != "-"]
        return bool(paths) and files.issuperset(paths)

    def _may_launch(self, text: str) -> bool:
        """Return whether a statement, `text`, may be a launch: it starts a step or a Python
        program, or begins with a variable that holds a launcher, or with an array of the script's
        (``"${CMD[@]}"``)."""
        by_variable = _BY_VARIABLE.match(text)
        holds_launch = by_variable is not None and by_variable[1] in self._launching
        is_array = re.fullmatch(r"(?:eval\s+)?\"?\$\{(\w+)\[@\]\}\"?.*", text, re.S)
        holds_launch = holds_launch or bool(is_array and is_array[1] in self._set)
        return holds_launch or bool(_STEP.match(text) or re.match(STARTS_PYTHON, text, re.S))

    def _names_launch(self, statement: Statement) -> bool:
        """Return whether a command has a whole launch or Python program as one of its words, as
        ``run_with_retry "$LAUNCH"``; or may be a function that starts one, as ``step uv run
        train.py`` (`may_be_function`). A print has none."""
        texts = [self._fill_in_values(word.text) for word in statement.words]
        if re.search(r"\.py\b|\srun\s", statement.text) and may_be_function(statement.words):
            return True
        is_print = PRINTS.match(statement.text) or re.match(r"(log|echo|tee)\w*\b", statement.text)
        return not is_print and any(" " in text and _STARTS.match(text) for text in texts)

    def _find_shell_reason(self, statement: Statement, training: Statement) -> str:
        """Return the reason why a statement behind a child shell, ``( … )``, with the `training` in
        it can't be a clean-up line: it needs a name to which that shell gives another value; ''
        without a reason. A name that a shell in a task sets does not count."""
        depth = len(statement.shells)
        if len(training.shells) <= depth:
            return ""
        shell = training.shells[depth]  # the outermost that the statement is not in
        inner = [s for s in self._statements if shell in s.shells and not s.in_task]
        if names := {n for s in inner for n in (s.name, s.defines, *s.sets)} & statement.names:
            return f"the shell around the launch sets another {min(names)}: teardown, if needed"
        return ""

    def is_of_launch(self, name: str) -> bool:
        """Return whether the variable `name` serves the launch alone: the text of its assignment,
        or of that of a variable which it needs, has to do with the rendezvous (a port, the nodes'
        names), or with how the launch ended."""
        names, checked = {name}, set[str]()
        while names := names - checked:
            texts = [self.assigned[n] for n in names & self.assigned.keys()]
            if any(_OF_LAUNCH.search(s.text) for s in texts):
                return True
            checked |= names
            names = {needed for s in texts for needed in s.names}
        return False

    def find_reason(self, rules: Rules, statement: Statement, is_after: bool) -> str:
        """Return the reason of the first rule that fits a statement behind the launch (`is_after`)
        or before it; '' if none does.

        The rules are applied to its text with the functions that it needs behind it, `own_names` as
        ``$0``, an sbatch's variables as their known values, and with ``/tmp/…`` for a variable that
        is set to such a path once, and by no file that a line between both loads.
        """
        text = "\n".join(s.text for s in with_functions(statement, self.functions))
        text = re.sub(r"\$\?|PIPESTATUS", "", text) if statement.uses_own_code else text
        line = statement.lines[0]
        values = {
            name: path
            for name, (path, at) in self._temporary.items()
            if at <= line and not any(at < load < line for load in self._loads)
        }
        text = re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda m: values.get(m[1] or m[2], m[0]), text)
        text = self._fill_in_values(text) if "sbatch" in text else text
        text = with_own_name(text, self._own_names)
        return first_reason(rules, text, is_after)
