"""Words of a launcher that only the job knows: options, an image, a program, or several of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import Enum

from hpc_ddp.submission.job_script.bash.variables import Scope
from hpc_ddp.submission.job_script.bash.words import Word
from hpc_ddp.submission.job_script.conversion import LOST
from hpc_ddp.submission.job_script.launchers.launch import Launch
from hpc_ddp.submission.job_script.launchers.option_names import Options, is_launcher

_ARRAY = re.compile(r"\$\{\w+\[[@*]\](:0)?\}")
_ALTERNATIVE = re.compile(r"\$\{\w+:?\+(.*)\}", re.S)  # ${NAME:+--option}
# Names of variables, by what they hold.
_OF_OPTIONS = re.compile(r"ARGS?(?![A-Z])|OPT|FLAG|PARAM|BIND|MOUNT|EXTRA", re.I)
_OF_AN_IMAGE = re.compile(r"IMAGE|IMG|SIF|SQSH|SANDBOX|CONTAINER", re.I)
_OF_A_PROGRAM = re.compile(r"SCRIPT|PROG|FILE|MAIN|ENTRY|MODULE|CMD|COMMAND|PYTHON|TRAIN", re.I)
_IMAGE = re.compile(r".*\.(sif|simg|img|sqsh)|(docker|library|oras|shub)://.*")
_PROGRAM = re.compile(r".*\.(py|sh)|\.{1,2}/.*", re.S)


class Kind(Enum):
    """The kind of a word behind a launcher's name, as a variable whose value only the job knows."""

    OPTIONS = "options"  # maybe several words, or none
    OPERAND = "operand"  # an image or a program
    UNKNOWN = "unknown"  # one of both


def take_all_options(
    words: list[Word], rules: Options, launch: Launch, scope: Scope,
    find_kind: Callable[[Sequence[Word], Scope], Kind], name: str, key: str,
) -> tuple[list[Word], Kind]:  # fmt: skip
    """Read the options of a launcher, whose words these are, by `rules` into `launch`. Return the
    words behind them, and the kind of the first of these (operand where there is none).

    Options in a variable, as ``$OPTS``, are skipped, and marked as lost in `launch`; the reason has
    the launcher's `name` and the setting for such options (`key`). `find_kind` is one of the
    functions ``kind_before_…`` below.
    """
    remaining = launch.take_options(words, rules, scope)
    while remaining and (kind := find_kind(remaining, scope)) == Kind.OPTIONS:
        text = f"{name} {remaining[0].text}: only the job knows it: {key}"
        launch.mark(remaining[0].line, LOST, text)
        remaining = launch.take_options([words[0], *remaining[1:]], rules, scope)
    return remaining, kind if remaining else Kind.OPERAND


def kind_before_command(words: Sequence[Word], scope: Scope) -> Kind:
    """Return the kind of the first of `words` where srun, mpirun or the like has a command, which
    may be all in a variable."""
    kind, after = _kind_of(words[0], scope), words[1].text if len(words) > 1 else ""
    if kind != Kind.UNKNOWN:
        return kind
    is_of_options = _has_name(words[0], _OF_OPTIONS)
    is_program = bool(_PROGRAM.fullmatch(after)) and (is_of_options or _is_array(words[0]))
    is_option = is_of_options and after.startswith("-")
    return Kind.OPTIONS if is_launcher(after) or is_program or is_option else Kind.OPERAND


def kind_before_program(words: Sequence[Word], scope: Scope) -> Kind:
    """Return the kind of the first of `words` where a launcher of workers has a program."""
    kind, after = _kind_of(words[0], scope), words[1].text if len(words) > 1 else ""
    is_of_program = _has_name(words[0], _OF_A_PROGRAM)
    if kind != Kind.UNKNOWN or (is_of_program and not _is_array(words[0])):
        return Kind.OPERAND if kind == Kind.UNKNOWN else kind
    if re.fullmatch(r"\S+\.py|-u?m", after) or _has_name(words[0], _OF_OPTIONS):
        return Kind.OPTIONS
    return Kind.UNKNOWN if _is_array(words[0]) else Kind.OPERAND


def kind_before_image(words: Sequence[Word], scope: Scope) -> Kind:
    """Return the kind of the first of `words` where Singularity has the image."""
    kind, after = _kind_of(words[0], scope), words[1].text if len(words) > 1 else ""
    if kind != Kind.UNKNOWN:
        return kind
    if _IMAGE.fullmatch(after) or after.startswith("-"):
        return Kind.OPTIONS
    if _has_name(words[0], _OF_AN_IMAGE) and not _has_name(words[0], _OF_OPTIONS):
        return Kind.OPERAND
    is_before_program = not after or is_launcher(after) or bool(_PROGRAM.fullmatch(after))
    if is_before_program and not _is_array(words[0]):
        return Kind.OPERAND
    if is_before_program:
        return Kind.UNKNOWN  # the array has the image, too
    return (
        Kind.OPTIONS if _is_array(words[0]) or _has_name(words[1], _OF_AN_IMAGE) else Kind.UNKNOWN
    )


def _has_name(word: Word, pattern: re.Pattern[str]) -> bool:
    """Return whether the name of a variable in the word has a part of a `pattern`."""
    return any(pattern.search(name) for name in word.names)


def _is_array(word: Word) -> bool:
    """Return whether a word is all of an array."""
    return bool(_ARRAY.fullmatch(word.text))


def _kind_of(word: Word, scope: Scope) -> Kind:
    """Return the kind of a `word` by itself: options for a variable whose last known value begins
    with ``-``; an operand for text, a path with a variable in it, and a variable in quotes that is
    no array; else unknown."""
    code = word.parts[0] if len(word.parts) == 1 and word.code else None
    if code is None:
        return Kind.OPERAND
    if alternative := _ALTERNATIVE.fullmatch(code.text):
        return Kind.OPTIONS if alternative[1].lstrip("\"' ")[:1] == "-" else Kind.UNKNOWN
    name = word.names[0] if code.name or _is_array(word) else ""
    content = scope.values.get(name) or scope.earlier.get(name)
    firsts = content[:1] if isinstance(content, list) else [content] if content else []
    text = "".join(word.text for word in firsts).lstrip()
    if text.startswith("-"):
        return Kind.OPTIONS
    is_one_word = not (code.splits or _is_array(word))
    is_operand = text and not text.startswith(("$", "`"))
    return Kind.OPERAND if is_one_word or is_operand else Kind.UNKNOWN
