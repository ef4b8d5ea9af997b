"""Rules by the text of a line: what can't be taken over (`REFUSED`), and what hpc-ddp does itself
(`DECIDED`), each with the reason; and patterns that other modules use for the same texts."""

from __future__ import annotations

import re
from typing import NamedTuple

from hpc_ddp.submission.job_script.conversion import NO_COMPONENTS

# A line that starts a Python program, or a module that may train: python train.py, python -m train.
STARTS_PYTHON = (
    r"(?!\w+=(?![\w./:,-]*\s)|(echo|printf|log)\b).*\bpython[\d.]*\s+(-[A-Za-ln-z]\s+)*"
    r"([^\s-]\S*\.py\b|-m\s+(?!pip|venv|site|json)\S)"
)
DELETES = "it deletes something: setup or teardown, if needed"
PLACEHOLDER = "a placeholder: write your own"
BLANK_VALUE = "bash takes no value behind a blank: NAME=VALUE; a secret is exported in your shell"
VERDICT = "hpc-ddp says how the launch ended, and ends the job by that"
# What stands for the launch in a clean-up line that asks for its exit code.
ENDED = 'case "$HPC_DDP_VERDICT" in finished) ;; failed) false ;; *) exit ;; esac'
TRAINS_BEHIND = "it may start a training: name its program in script, or submit it as its own job"
PRINTS = re.compile(
    r"(echo|printf(?!\s+-v)|date|printenv|hostname|nvidia-smi|module list|which)\b"
    r"|(set|env)\s*($|[|>;])"
)
# A trap that prints how a command has failed, and may end the script.
_ONE_PRINT = (
    r"\s*(\w+=\$\?|(echo|printf|date|exit)\b"
    r"(\\.|\$\((date|hostname)[^()`$]*\)|[12]?>&2|\$[\w?{!]|(?!(?P=quote))[^\\$`<>|&;\n])*)"
)
_PRINTING = rf"(?P<quote>[\"']){_ONE_PRINT}([;\n]+{_ONE_PRINT})*[;\s]*"
PRINTS_ON_ERROR = rf"trap\s+(--\s+)?{_PRINTING}(?P=quote)\s+ERR"
_PRINTS_ON_SIGNAL = (
    rf"trap\s+(--\s+)?{_PRINTING.replace('quote', 'mark')}(?P=mark)"
    r"(\s+(SIG)?(INT|TERM|HUP|QUIT|USR[12]|[1-3]|15))+\s*$"
)
# A trap for the script's end, which may name signals as well.
ON_EXIT = re.compile(
    r"(?P<trap>trap\s+(--\s+)?('[^']*'|\"(\\.|[^\"\\])*\"|[\w-]+))(?=(\s+\w+)*?\s+(EXIT|0)\b)"
    r"(?P<signals>(\s+[A-Z\d]+)+)\s*(\n|$)"
)
# Words of `rm` behind its options, all of which name what is temporary.
_TEMPORARY = (
    r"(\s+[\"']?(?!\S*\.\.)(/tmp/|/dev/shm/|\$\{?(SLURM_)?TMPDIR\b|\$\{?\w*(TMP|TEMP|CACHE)\w*\b)"
    r"[^\s;&|]*)+(\s*\d?>+&?\s*\S+)*\s*([;&|)\n]|$|(EXIT|0)\b)"
)
# A line that does no more than delete files or folders with names, but not those of runs.
ONLY_DELETES = re.compile(
    r"rm(\s+-\w+)*(\s+[\"']?(?!\S*\.\.|\S*\bruns\b)([\w.${}~-]*/)*\w[\w.*-]*(/|/\*)?[\"']?(?=\s|$))+"
    r"(\s*\d?>+&?\s*\S+)*(\s*\|\|\s*(true|:))?"
)
# Whether a run, or the task of an array that it is, may have had an attempt: nothing is deleted
# where that can't be known.
ATTEMPTED = '[ "${HPC_DDP_FIRST_START-}" != yes ]'


class Limit(NamedTuple):
    """When a set-up or clean-up line does not run: the test of bash that leaves it out, '' for
    none; and the note on it for the user."""

    test: str = ""
    note: str = ""


