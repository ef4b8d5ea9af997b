"""Words of bash: what is known of each, and what only bash can expand in the job.

A word is a sequence of parts: text that is known, and code (``$NAME``, ``$(…)``, arithmetic …) that
stays as it is, for bash in the job.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hpc_ddp.submission.job_script.bash.syntax import Node, names_in

_NAME = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
# One word each, also without quotes: arithmetic, and variables of Slurm and of each login.
_ONE_WORD = re.compile(
    r"\$\(\(.*\)\)|\$\{?(SLURM_\w+|HOME|USER|TMPDIR|HOSTNAME|\w*RANK|WORLD_SIZE|MASTER_\w+)\}?",
    re.S,
)

Doubt = tuple[str, int]  # a variable, and the line of a command that may have set it anew


@dataclass(frozen=True)
class Part:
    """A part of a word: `text`, or code as ``$NAME`` and ``$(date)`` if `is_code`.

    Attributes
    ----------
    splits
        whether it stands outside of quotes, where the shell splits it at blanks
    version
        how often the code's variables had been set, all together, when the part was read: by that
        `Scope.is_stale` knows whether one has been set again
    doubt
        the variable whose value the part is, and the line of a command that may have set it anew;
        None for a certain value
    """

    text: str
    is_code: bool = False
    splits: bool = False
    version: int = 0
    doubt: Doubt | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """The variable whose value the code is: A of ``$A`` and ``${A}``; '' for other code, as
        ``${A:-x}``, and for text."""
        match = _NAME.fullmatch(self.text) if self.is_code else None
        return (match[1] or match[2]) if match else ""


@dataclass(frozen=True)
class Word:
    """A word of a command, and the line of the script that it stands in, from 1; 0 without one."""

    parts: tuple[Part, ...]
    line: int = 0

    @property
    def text(self) -> str:
        """The word as an argument in a project file, without quotes: variables as ``$NAME``, or as
        ``${NAME}`` before a letter, digit, ``_`` or ``[``; other code as it is written. A backslash
        with the line's end behind it in one part is left out."""
        texts = []
        parts = [part for part in self.parts if part.text]  # without the '' of "$A"''b
        for part, next_part in zip(parts, [*parts[1:], Part("")], strict=False):
            is_joined = not next_part.is_code and re.match(r"\w|\[", next_part.text)
            variable = f"${{{part.name}}}" if is_joined else f"${part.name}"
            texts.append(variable if part.name else part.text.replace("\\\n", ""))
        return "".join(texts)

    @property
    def script(self) -> str:
        """The word as the text that ``bash -c`` gets: without quotes, variables as ``${NAME}``,
        and with the ends of lines that `text` leaves out."""
        return "".join(f"${{{part.name}}}" if part.name else part.text for part in self.parts)

    @property
    def is_static(self) -> bool:
        """Return whether the word is all text, so that its value is known without the job."""
        return not any(part.is_code for part in self.parts)

    @property
    def code(self) -> list[Part]:
        """The parts that are code."""
        return [part for part in self.parts if part.is_code]

    @property
    def stays_one_word(self) -> bool:
        """Return whether bash makes one word of it for all values of its variables, and it has no
        other code than these: ``a"$B"`` and ``$HOME/a``, but not ``$B`` without quotes, whose value
        may have blanks."""
        return all(
            part.name and (not part.splits or _ONE_WORD.fullmatch(part.text)) for part in self.code
        )

    @property
    def names(self) -> list[str]:
        """The variables that the word's code mentions, as by `names_in`."""
        return [name for part in self.code for name in names_in(part.text)]

    def as_bash(self, is_read_twice: bool = False) -> str:
        """Return the word as a line of bash has it: text is quoted where needed, code stands in
        double quotes unless it ``splits``. ``'a b'"${C}"`` is one.

        With `is_read_twice` the line is ``eval "…"``: bash fills the code in first, and then reads
        the line with the values. For that ``\\``, ``"``, ``$`` and a backquote have a backslash.
        """
        texts, quote = [], '\\"' if is_read_twice else '"'
        for part in self.parts:
            code = f"${{{part.name}}}" if part.name else part.text
            text = shlex.quote(part.text) if part.text else ""
            text = re.sub(r'([\\"$`])', r"\\\1", text) if is_read_twice else text
            quoted_code = code if part.splits else f"{quote}{code}{quote}"
            texts.append(quoted_code if part.is_code else text)
        return "".join(texts) or "''"

    def without_start(self, count: int) -> Word:
        """Return the word without its first `count` characters, which must be text, and no code:
        ``NAME=$A`` without 5 is ``$A``."""
        parts, remaining = [], count
        for part in self.parts:
            if len(part.text) > remaining:
                parts.append(replace(part, text=part.text[remaining:]))
            remaining = max(0, remaining - len(part.text))
        return replace(self, parts=tuple(parts))


def literal(text: str, line: int = 0) -> Word:
    """Return a word that is `text` as it is, without code, of a `line`."""
    return Word((Part(text),), line)


def join_words(*pieces: str | Word) -> Word:
    """Return one word that `pieces` make, joined without blanks; a piece that is no word is text.
    The word's line is that of the first piece with one."""
    words = [piece if isinstance(piece, Word) else literal(piece) for piece in pieces]
    line = next((word.line for word in words if word.line), 0)
    return Word(tuple(part for word in words for part in word.parts), line)


def split_words(word: Word) -> list[Word]:
    """Return the words into which the shell splits `word` at blanks: those of its text outside of
    quotes. Code is never split. [] for a word without parts."""
    if not any(part.splits and not part.is_code for part in word.parts):
        return [word] if word.parts else []
    return split_at(word, r"(?:\s|\\\n)+", only_unquoted=True)


def split_text(word: Word) -> list[Word]:
    """Return the words that the shell makes of a word by splitting all its texts at blanks, also
    those in quotes, as ``eval`` does."""
    parts = tuple(replace(part, splits=True) for part in word.parts)
    return split_words(replace(word, parts=parts))


def split_at(word: Word, separator: str, only_unquoted: bool = False) -> list[Word]:
    """Return the words between the separators in the text of a word; `separator` is a regular
    expression, and is not looked for in code, nor with `only_unquoted` in text in quotes. Empty
    words are left out."""
    groups: list[list[Part]] = [[]]
    for part in word.parts:
        if part.is_code or (only_unquoted and not part.splits):
            groups[-1].append(part)
            continue
        for index, piece in enumerate(re.split(separator, part.text)):
            if index:  # behind a separator another word begins
                groups.append([])
            groups[-1] += [Part(piece, doubt=part.doubt)] if piece else []
    return [Word(tuple(group), word.line) for group in groups if group]


def text_part(node: Node, start: int, end: int, is_quoted: bool) -> Iterator[Part]:
    """Yield the text of a word, `node`, from byte `start` of the script to byte `end`, as one part;
    nothing for an empty text. In double quotes (`is_quoted`) it is without the backslashes of
    escapes, but for those at a line's end, and a quote alone counts as empty."""
    text = node.text[start - node.start_byte : end - node.start_byte].decode()
    if is_quoted and text == '"':
        return
    if is_quoted:
        text = re.sub(r'\\([$`"\\\n])', lambda m: m[0] if m[1] == "\n" else m[1], text)
    if text:
        yield Part(text)
