"""The fate of each statement: a set-up or clean-up line, a variable, a setting, or nothing."""

from __future__ import annotations

import copy
import os
import re
import shlex
from collections.abc import Set
from typing import NamedTuple

from hpc_ddp.core.job.variables import is_of_hpc_ddp, is_of_worker
from hpc_ddp.submission.job_script.bash.quotes import without_quoted_texts
from hpc_ddp.submission.job_script.bash.values import doubts_in, is_command, is_known
from hpc_ddp.submission.job_script.bash.variables import OF_A_JOB
from hpc_ddp.submission.job_script.bash.words import Word
from hpc_ddp.submission.job_script.conversion import LOST, OURS, TAKEN, Conversion
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.launchers.option_names import is_option_of_step
from hpc_ddp.submission.job_script.secrets import MARK, is_secret
from hpc_ddp.submission.job_script.statements.loaded_texts import names_of_files, sentences_on
from hpc_ddp.submission.job_script.statements.reader import Reader
from hpc_ddp.submission.job_script.statements.reader_state import OF_ARGUMENTS
from hpc_ddp.submission.job_script.statements.refusals import Refusals
from hpc_ddp.submission.job_script.statements.rules import (
    DECIDED,
    ON_EXIT,
    PRINTS,
    depends_on_folder,
)
from hpc_ddp.submission.job_script.statements.statement import Statement, first_load, with_functions

# In the text of a command line: an option, a program, or a launcher.
_OF_A_COMMAND = re.compile(r"(?:^|[\s=\"'])(?:--?\w|\S+\.py\b|srun|torchrun|python|accelerate)")
# A suffix [1] of the first node's name, as in MASTER_ADDR=$(scontrol …)-ib and MASTER_ADDR=${A}i.
_SUFFIX = re.compile(
    r"MASTER_ADDR=[\"']?(?:\$\(.*\)|`.*`|\$\{?(?:MASTER_ADDR|\w*(?:nodes?|hosts?|head)\w*)(?:\[0\])?\}?)"
    r"[\"']?(i|-[a-z][\w-]*)[\"']?",
    re.I | re.S,
)
# A variable that a line's text reads, also in quotes, by printenv, and by Python.
_READS = re.compile(r"(?:\$\{?|environ\W+|getenv\W+|\bprintenv\s+)([A-Z]\w*)")


class Fate(NamedTuple):
    """The fate of a statement: its group (TAKEN, OURS or LOST); the reason, for TAKEN mostly a key
    of the project file; and the set-up or clean-up line that it becomes, '' for none."""

    group: str
    reason: str
    line: str = ""


