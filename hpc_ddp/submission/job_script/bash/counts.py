"""Numbers of the job's nodes and GPUs, as a script counts them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hpc_ddp.submission.job_script.bash.values import Value, doubts_in
from hpc_ddp.submission.job_script.bash.words import Word, literal

if TYPE_CHECKING:
    from hpc_ddp.submission.job_script.bash.variables import Scope

# Commands by which scripts count the job's nodes, the GPUs of their node, and those of a list.
_NODES = r"(\$\(|`)\s*scontrol\s+show\s+hostnames?(\s+\"?\$\{?SLURM_(JOB_)?NODELIST\}?\"?)?\s*"
_COUNTS_NODES = re.compile(rf"{_NODES}\|\s*wc -[lw]\s*[)`]")
_LISTS_NODES = re.compile(rf"{_NODES}(?P<first>\|\s*head\s*)?[)`]")  # the first ten by head
_LENGTH = re.compile(r"\$\{#(\w+)\[[@*]\]\}")  # of an array
_COUNTS_GPUS = re.compile(
    r"(\$\(|`)\s*nvidia-smi\s+(-L|--list-gpus|--query-gpu=\w+\s+--format=csv,noheader)"
    r"\s*\|\s*wc -l\s*[)`]"
)
DEVICES = "CUDA_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|SLURM_(?:JOB|STEP)_GPUS"  # lists of GPUs
_COUNTS_LISTED = re.compile(
    rf"(\$\(|`)\s*(jq -n \"\[\$\{{?(?P<one>{DEVICES})\}}?\] *\| *length\""
    rf"|echo\s+\"?\$\{{?(?P<other>{DEVICES})\}}?\"?\s*\|"
    r"\s*(tr\s+[\"']?,[\"']?\s[^|;&()`]*\|\s*wc\s+-[lw]"
    r"|awk\s+-F\s*[\"']?,[\"']?\s+'\{\s*print NF;?\s*\}'))\s*[)`]"
)
_READS_DEVICES = re.compile(  # into an array [1]; the list is [2]
    rf"IFS=[\"']?,[\"']?\s+read\s+-[-ra\s]*\s(\w+)\s*<<<\s*\"?\$\{{?({DEVICES})\}}?\"?$"
)
# A part of a variable's value: without what fits a pattern at its begin or end, or with a new text
# in place of it; some of its characters; and a field between signs.
_CUT = re.compile(
    r"\$\{(?P<name>\w+)(?P<operator>##?|%%?|//?(?![#%]))(?P<pattern>(?:\\.|[^{}$`/\\\"'])+)"
    r"(?:/(?P<new>[^{}$`\\\"']*))?\}"
)
_CHARACTERS = re.compile(r"\$\{(\w+):(?:\s*\(|\s+|(?=\d))(-?\d+)\)?(?::(\d+))?\}")
_FIELD = re.compile(
    r"(?:\$\(|`)\s*echo\s+\"?\$\{?(\w+)\}?\"?\s*\|\s*(cut\s+-d|awk\s+-F)\s*[\"']?([^\s\"'])[\"']?"
    r"\s+(?:-f\s*|'\{\s*print\s+\$)([1-9]\d*|NF)(?:;?\s*\}')?\s*[)`]"
)
_DIGITS = re.compile(  # without another number in it
    r"(?:\$\(|`)\s*echo\s+\"?\$\{?(\w+)(?::?-\w*)?\}?\"?\s*\|\s*(?:grep\s+-\w*o\w*\s+[\"']?\[0-9\]\S*"
    r"|tr\s+-dc\s+\S+|sed\s+[\"']?s/\[\^0-9\]\*?//g?[\"']?)(?:\s*\|\s*(?:head|tail)\s+-n?\s*1)?"
    r"(?:\s*\|\|\s*echo\s+\w+)?\s*[)`]"
)


def fill_in_parts(code: str, scope: Scope) -> str:
    """Return code in which texts stand in place of parts of values that are known, the script's or
    Slurm's: with ``--gpus-per-node=a100:3`` 3 for ``${SLURM_GPUS_PER_NODE#*:}``, and for
    ``$(echo $SLURM_GPUS_PER_NODE | cut -d: -f2)``."""
    for pattern, part_of in _PARTS:
        for match in reversed([*pattern.finditer(code)]):  # from the end: places hold
            if (text := _text_of(match[1], scope)) is not None:
                part = part_of(text, *match.groups()[1:])
                code = code[: match.start()] + part + code[match.end() :]
    return code


def known_part(word: Word, scope: Scope) -> Word | None:
    """Return a `word` of code, as ``${A#*:}``, as the text that `fill_in_parts` makes of it. None
    where code is left, where a file may have changed a variable's value, and for a search for
    digits (`_DIGITS`), of which only the last number would be known."""
    text = word.text if _DIGITS.search(word.text) else fill_in_parts(word.text, scope)
    is_doubtful = any(doubts_in(scope.values.get(name)) for name in word.names)
    return None if is_doubtful or re.search("[$`]", text) else literal(text, word.line)


def _text_of(name: str, scope: Scope, pending: tuple[str, ...] = ()) -> str | None:
    """Return the value of a variable, None where it is not known. `pending` is as in
    `whole_number`."""
    if name not in scope.values:
        return scope.texts.get(name)
    assigned = scope.values[name]
    if not isinstance(assigned, Word) or name in pending or scope.is_stale(assigned):
        return None
    if len(assigned.parts) == 1 and assigned.parts[0].name:
        return _text_of(assigned.parts[0].name, scope, (*pending, name))
    return assigned.text if assigned.is_static else None


def _cut(text: str, operator: str, pattern: str, new: str | None) -> str:
    """Return what bash makes of a value, `text`, by ``${NAME#pattern}``; the `operator` may also be
    ``##``, ``%``, ``%%``, or ``/`` and ``//``, which put `new` (None: nothing) in its place."""
    pattern = re.sub(r"\\(.)", r"[\1]", pattern).replace("[^", "[!").replace("[:digit:]", "0-9")
    expression = fnmatch.translate(pattern)[:-2]  # without the end of the text
    if operator in ("/", "//"):
        return re.sub(expression, new or "", text, count=len(operator) % 2)
    # Where the text may be cut, the shortest part that goes first; for ## and %% the longest.
    is_begin = operator[0] == "#"
    places = range(len(text) + 1) if is_begin == (len(operator) == 1) else range(len(text), -1, -1)
    for at in places:
        cut, remaining = (text[:at], text[at:]) if is_begin else (text[at:], text[:at])
        if re.fullmatch(expression, cut):
            return remaining
    return text


def _characters(text: str, start: str, count: str | None) -> str:
    """Return what bash makes of a value, `text`, by ``${NAME:start:count}``."""
    remaining = text[int(start) :] if -len(text) <= int(start) else ""
    return remaining[: int(count)] if count else remaining


def _field(text: str, command: str, sign: str, number: str) -> str:
    """Return the field that ``cut -d`` or ``awk -F``, the `command`, prints of `text`: that of a
    `number`, or the last for "NF", with `sign` between two fields."""
    fields = text.split(sign)
    if command.startswith("cut") and len(fields) == 1:
        return text
    return "".join(fields[-1:] if number == "NF" else fields[int(number) - 1 : int(number)])


def _digits(text: str) -> str:
    """Return the digits at a value's end: 8 of ``a100:8``."""
    return text[len(text.rstrip("0123456789")) :]


_PARTS: tuple[tuple[re.Pattern[str], Callable[..., str]], ...] = (
    (_CUT, _cut),
    (_CHARACTERS, _characters),
    (_FIELD, _field),
    (_DIGITS, _digits),
)


def fill_in_counts(code: str, scope: Scope) -> str:
    """Return code in which numbers, or variables of Slurm, stand in place of what counts nodes or
    GPUs.

    - ``$(scontrol show hostnames | wc -l)`` becomes ``$SLURM_NNODES``
    - ``$(nvidia-smi -L | wc -l)`` becomes ``$SLURM_GPUS_ON_NODE``
    - ``$(echo $CUDA_VISIBLE_DEVICES | tr , ' ' | wc -w)`` becomes `count_devices` of its value
    - ``${#A[@]}`` becomes the length of the array A in `scope`, and stays where it is not known
    """
    values, gpu_counts = scope.values, scope.gpu_counts
    are_few = scope.numbers.get("SLURM_NNODES", 11) <= 10
    code = _COUNTS_NODES.sub("$SLURM_NNODES", code)
    code = _LENGTH.sub(
        lambda m: gpu_counts.get(m[1]) or _length(values.get(m[1]), are_few) or m[0], code
    )
    code = _COUNTS_GPUS.sub("$SLURM_GPUS_ON_NODE", code)
    return _COUNTS_LISTED.sub(lambda m: count_devices(values.get(m["one"] or m["other"])), code)


def count_devices(devices: Value) -> str:
    """Return the number of GPUs in a value of one of `DEVICES`, as ``2`` of ``0,1``;
    ``$SLURM_GPUS_ON_NODE`` where the value is empty, or not known here: the job then has Slurm's
    value."""
    if isinstance(devices, Word) and devices.is_static and devices.text:
        return str(len(devices.text.split(",")))
    return "$SLURM_GPUS_ON_NODE"


def count_read_devices(text: str, values: Mapping[str, Value]) -> dict[str, str]:
    """Return `count_devices` by the name of the array into which a command's `text` reads GPUs, as
    ``IFS=, read -ra A <<< $CUDA_VISIBLE_DEVICES``; {} for another command."""
    match = _READS_DEVICES.match(text)
    return {match[1]: count_devices(values.get(match[2]))} if match else {}


def _length(array: Value, are_few: bool) -> str:
    """Return the number of an array's elements as code: ``4``, or ``$SLURM_NNODES`` for the names
    of the job's nodes, as of ``A=($(scontrol show hostnames))``. Behind ``| head``, which gives ten
    at most, the latter holds only where the nodes `are_few`. '' where the number is not known, and
    for a value that is no array."""
    if not isinstance(array, list):
        return ""
    nodes = _LISTS_NODES.fullmatch(array[0].text) if len(array) == 1 else None
    if nodes and (are_few or not nodes["first"]):
        return "$SLURM_NNODES"
    return str(len(array)) if all(word.is_static for word in array) else ""


def tasks_per_node(word: Word | None, scope: Scope) -> int | None:
    """Return n where `word` stands for n times the job's number of nodes, and that number is not
    known: 4 for ``$((4*SLURM_NNODES))``. None for another word, and where the number is known."""
    if "SLURM_NNODES" in scope.numbers:
        return None
    scopes = [
        replace(scope, numbers={**scope.numbers, "SLURM_NNODES": n, "SLURM_JOB_NUM_NODES": n})
        for n in (1, 2, 3)
    ]
    once, twice, thrice = (whole_number(word, trial) for trial in scopes)
    return once if once and (twice, thrice) == (2 * once, 3 * once) else None


def is_gpus_of_all_nodes(word: Word, scope: Scope) -> bool:
    """Return whether `word` stands for the product of the job's nodes and a node's GPUs, as
    ``$((SLURM_NNODES*SLURM_GPUS_ON_NODE))``, and neither number is known."""
    names = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE")
    if scope.numbers.keys() & {*names}:
        return False
    scopes = [  # with 2 and 3 nodes of 10 GPUs
        replace(scope, numbers={**dict.fromkeys(names[:2], n), **dict.fromkeys(names[2:], 10)})
        for n in (2, 3)
    ]
    return [whole_number(word, trial) for trial in scopes] == [20, 30]


def whole_number(word: Word | None, scope: Scope, pending: tuple[str, ...] = ()) -> int | None:
    """Return the whole number that a word stands for in the job, as 16 for
    ``$((8*SLURM_NNODES))`` on two nodes; None where it is not known, and for None. `pending` has
    the variables whose values are being read: a value that refers to itself is not known."""

    def number_of(match: re.Match[str]) -> str:
        name, assigned = match[1], scope.values.get(match[1])
        if isinstance(assigned, Word) and name not in pending:
            number = whole_number(assigned, scope, (*pending, name))
            return name if number is None else str(number)
        return str(scope.numbers.get(name, "?"))

    if word and scope.is_stale(word):  # $A after A=$B, where B is another by now
        return None
    # Step by step the text becomes digits and operators alone, if the number is known.
    text = fill_in_parts(word.text if word else "", scope)
    default = re.compile(r"\$\{(\w+):?[-=]([^}]*)\}")
    text = default.sub(lambda m: m[2] if m[1] in scope.not_set else f"${m[1]}", text)
    text = re.sub(r"\$\(\((.*?)\)\)", r"(\1)", text, flags=re.S)  # $((A+1)): (A+1)
    text = fill_in_counts(text, scope)
    text = re.sub(r"\$\(expr (.*?)\)", lambda m: "(" + m[1].replace("\\", "") + ")", text)
    text = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", number_of, text)
    if not re.fullmatch(r"[\d()+*/% -]+", text) or "**" in text:  # a power may take for ever
        return None
    try:
        return int(eval(text.replace("/", "//"), {"__builtins__": {}}))
    except (SyntaxError, ArithmeticError, TypeError, ValueError):
        return None