ONCE = Limit(ATTEMPTED, "deletes in the first attempt alone: later ones go on with what is there")
FINALLY = Limit(
    '[ "$HPC_DDP_VERDICT" != finished ]',
    "a second launch: teardown starts it once the training has finished; it is not requeued",
)
# A job submits itself: by its name, or, behind another one, by a variable.
REQUEUES = (
    r"scontrol\s+requeue|\bsbatch\s[^\n;]*(\$\{?0|BASH_SOURCE"
    r"|(--dependency|-d)\b[^\n;]*\s[\"']?\$\{?(?!SLURM_JOB_?ID)\w+\}?(?![\w/.]))"
)
# Texts that a command prints, as one on the script's usage, messages of ${A:?…}, here-documents and
# comments: no command is in them.
PRINTED_TEXT = re.compile(
    r"\b(echo|printf|log\w*|die|fail|warn|error|usage)\s+(-\w+\s+)*"
    r"(\"(\\.|[^\"\\`$]|\$(?!\()|\$\((date|pwd|hostname|whoami)[^()\"]*\))*\"|'[^']*')|\{\w+:?\?[^{}`$]*\}|<<-?\s*[\"']?(?P<end>\w+)[\"']?\n.*?^\s*(?P=end)$|^\s*#.*?$",
    re.S | re.M,
)
# A here-document that a command writes into a file.
_WRITTEN_TEXT = re.compile(
    r"\b(?:cat|tee)\b(?=[^\n]*>)[^\n]*<<-?\s*[\"']?(\w+)[\"']?[^\n]*\n.*?^\s*\1$", re.S | re.M
)
# Names of commands that a printed text may have.
_NAMES_COMMAND = re.compile("sbatch|scancel|pkill|killall|ssh|pdsh|clush")
# A line that names a file by a relative path; an environment's name is no path.
RELATIVE = re.compile(
    r"\$\{?PWD\b|\bpwd\b|^(?!module|ml|conda|spack|echo|printf|export|\w+=).*?"
    r"(?:[\s\"'(](?![-/~$])[\w.-]+/[\w.]|\b(?:bash|python3?|mkdir|cp|cat)\s+(?:-[pvrRfam]+\s+)*(?![-/~$\"'])[\w.]"
    r"|>\s*\w)|^(?:source|\.)\s+(?!activate\b)[\w.]",
    re.S,
)
# Commands that read or write files of the folder that they run in, whatever their words are.
_OF_FOLDER = re.compile(
    r"(?:^|[;&|({\n]\s*|\b(?:if|then|do)\s+)(?:\.{1,2}/|(?:sh|git|make|cmake|tar|unzip|wget|uv|touch)\s"
    r"|wandb\s+(?!login)|pip3?\s+install\s[^\n;&|]*(?:-e|-r|\s\.)|python[\d.]*\s+-c\s"
    r"|\[\[?\s+(?:!\s+)?-[defrsx]\s+[\"']?[\w.])|\bactivate\s+\.{1,2}/"
)
_BEFORE, _AFTER, _AROUND = (False,), (True,), (False, True)  # places: values of `is_after`
_ON_HOSTS = "it runs something on other hosts: node-setup, if needed"
# A text each of whose ssh makes folders or copies files, and which starts or ends nothing.
_COPIES_BY_SSH = (
    r"(?!.*\b(python[\d.]*|torchrun|\w*kill\w*|nohup|screen|tmux|docker|ray|bash|sh|srun|exit|pdsh|clush)\b)"
    r"((?!\bssh\s).|\bssh\s+(-\S+\s+([\w]+=\S+\s+)?)*[\w\"'${}\[\]@.:-]+\s+[\"']?"
    r"(mkdir|cp|rsync|tar|ln|touch|unzip|chmod)\b)*$"
)
# Each with the pattern of a text, the places where it counts (`is_after` the launch), and a reason.
Rules = tuple[tuple[str, tuple[bool, ...], str], ...]
REFUSED: Rules = (
    (r".*<\{\{", _AROUND, "${{: a template's brace, or a bad substitution: fill it in"),
    (rf"(?!.*({REQUEUES}))(?!{PRINTS_ON_ERROR}\s*(\n|$)|{_PRINTS_ON_SIGNAL})"
     rf"(?!{ON_EXIT.pattern})trap\s", _AROUND,
     "a trap: notices reach the workers; clean-up: teardown = […]"),
    (r".*(=[\"']?#?(<[^<>\n|&;()]+>|(?:your|YOUR)[-_]\w+)|\s'<[A-Za-z][\w .-]*>'(?m:\s*(#|$)))"
     r"|'<[A-Za-z][\w .-]*>'|(source|\.|cd|conda|module|ml|mkdir)\s[^\n<]*<[A-Za-z][\w .-]*>",
     _AROUND, PLACEHOLDER),
    (rf"(?!.*({REQUEUES})).*\b(pkill|killall|scancel)\s|kill\s", _AROUND,
     "it ends something: setup or teardown, if needed"),
    (rf"(?!.*({REQUEUES})).*(\brm\s+(-\w*r\w*\b|(-\w+\s+)*(?=[^\n;&|]*\*))(?!{_TEMPORARY}))",
     _AROUND, DELETES),
    (r"(?!echo|printf).*\bsrun\s([^\"']*\s:\s|.*--(het|pack)-group)", _AROUND,
     f"{NO_COMPONENTS}: submit each component as a job of its own"),
    (rf"(?!.*({REQUEUES})).*\bsbatch\s", _AROUND,
     "it submits another job: sbatch --dependency=afterok:ID … behind hpc-ddp submit"),
    (rf"(?!{_COPIES_BY_SSH}).*\b(ssh|pdsh|clush)\s", _BEFORE, _ON_HOSTS),
    (r".*\b(ssh|pdsh|clush)\s", _AFTER, _ON_HOSTS),
    (rf"(?!{re.escape(ENDED)}|.*({REQUEUES}))(?!exit\b|wait\b|\w+\+?=\(?\"?\$!\"?\)?$)"
     r".*(\$[?!]|\bwait \$|PIPESTATUS)", _AFTER,
     "it asks how the launch ended: hpc-ddp decides by that; see its verdict"),
    (r"(?!\w+=|(echo|printf|log|which|pip3?|module)\b).*(\b(torchrun\S*|deepspeed|accelerate\s+launch)"
     r"|torch\.distributed\.(run|launch))\s.*(\.py\b|\s-m\s|\$)", _AROUND,
     TRAINS_BEHIND),
    (r".*(\$\(|`)\s*((torchrun|deepspeed)\s|accelerate\s+launch\s|(srun|mpirun)\s[^)`]*\bpython[\d.]*\s"
     r"[^)`]*\.py\b|[^)`]*\btorch\.distributed\.(run|launch)\s)", _AROUND, TRAINS_BEHIND),
    (STARTS_PYTHON, _AFTER, TRAINS_BEHIND),
    (r"exit\b(?!=)", _BEFORE, "here the job script ends"),
    (r"(?!echo|printf).*\bray\s+start\b", _AROUND,
     "Ray starts its workers itself: a wrapper that starts Ray and the program on one node"),
    (r"--?[A-Za-z]", _AROUND, "an option is no command: what ends the command before it?"),
)  # fmt: skip
DECIDED: Rules = (
    (f".*({REQUEUES})", _AROUND, "the job is requeued until it has finished"),
    (r"exit\b", _AROUND, "hpc-ddp waits for the workers, and ends the job"),
    (r"wait\b|sleep\s|for\s+\w+\s+in\s[^;\n]*(;|\n)\s*do\s+wait\s[^;\n]*(;|\n)\s*done$", _AFTER,
     "hpc-ddp waits for the workers, and ends the job"),
    (_PRINTS_ON_SIGNAL, _AROUND, "hpc-ddp says which signal came, and why a job ends"),
    (r"(['\"]{2})?(['\"])[^'\"$`]*\n[^'\"$`]*['\"]+$", _AROUND,
     "a text, and no command: a comment?"),
)  # fmt: skip


