"""Words of bash: what is known of each, and what only bash can expand in the job.

A word is a sequence of parts: text that is known, and code (``$NAME``, ``$(…)``, arithmetic …) that
stays as it is, for bash in the job.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace

from hpc_ddp.submission.job_script.bash.syntax import names_in

_NAME = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
# One word each, also without quotes: arithmetic, and variables of Slurm and of each login.
_ONE_WORD = re.compile(
    r"\$\(\(.*\)\)|\$\{?(SLURM_\w+|HOME|USER|TMPDIR|HOSTNAME|\w*RANK|WORLD_SIZE|MASTER_\w+)\}?",
    re.S,
)


@dataclass(frozen=True)
class Part:
    """A part of a word: text, or code. `splits` says that the shell splits it at blanks, outside of
    quotes; `version` is how often the code's variables had been assigned to when it was read."""

    text: str
    is_code: bool = False
    splits: bool = False
    version: int = 0

    @property
    def name(self) -> str:
        """The variable whose value the code is; '' for text and for other code."""
        match = _NAME.fullmatch(self.text) if self.is_code else None
        return (match[1] or match[2]) if match else ""


@dataclass(frozen=True)
class Word:
    """A word of a command, and the line of the script that it stands in."""

    parts: tuple[Part, ...]
    line: int = 0

    @property
    def text(self) -> str:
        """The word as an argument of hpc-ddp: variables as ``$NAME``, or ``${NAME}`` before a
        letter, digit or ``[``; ends of lines behind a backslash are left out."""
        texts = []
        for part, after in zip(self.parts, [*self.parts[1:], Part("")], strict=False):
            is_joined = not after.is_code and re.match(r"\w|\[", after.text)
            name = f"${{{part.name}}}" if is_joined else f"${part.name}"
            texts.append(name if part.name else part.text)
        return "".join(texts).replace("\\\n", "")

    @property
    def script(self) -> str:
        """The word as the text that ``bash -c`` gets: with all its lines, and no quotes."""
        return "".join(f"${{{p.name}}}" if p.name else p.text for p in self.parts)

    @property
    def is_static(self) -> bool:
        return not any(part.is_code for part in self.parts)

    @property
    def code(self) -> list[Part]:
        """The parts that are code."""
        return [part for part in self.parts if part.is_code]

    @property
    def is_one(self) -> bool:
        """Whether the word has no code but names of variables, and is one word for all their
        values."""
        return all(p.name and (not p.splits or _ONE_WORD.fullmatch(p.text)) for p in self.code)

    @property
    def names(self) -> list[str]:
        """The variables that the word's code mentions."""
        return [name for part in self.code for name in names_in(part.text)]

    def bash(self, is_read_twice: bool = False) -> str:
        """Return the word, quoted for a line of bash; with `is_read_twice` for a line that stands
        in double quotes and that ``eval`` reads."""
        texts, mark = [], '\\"' if is_read_twice else '"'
        for part in self.parts:
            code = f"${{{part.name}}}" if part.name else part.text
            text = shlex.quote(part.text) if part.text else ""
            text = re.sub(r'([\\"$`])', r"\\\1", text) if is_read_twice else text
            quoted = code if part.splits else f"{mark}{code}{mark}"
            texts.append(quoted if part.is_code else text)
        return "".join(texts) or "''"

    def after(self, count: int) -> Word:
        """Return the word without its first `count` characters, which are texts, and no code."""
        parts, remaining = [], count
        for part in self.parts:
            if len(part.text) > remaining:
                parts.append(replace(part, text=part.text[remaining:]))
            remaining = max(0, remaining - len(part.text))
        return replace(self, parts=tuple(parts))


def literal(text: str, line: int = 0) -> Word:
    """Return a word of known text."""
    return Word((Part(text),), line)


def joined(*pieces: str | Word) -> Word:
    """Return one word that texts and words make, joined without blanks; its line is that of the
    first word that has one."""
    words = [piece if isinstance(piece, Word) else literal(piece) for piece in pieces]
    line = next((word.line for word in words if word.line), 0)
    return Word(tuple(part for word in words for part in word.parts), line)


def split_words(word: Word) -> list[Word]:
    """Return the words that the shell makes of one by splitting at blanks."""
    parts = [part for part in word.parts if part.is_code or not part.splits]
    if len(parts) == len(word.parts):
        return [word] if parts else []
    return separated(word, r"(?:\s|\\\n)+", only_split=True)


def split_text(word: Word) -> list[Word]:
    """Return the words of a text, as of a command line, that the shell would split at blanks."""
    parts = tuple(replace(part, splits=True) for part in word.parts)
    return split_words(replace(word, parts=parts))


def separated(word: Word, separator: str, only_split: bool = False) -> list[Word]:
    """Return the words between the separators in the text of a word; `separator` is a regular
    expression. With `only_split` only text that the shell splits is searched. Empty words are left
    out."""
    groups: list[list[Part]] = [[]]
    for part in word.parts:
        if part.is_code or (only_split and not part.splits):
            groups[-1].append(part)
            continue
        for index, piece in enumerate(re.split(separator, part.text)):
            if index:
                groups.append([])
            groups[-1] += [Part(piece)] if piece else []
    return [Word(tuple(group), word.line) for group in groups if group]
