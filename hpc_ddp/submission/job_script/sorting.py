"""The statements of a job script: set-up lines, variables, the launch, and the rest."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from hpc_ddp.core.job.checks import SECRET_NAME, URL_WITH_PASSWORD
from hpc_ddp.core.job.variables import OF_A_RANK, is_of_hpc_ddp
from hpc_ddp.submission.job_script.conversion import LOST, OURS, TAKEN, Conversion
from hpc_ddp.submission.job_script.launch import Launch
from hpc_ddp.submission.job_script.shell import Word, names_in
from hpc_ddp.submission.job_script.statements import Reader, Statement

# A job has these whatever its script does.
_OF_A_JOB = re.compile(
    rf"SLURM\w*|HOME|USER|LOGNAME|TMPDIR|HOSTNAME|CUDA_VISIBLE_DEVICES|{OF_A_RANK}"
)
_OF_RENDEZVOUS = re.compile(
    r"(RDZV|RDVZ)_?\w*|MASTER\w*|(?i:head_node\w*|nodes?_?(list|array|rank)?)"
)
_DANGEROUS = re.compile(r"\brm\s+-\w*[rf]|\b(pkill|killall|scancel|ssh|pdsh|clush)\s|^kill\s")
_SELF_REQUEUE = re.compile(
    r"scontrol\s+requeue|sbatch\s.*(\$0|BASH_SOURCE)|\bsbatch\b.*--dependency"
)
_PRINTS = re.compile(r"(echo|printf|date|env|printenv|set|hostname|nvidia-smi|module list|which)\b")
_BRINGS = re.compile(r"\s*(module|ml|source|\.|conda|spack|eval)\s")
_OF_PATHS = re.compile(r"(\w*PATH|\w*_(HOME|ROOT|DIR|PREFIX|LIB)|LD_\w+)")
_NO_SECRET = r"(?i:true|false|none|null|yes|no|offline|disabled|auto)\b|[\d.]+\b|[{$\"'<>/~-]"
_SECRET = re.compile(
    rf"(?:hf_|ghp_|sk-)\w{{16,}}|AKIA\w{{16}}|wandb\s+login\s+(?:--\w+ )*\w{{16,}}"
    rf"|{URL_WITH_PASSWORD}|\b\w*(?i:{SECRET_NAME})(?:=|\s+)[\"']?(?!{_NO_SECRET})[^\s\"']{{4,}}"
)


class Sorter:
    """Sorts statements into set-up lines, variables, and the rest."""

    def __init__(
        self, reader: Reader, result: Conversion, numbers: Mapping[str, int], cwd: Path,
        environ: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.result = result
        self._statements = reader.statements
        self._numbers, self._cwd, self._environ = numbers, cwd, environ
        self._assigned = {s.name for s in self._statements if s.name}
        self._static = {s.name for s in self._statements if _is_static(s.assigned)}
        self._spliced = reader.scope.spliced
        result.unknown |= reader.of_nodes
        self._brought = False  # after a line that brings variables of its own
        self.launch: Launch | None = None
        self._at = len(self._statements)
        self._needed: set[str] = set()
        self._needed_after: set[str] = set()  # by clean-up lines: a shell of their own
        self._inner = {s.name for s in self._statements if s.name and s.inside}

    def take_statements(self) -> None:
        """Take all statements: the launch, what it needs, what comes before and after it."""
        self.result.unknown |= {s.name for s in self._statements if s.name and s.lost}
        self._choose()
        brings = [i for i, s in enumerate(self._statements) if s.words and _BRINGS.match(s.text)]
        lines: list[tuple[Statement, str, str]] = []
        for index in range(len(self._statements) - 1, -1, -1):
            statement = self._statements[index]
            self._brought = any(i < index for i in brings)
            if statement.launch is not None and statement.launch is self.launch:
                self._mark(statement, TAKEN, "the launch")
                continue
            key, line = self._sort(statement, index)
            if key:
                lines.append((statement, key, line))
        for statement, key, line in reversed(lines):
            self.result.append(key, line, statement.lines[0])
        self.result.env = dict(reversed(self.result.env.items()))

    def _choose(self) -> None:
        """Choose the launch that is the training; others are lost, but for the same on other
        nodes and plain Python before it."""
        launches = [(i, s) for i, s in enumerate(self._statements) if s.launch and not s.lost]
        if not launches:
            self.result.notes.append((0, "no launch of a training was found: name the script with"
                                      " script = …"))  # fmt: skip
            return
        best = max(s.launch.weight for _, s in launches if s.launch)
        same = [(i, s) for i, s in launches if s.launch and s.launch.weight == best]
        # One on the first node and others elsewhere, each with words of its own, are no training.
        heads = [
            s for _, s in same if s.launch and self._is_partial(s.launch) and s.launch.node_words
        ]
        complete = [(i, s) for i, s in same if s.launch and not self._is_partial(s.launch)]
        complete = [] if heads else complete
        self._at, chosen = (complete or same)[0]
        self.launch = chosen.launch
        assert self.launch is not None
        for index, statement in launches:
            if statement is chosen or statement.launch is None:
                continue
            is_small = statement.launch.weight < best or (index, statement) not in complete
            if index < self._at and is_small and not self._is_partial(self.launch):
                statement.launch = None  # a preparation
            elif statement.launch.identity == self.launch.identity:
                self.launch.node_words = True
                self._mark(statement, OURS, "the same launch on other nodes")
            else:
                statement.lost = (
                    "a second launch: a job has one; submit this one as a job of its own"
                )
        nodes = self._numbers.get("SLURM_NNODES", 1)
        only = self.launch.nodes or (0 if self.launch.step else 1)
        twin = any(s.launch and s is not chosen and not s.lost for _, s in launches)
        if 0 < only < nodes and not twin and chosen.launch and not self.launch.in_loop:
            chosen.lost = (f"a launch on {only} of {nodes} nodes: hpc-ddp starts the program on all"
                           " of them")  # fmt: skip
            if self.launch.step:
                self._mark(chosen, LOST, chosen.lost)
                self.launch = None
                return
            self.result.notes.append((chosen.lines[0], chosen.lost))
            chosen.lost = ""
        words = [*self.launch.args, *self.launch.env.values()]
        words += [word for entries in self.launch.settings.values() for word in entries]
        words += [self.launch.program] if self.launch.program else []
        self._needed = {name for word in words for name in word.names if name in self._assigned}
        if chosen.output:
            self.result.notes.append((chosen.lines[0], f"its output is in the run's log, not in"
                                      f" {chosen.output}: hpc-ddp logs"))  # fmt: skip

    def _is_partial(self, launch: Launch) -> bool:
        """Return whether a launch has fewer tasks than the job has nodes, and is no node's part."""
        nodes = self._numbers.get("SLURM_NNODES", 1)
        count = launch.nodes or (launch.tasks if not launch.kind else None) or nodes
        return count < nodes and not launch.in_loop

    def _mark(self, statement: Statement, group: str, text: str) -> None:
        self.result.mark(*statement.lines, group, text)

    def _sort(self, statement: Statement, index: int) -> tuple[str, str]:
        """Note what becomes of a statement, and return the key and line of a set-up line; '' for
        another."""
        is_after = index > self._at
        if statement.launch is not None and not statement.lost:
            return "", ""  # noted by `_choose`
        if statement.lost:
            self._mark(statement, LOST, statement.lost)
        elif statement.name:
            return self._assignment(statement, is_after)
        elif statement.defines:
            if statement.defines in self._needed:
                return self._keep(statement, is_after)
            self._mark(statement, OURS, "a function that nothing calls")
        elif statement.assigns and all(is_of_hpc_ddp(name) for name in statement.assigns):
            self._mark(statement, OURS, "it changes what hpc-ddp decides")
        elif _SELF_REQUEUE.search(statement.text):
            self._mark(statement, OURS, "the job is requeued until it has finished")
        elif statement.first == "trap":
            self._mark(
                statement, LOST, "a trap: notices reach the workers; clean-up: teardown = […]"
            )
        elif _DANGEROUS.search(statement.text):
            self._mark(
                statement, LOST, "it deletes or ends something: setup or teardown, if needed"
            )
        elif statement.first in ("wait", "exit") or (is_after and statement.first == "sleep"):
            self._mark(statement, OURS, "hpc-ddp waits for the workers, and ends the job")
        elif re.fullmatch(r"cd \S*SLURM_SUBMIT_DIR\S{,2}", statement.text):
            self._mark(statement, OURS, "the job runs where it is submitted")
        elif statement.first == "cd" and (folder := self._folder(statement, index)):
            self.result.values["chdir"] = folder, statement.lines[0]
            self._mark(statement, TAKEN, "chdir")
        elif statement.first == "cd" and "chdir" in self.result.values and not is_after:
            self._mark(statement, OURS, "a later cd counts")
        elif (
            _PRINTS.match(statement.text)
            and not statement.inside
            and self._dropped(statement.names)
        ):
            self._mark(statement, OURS, "it prints what hpc-ddp decides")
        else:
            return self._keep(statement, is_after)
        return "", ""

    def _keep(self, statement: Statement, is_after: bool, text: str = "") -> tuple[str, str]:
        """Return the key and the text of a set-up or clean-up line, and note what it needs."""
        text = text or statement.text
        if _SECRET.search(text):
            self._mark(
                statement, LOST, "it has what looks like a secret: pass it on with --env NAME"
            )
            return "", ""
        key = "teardown" if is_after else "setup"
        if statement.inside:
            key = "node-setup" if self.launch and self.launch.kind else "worker-setup"
            if is_after:
                self._mark(statement, LOST, "after the program, in each task: there is no such key")
                return "", ""
        self._needed |= {*statement.names}
        if is_after:
            self._needed_after |= {*statement.names}
        for name in statement.names if statement.inside else ():  # of the batch script: exported
            is_job_s = _OF_A_JOB.fullmatch(name) or name in (statement.first, *self._inner)
            if not is_job_s and f"${name}" in text.replace("{", ""):
                self.result.append("expand", name, statement.lines[0])
        self._mark(statement, TAKEN, key)
        return key, text

    def _dropped(self, names: Iterable[str]) -> bool:
        """Return whether one of some variables is one that hpc-ddp decides, and nothing else
        needs."""
        return any(
            name in self._assigned and name not in self._static and name not in self._needed
            for name in names
        ) or any(is_of_hpc_ddp(name) and not name.startswith("SLURM") for name in names)

    def _folder(self, statement: Statement, index: int) -> str:
        """Return the folder of a ``cd``, where it is known and no set-up line before it has a
        relative path; '' for another one."""
        if len(statement.words) != 2 or index > self._at or "chdir" in self.result.values:
            return ""
        word = statement.words[1]
        text = re.sub(r"^\$\{?HOME\}?", "~", word.text)
        users = ("source", ".", "bash", "mkdir", "cp", "python")
        before = [s.words[1:] for s in self._statements[:index] if s.first in users]
        relative = any(re.match(r"(?!activate)[\w.]+", w.text) for words in before for w in words)
        is_known = (word.is_static and "=" not in text) or text.startswith("~")
        return "" if relative or not is_known or "$" in text else text

    def _assignment(self, statement: Statement, is_after: bool) -> tuple[str, str]:
        """Take an assignment: a variable of the job, a set-up line, or what others have used."""
        name, assigned, line = statement.name, statement.assigned, statement.lines[0]
        text = f"export {statement.text}" if statement.exported else statement.text
        text = text.replace("export export", "export")
        content = assigned.text if isinstance(assigned, Word) else ""
        is_secret = bool(re.search(SECRET_NAME, name, re.I))
        if (is_secret and content and not re.match(_NO_SECRET, content)) or content.startswith("<"):
            if statement.exported or name in self._needed:
                self.result.append("env-names", name, line)
            self._mark(statement, LOST, _secret(name))
            return "", ""
        is_ours = is_of_hpc_ddp(name) or (
            bool(_OF_RENDEZVOUS.fullmatch(name)) and not statement.inside
        )
        if (is_ours and (name not in self._needed or is_of_hpc_ddp(name))) or (
            is_after and is_ours
        ):
            if name not in self._needed or statement.inside or self._only_in_launch(name):
                self._mark(statement, OURS, f"workers have hpc-ddp's {name}, if any")
                return "", ""
            return self._keep(statement, is_after, text)
        is_spliced = name in self._spliced and bool(re.search(r"\s", content.strip()))
        if is_spliced and name not in self._needed:
            self._mark(statement, TAKEN, "its value, where it is used")
            return "", ""
        if statement.exported or statement.inside:
            if (
                isinstance(assigned, Word)
                and not statement.inside
                and self._is_for_env(name, assigned)
            ):
                if _SECRET.search(assigned.text):
                    self.result.append("env-names", name, line)
                    self._mark(statement, LOST, _secret(name))
                    return "", ""
                if is_secret:  # [env] has no such name
                    return self._keep(statement, is_after, text)
                self.result.env.setdefault(name, (assigned.text, line))
                for variable in assigned.names:
                    self.result.append("expand", variable, line)
                self._mark(statement, TAKEN, "env")
                return "", ""
            if statement.inside and name in self._needed and not text.startswith("export"):
                text = f"export {text}"
            return self._keep(statement, is_after, text)
        if name in self._needed:
            is_exported = name in self._needed_after and not is_after
            return self._keep(statement, is_after, f"export {text}" if is_exported else text)
        if name in self._spliced or _is_static(assigned):
            self._mark(statement, TAKEN, "its value, where it is used")
        else:
            reason = "nothing that is left needs it"
            self._mark(statement, OURS, reason)
        return "", ""

    def _only_in_launch(self, name: str) -> bool:
        """Return whether nothing but the launch needs a variable of hpc-ddp's own."""
        return is_of_hpc_ddp(name) and not any(
            name in s.names for s in self._statements
            if s.launch is None and not s.name and not _PRINTS.match(s.text) and not s.lost
        )  # fmt: skip

    def _is_for_env(self, name: str, assigned: Word) -> bool:
        """Return whether an exported value can stand in ``[env]``, which comes before the set-up
        lines."""
        if assigned.has_code or (self._brought and _OF_PATHS.fullmatch(name)):
            return False
        outer = [
            n
            for n in assigned.names
            if not _OF_A_JOB.fullmatch(n) or n in self._assigned or n == name
        ]
        return not outer

    def take_secrets_out(self) -> None:
        """Take secrets out of arguments and variables; the name of each becomes one that is passed
        on from the shell."""
        result, before = self.result, ""
        result.lists.get("env-names", []).sort(key=lambda entry: entry[1])
        for position, (text, line) in enumerate(result.lists.get("args", [])):
            option, _, inline = text.partition("=")
            name, assigned = (option, inline) if inline else (before, text)
            variable = re.sub(r"\W", "_", name.lstrip("-")).upper()
            is_secret = name.startswith("-") and re.search(rf"(?:{SECRET_NAME})$", name, re.I)
            is_plain = not assigned or re.match(_NO_SECRET, assigned)
            if not is_plain and (is_secret or _SECRET.match(assigned)):
                variable = variable if is_secret else "SECRET"
                result.lists["args"][position] = (
                    f"{option}=${variable}" if inline else f"${variable}", line)  # fmt: skip
                result.append("env-names", variable, line)
                result.append("expand", variable, line)
                result.mark(line, line, LOST, _secret(variable))
            before = text
        for name, (text, line) in [*result.env.items()]:
            if re.search(SECRET_NAME, name, re.I) or re.search(URL_WITH_PASSWORD, text):
                del result.env[name]
                result.append("env-names", name, line)
                result.mark(line, line, LOST, _secret(name))
        for name in {n for text, _ in result.lists.get("args", []) for n in names_in(text)}:
            set_up = any(f"{name}=" in line for line, _ in result.lists.get("setup", []))
            is_known = _OF_A_JOB.fullmatch(name) or set_up or name in self._assigned
            is_known = is_known or self._brings_any()
            if not is_known and name in [
                assigned for assigned, _ in result.lists.get("expand", [])
            ]:
                result.append("env-names", name, 0)
                result.notes.append(
                    (0, f"${name} is not set in the script: export it before you submit")
                )

    def _brings_any(self) -> bool:
        return any(s.words and _BRINGS.match(s.text) for s in self._statements)


def _is_static(assigned: Word | list[Word] | None) -> bool:
    if isinstance(assigned, list):
        return all(word.is_static for word in assigned)
    return assigned is not None and assigned.is_static


def home_of(text: str, environ: Mapping[str, str]) -> str:
    """Return a path with the home folder for ``~`` and ``$HOME``."""
    text = re.sub(r"^\$\{?HOME\}?(?=/|$)", environ.get("HOME", "~"), text)
    return os.path.expanduser(text)


def _secret(name: str) -> str:
    return f"a secret's value is not written: export {name} in your shell; as --env {name}"