def depends_on_folder(text: str, is_assignment: bool) -> bool:
    """Return whether a line, `text`, may do another thing in another folder: it names a file by a
    relative path (``cp a b``), or is a command that works on its folder (``git pull``). Only
    the code in ``$(…)`` of an assignment counts."""
    if is_assignment:
        codes = re.findall(r"(?:\$\((?!\()|`)(.*)", text, re.S)
        return any(RELATIVE.search(code) or _OF_FOLDER.search(code) for code in codes)
    return bool(RELATIVE.search(text) or _OF_FOLDER.search(text))


def first_reason(rules: Rules, text: str, is_after: bool) -> str:
    """Return the reason of the first rule that fits a statement's `text` at its place, behind the
    launch (`is_after`) or before it; '' if none fits. Texts that the statement only prints, and
    commands that it only looks for (``which srun``), do not count."""
    text = re.sub(r"(\{\w+:?\?)[^{}`$]*\}", r"\1}", text)  # ${A:?message} prints its message
    text = _WRITTEN_TEXT.sub(" ", text)
    text = re.sub(r"\b(which|command\s+-[vV]|type|hash)\s+(-\w+\s+)*\w+", " ", text)
    text = re.sub(r"\$\(\s*\)", " ", text)  # $(which srun), without its command
    text = PRINTED_TEXT.sub(" ", text) if _NAMES_COMMAND.search(text) else text
    fitting = (rule for rule in rules if re.match(rule[0], text, re.S))
    return next((reason for _, places, reason in fitting if is_after in places), "")