class Sorter:
    """Sorts the statements of `reader` into set-up and clean-up lines, variables, and others, in
    `result`, where each line gets a group (TAKEN, OURS or LOST) and a reason.

    A line stays if it does something; an assignment stays if it is exported, or if the launch or a
    line that stays needs its variable. So the assignments of the rendezvous go. `start` is the path
    of the folder that the job starts in, `name` the script's file name or ''. `launch` is the
    training, None without one, and `at` the index of its statement.
    """

    def __init__(
        self, reader: Reader, result: Conversion, launch: Launch | None, at: int, start: str,
        name: str,
    ) -> None:  # fmt: skip
        self.result, self._start = result, start
        self.launch, self._launch_at = launch, at
        self._refusals = Refusals(reader, launch, at, name)
        self._statements = reader.statements
        self._not_set, self._shell_names = reader.scope.not_set, reader.scope.shell_names
        self._numbers = reader.scope.numbers
        # Variables that tasks set, and those that hold command lines.
        self._of_tasks = {s.name for s in self._statements if s.name and s.in_task}
        self._commands = {
            s.name for s in self._statements
            if s.name and isinstance(s.assigned, Word) and is_command(s.assigned)
            and _OF_A_COMMAND.search(s.assigned.text)
        }  # fmt: skip
        self.kept: set[str] = set()  # variables and functions that lines which stay set
        self._kept_in_the_end: set[str] = set()
        # Variables and functions that the launch or a line that stays needs.
        self._needed: set[str] = set()
        self._in_launch: set[str] = set()  # variables whose values stand in the launch
        self._first_load = first_load(self._statements)
        self._of_files: Set[str] | None = frozenset()  # names in files that lines load; None: any

    def take_statements(self) -> None:
        """Put all statements but the launch, and each line's group, into `result`. Set `lost` and
        `decided` of all statements, and ``result.unknown``. To be called once."""
        self.result.unknown, self._launch_at = self._refusals.set_reasons()
        names = {n for word in self.launch.words for n in word.names} if self.launch else set()
        self._needed |= {n for n in names if not is_of_hpc_ddp(n) or n in self._refusals.assigned}
        lines_of_ours = [s for s in self._statements if not (s.lost or s.decided)]
        traps = (s for s in lines_of_ours if ON_EXIT.match(s.text))
        # A trap may call functions that are defined behind it.
        self._needed |= {name for trap in traps for name in trap.names}
        # Which variables stay is known when all statements are sorted; prints depend on it.
        trial = copy.copy(self)
        trial.__dict__ |= {name: {*s} for name, s in vars(self).items() if isinstance(s, set)}
        trial.result = copy.deepcopy(self.result)
        trial._sort_statements()
        self._kept_in_the_end = trial.kept
        self._sort_statements()

    def _sort_statements(self) -> None:
        """Sort all statements but the launch into `result`."""
        lines: list[tuple[str, str, int]] = []
        back = self._find_return()
        # From the last statement on: later ones tell which variables are needed.
        for index, statement in reversed([*enumerate(self._statements)]):
            if statement.launch is None or statement.lost:
                group, reason, text = self._decide_fate(statement, index)
                self.result.mark(*statement.lines, group, reason)
                if text:  # then the reason is its key
                    lines.append((reason, text, statement.lines[0]))
            elif statement.launch is self.launch:
                self._in_launch = statement.names
                self.result.mark(*statement.lines, TAKEN, "the launch")
            has_line = any(key == "teardown" and not PRINTS.match(text) for key, text, _ in lines)
            if index == back and has_line:
                lines.append(("teardown", f"cd {shlex.quote(self._start)}", statement.lines[0]))
        for key, text, line in reversed(lines):
            self.result.append(key, text, line)
        self.result.env = dict(reversed(self.result.env.items()))

    def _find_return(self) -> int:
        """Return the index of the first statement behind ``(cd DIR; srun …)``, a child shell with
        the launch and a ``cd`` in it: there bash is back in the folder before. -1 without one."""
        shells = self._statements[self._launch_at].shells if self.launch else ()
        for index, statement in enumerate(
            self._statements[self._launch_at + 1 :], self._launch_at + 1
        ):
            ended = {*shells[len(statement.shells) :]}
            inner = {s.first for s in self._statements if ended & {*s.shells} and not s.in_task}
            if {"cd", "pushd"} & inner:
                return index
        return -1

    def _decide_fate(self, statement: Statement, index: int) -> Fate:
        """Return what becomes of a statement, of an `index`. Put its variable or ``chdir`` into
        `result`, and add the names that it needs to `_needed`, by which earlier statements are
        judged: call it for the last statement first. The caller adds its set-up or clean-up
        line."""
        is_after = index > self._launch_at
        is_print = bool(PRINTS.match(statement.text))
        if statement.lost == OF_ARGUMENTS and self._is_unused(statement):
            return Fate(OURS, "nothing that is left needs it")
        if statement.lost or statement.decided:
            group = LOST if statement.lost else OURS
            return Fate(group, statement.lost or statement.decided)
        if statement.name:
            return self._decide_assignment(statement, index)
        is_of_ours = not statement.defines and all(map(is_of_hpc_ddp, statement.sets))
        if statement.sets and is_of_ours and not statement.sets & self._needed:
            return Fate(OURS, "it changes what hpc-ddp decides")
        if statement.defines and statement.defines not in self._needed:
            return Fate(OURS, "a function that nothing calls")
        if reason := self._refusals.find_reason(DECIDED, statement, is_after):
            return Fate(OURS, reason)
        if is_print and (self._prints_left_out(statement) or (statement.in_task and is_after)):
            is_launch = bool(statement.names & self._in_launch & self._commands)
            content = "the launch's text" if is_launch else "a variable that is left out"
            return Fate(OURS, f"it prints {content}")
        if statement.in_task and is_after:
            return Fate(LOST, "after the program, in each task: there is no such key")
        folder = self._find_folder(statement, index)
        if folder == self._start:
            return Fate(OURS, "the job runs there already")
        if folder:
            self._set_chdir(folder, statement.lines[0])
            for text in sentences_on(doubts_in(statement.words[1])):
                self.result.note(statement.lines[0], text)
            return Fate(TAKEN, "chdir")
        return self._keep_as_line(statement, statement.text, is_after)

    def _is_unused(self, statement: Statement) -> bool:
        """Return whether a statement assigns a variable that nothing uses: it is not exported, and
        neither the launch, a file that a line loads, nor another statement needs it. False without
        a launch."""
        needs = {n for s in self._statements if s is not statement for n in s.names}
        is_local = statement.name and not statement.exported and self._of_files is not None
        return bool(is_local and self.launch and statement.name not in self._needed | needs)

    def _keep_as_line(self, statement: Statement, text: str, is_after: bool) -> Fate:
        """Return the fate of a statement that becomes a set-up line, or with `is_after` a clean-up
        line, of its `text`. Add the names that it sets to `kept`, and those that it needs to
        `_needed`; the batch script's variables in the line of a task go to ``expand``."""
        key = "teardown" if is_after else "setup"
        text = self._limit_line(statement, text)
        if statement.in_task:
            key = "node-setup" if self.launch and self.launch.kind else "worker-setup"
            of_loops = set(re.findall(r"\bfor (\w+) in\b", text))
            for name in sorted(statement.names - self._of_tasks - of_loops):
                # `expand` exports it for the task.
                if not OF_A_JOB.fullmatch(name) and f"${name}" in text.replace("{", ""):
                    self.result.append("expand", name, statement.lines[0])
        self.kept |= {statement.name, statement.defines, *statement.sets}
        self._note_needs(statement, is_after)
        return Fate(TAKEN, key, text)

    def _limit_line(self, statement: Statement, text: str) -> str:
        """Return the `text` of a line as it can run in the job, with a note where it changes: a
        trap for the script's end and for signals becomes one for the end alone; a statement with a
        `limit` becomes ``[ TEST ] || { …; }``."""
        trap = ON_EXIT.fullmatch(text)
        if trap and {*trap["signals"].split()} - {"EXIT", "0"}:
            text = f"{trap['trap']} EXIT"
            reason = "signals of the trap are left out: notices reach the workers"
            self.result.note(statement.lines[0], reason)
        test, reason = statement.limit
        if test:
            end = "\n" if re.search("<<|&$", text) else "; "
            text = f"{test} || {{ {text}{end}}}"
            self.result.notes += [(statement.lines[0], reason)] * bool(reason)
        return text

    def _note_needs(self, statement: Statement, is_after: bool) -> None:
        """Add the variables and functions that a line needs, by itself and by functions that it
        calls, to `_needed`, and those of a file that it loads to `_of_files`; the latter not for a
        clean-up line (`is_after`), behind which nothing is set any more."""
        functions = self._refusals.functions
        self._needed |= {name for s in with_functions(statement, functions) for name in s.names}
        # Also in the quoted text of another shell, or by a program of the line.
        self._needed |= {name for name in _READS.findall(statement.text) if is_of_hpc_ddp(name)}
        has_moves = any(s.first in ("cd", "pushd") for s in self._statements)
        folder = "" if has_moves else self._start  # '': relative paths are not known
        of_files = frozenset() if is_after else names_of_files(statement, folder)
        is_any = self._of_files is None or of_files is None
        self._of_files = None if is_any else self._of_files | of_files  # type: ignore[operator]

    def _prints_left_out(self, statement: Statement) -> bool:
        """Return whether a print, not into a file or another command, names a variable that is left
        out: one of hpc-ddp's, but for Slurm's; one of a command line in the launch; or one that no
        line needs, that only bash knows, and by which the workers meet (`Refusals.is_of_launch`).
        """
        values = {name: s.assigned for name, s in self._refusals.assigned.items() if not s.exported}
        lines = (s for s in self._statements if not (s.name or s.launch or s.lost or s.decided))
        of_lines = {name for s in lines if not PRINTS.match(s.text) for name in s.names}
        code = without_quoted_texts(re.sub(r"\"[^\"]*\"", "", statement.text))  # not in quotes
        if re.search(r">|\btee\b|[;|&]", code):
            return False
        unneeded = values.keys() - self._needed - self._kept_in_the_end - of_lines
        unknown = (name for name in unneeded & statement.names if not is_known(values[name]))
        left_out = {name for name in unknown if self._refusals.is_of_launch(name)}
        left_out |= self._in_launch & self._commands
        names = statement.names - self._needed
        is_of_ours = any(is_of_hpc_ddp(n) and not n.startswith("SLURM") for n in names)
        return is_of_ours or bool(statement.names & left_out)

    def _find_folder(self, statement: Statement, index: int) -> str:
        """Return the folder of a ``cd FOLDER`` or ``cd FOLDER || exit`` if it is known, and can be
        the job's from its start: no other line before the launch changes the folder, and none
        before this one, of an `index`, names a file by a relative path, unless the folder is that
        of the job's start. '' for any other statement. The home folder is ``~``."""
        before = self._statements[: self._launch_at]
        moves = [s for s in before if re.search(r"(^|[\s;&])(cd|pushd|popd)\b", s.text)]
        match = re.fullmatch(r"cd (\S+?)/?(\s*\|\|\s*(exit|\{).*)?", statement.text, re.S)
        if not match or moves != [statement] or statement.in_task or len(statement.words) != 2:
            return ""
        word = statement.words[1]
        text = re.sub(r"^\$\{?HOME\}?", "~", word.text)
        is_relative = any(
            depends_on_folder(s.text, bool(s.name))
            for s in before[:index]
            if not (s.defines or (isinstance(s.assigned, Word) and is_known(s.assigned)))
        )
        if is_relative and text != self._start:
            return ""
        return text if "$" not in text and (word.is_static or text[:1] == "~") else ""

    def _set_chdir(self, folder: str, line: int) -> None:
        """Set ``chdir`` to `folder`, of a `line`; where a directive has set it, to an absolute path
        from there. Relative ``output`` and ``error`` become absolute, from the folder that the
        script starts in: Slurm would open them in ``chdir``."""
        values, is_moved = self.result.values, "chdir" in self.result.values
        for key in {"output", "error"} & values.keys():
            name, at = values[key]
            values[key] = os.path.normpath(os.path.join(self._start, name)), at
        path = os.path.join(self._start, os.path.expanduser(folder)) if is_moved else folder
        values["chdir"] = path, line

    def _decide_assignment(self, statement: Statement, index: int) -> Fate:
        """Return what becomes of an assignment, and put a variable that is used into `result`
        (`_write_variable`). A secret's value goes to ``result.secrets``, and its name to
        ``env-names`` if it is used; so does a placeholder, ``<yours>``."""
        name, assigned = statement.name, statement.assigned
        content = assigned.text if isinstance(assigned, Word) else ""
        is_used = self._is_used(statement)
        if suffix := _SUFFIX.fullmatch(statement.text):
            self.result.values.setdefault("host-suffix", (suffix[1], statement.lines[0]))
        self._in_launch |= statement.names if name in self._in_launch else set()
        if is_secret(name, content) or content.startswith("<"):
            self.result.secrets[name] = content
            if is_used:
                self.result.append("env-names", name, statement.lines[0])
            return Fate(LOST, MARK.format(name))
        if statement.exported and is_option_of_step(name):
            of_job = re.sub("^SRUN_", "SLURM_", name)
            form = rf"{self._numbers.get(of_job)}|(\w+=)?\"?\$\{{?{of_job}(:?-[^{{}}]*)?\}}?\"?"
            is_the_jobs = any(re.fullmatch(form, text) for text in (content, statement.text))
            is_the_jobs |= (name, content) == ("SLURM_EXPORT_ENV", "ALL")
            if name == "SLURM_UNBUFFEREDIO":
                return Fate(OURS, "the output has no buffer")
            if name.endswith("CPUS_PER_TASK") or is_the_jobs:
                self.kept.add(name)
                return Fate(OURS, "the step has the job's numbers, and its variables")
            if name == "SLURM_CPU_BIND" and is_known(assigned):
                options = self.launch.settings.get("srun", []) if self.launch else []
                if any(option.text.startswith("--cpu-bind") for option in options):
                    return Fate(OURS, "srun has the option itself")
                self.result.append("srun", f"--cpu-bind={content}", statement.lines[0])
                return Fate(TAKEN, "--cpu-bind of srun")
            if name == "SLURM_JOB_NAME":  # srun ignores it in a job
                text = "the program alone reads it: job-name = … names the job"
                self.result.note(statement.lines[0], text)
                return self._keep_as_line(
                    statement, f"export {statement.text}", index > self._launch_at
                )
            text = f"{name} would change hpc-ddp's step: an option of srun in its place"
            return Fate(LOST, text)
        if name == "IFS":  # it says how bash splits the lines behind it
            return self._keep_as_line(statement, statement.text, index > self._launch_at)
        if is_of_hpc_ddp(name) and (name not in self._needed or statement.in_task):
            reason = f"workers have hpc-ddp's {name}, if any"
            return Fate(TAKEN, "host-suffix") if suffix else Fate(OURS, reason)
        if is_used or statement.in_task:
            return self._write_variable(statement, index, is_used)
        if not statement.of_script:
            return Fate(TAKEN, "the launch")
        words = [assigned] if isinstance(assigned, Word) else assigned or []
        arguments = " ".join(word.text for word in self.launch.args) if self.launch else ""
        is_argument = bool(words) and all(w.text and w.text in arguments for w in words)
        if is_known(assigned) or (name in self._in_launch and is_argument):
            return Fate(TAKEN, "its value, where it is used")
        return Fate(OURS, "nothing that is left needs it")

    def _is_used(self, statement: Statement) -> bool:
        """Return whether an assignment has to stay: it is exported, the launch or a line that stays
        needs its variable, or a file that a line loads may. A variable that holds the launch's
        command line need not stay because it is exported."""
        name = statement.name
        is_only_in_launch = name in self._in_launch & self._commands and not statement.in_task
        is_of_batch = statement.of_script and not (statement.in_task or is_of_hpc_ddp(name))
        is_of_file = is_of_batch and (self._of_files is None or name in self._of_files)
        is_exported = statement.exported and not is_only_in_launch
        return is_exported or name in self._needed or is_of_file

    def _write_variable(self, statement: Statement, index: int, is_used: bool) -> Fate:
        """Put the variable of an assignment into `result`, and return what becomes of that.

        If `is_used`, one that the submitting shell passes on goes to ``env-names``, and one for
        ``env`` (`_is_for_env`) goes there. Any other becomes a set-up or clean-up line, in which it
        is exported where the script does so, or where tasks need it.
        """
        name, assigned, line = statement.name, statement.assigned, statement.lines[0]
        value_text = statement.text.partition("=")[2]
        # A=$A and A=${A:-}, the first time that A is set; with a default, only if the shell has A.
        is_passed = re.fullmatch(rf'"?\$(?:{name}|\{{{name}(?::?-)?\}})"?', value_text)
        is_first = not any(name in {s.name, *s.sets} for s in self._statements[:index])
        is_needed = "-" not in value_text or name in self._shell_names
        if is_used and is_passed and is_needed and is_first and index < self._first_load:
            self.result.append("env-names", name, line)
            return Fate(TAKEN, "env-names")
        if is_used and self._is_for_env(statement, index) and isinstance(assigned, Word):
            self.result.env[name] = assigned.text, line
            self.kept.add(name)
            for variable in assigned.names:
                self.result.append("expand", variable, line)
            return Fate(TAKEN, "env")
        is_exported = statement.exported or statement.in_task
        text = f"export {statement.text}" if is_exported else statement.text
        return self._keep_as_line(statement, text, index > self._launch_at)

    def _is_for_env(self, statement: Statement, index: int) -> bool:
        """Return whether an assignment can stand in ``[env]``, which is set before the set-up lines
        run. For that it must be

        - an export of the batch script, and its name neither a secret's nor one of hpc-ddp's
        - in front of any line that loads a file or module, and of other lines that have its name
        - of text and plain names of variables that each job has, that the script does not set, and
          that are the same on all nodes
        """
        assigned, name = statement.assigned, statement.name
        if not isinstance(assigned, Word) or is_secret(name) or is_of_hpc_ddp(name):
            return False
        is_earlier = any(name in {s.name, *s.names, *s.sets} for s in self._statements[:index])
        is_late = is_earlier or index > self._first_load
        if is_late or statement.in_task or not statement.exported:
            return False
        if any(map(is_of_worker, statement.names)):
            return False
        set_in_script = {name, *self._refusals.assigned, *self._not_set}
        names = [part.name for part in assigned.code]  # '' for code that is no plain name
        return all(OF_A_JOB.fullmatch(n) and n not in set_in_script for n in names)
