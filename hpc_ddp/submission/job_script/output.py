"""A conversion as the text of ``hpc-ddp.toml``, and as a table of what became of each line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from hpc_ddp.core.job.slurm_options import as_pairs
from hpc_ddp.submission.job_script.conversion import LOST, OURS, TAKEN, Conversion, TextAt
from hpc_ddp.submission.job_script.directives import BURST_BUFFER

# The first keys of a file; others follow in the order in which they are set.
_ORDER = ("script", "module", "no-python", "args", "job-name", "nodes", "gpus-per-node")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")  # all but a tab and the end of a line
_WIDTH = 48  # of the text of a line in the table, in characters


def to_toml(conversion: Conversion, name: str) -> str:
    """Return the text of a project file; behind each value stands the number of the script's line
    that it comes from, as a comment. The first line names the script by its path, `name`."""
    lines = [to_comment(f"From {name}, by hpc-ddp import; the numbers are its lines."), ""]
    keys = [*conversion.values, *conversion.lists]
    for key in sorted(keys, key=lambda key: (*_ORDER, key).index(key)):
        if key in conversion.values:
            setting, line = conversion.values[key]
            lines.append(f"{key} = {_to_value(setting)}{_line_comment(line)}")
        elif entries := conversion.lists[key]:
            lines += _to_list(key, entries)
    if conversion.env:
        lines += ["", "[env]"]
        for variable, (text, line) in conversion.env.items():
            lines.append(f"{variable} = {_to_value(text)}{_line_comment(line)}")
    return "\n".join(lines) + "\n"


def _to_list(key: str, entries: Sequence[TextAt]) -> list[str]:
    """Return the lines of ``key = […]`` in TOML. Arguments, container options and names to expand
    that come from one line of the script share a line; each other entry has its own."""
    is_joined = key in ("args", "expand", "container-options")
    # A group has the entries of one line; with the index in its key, a single one.
    groups = groupby(enumerate(entries), lambda pair: (pair[1][1], is_joined or pair[0]))
    rows = [(", ".join(_to_value(e) for _, (e, _) in row), line) for (line, _), row in groups]
    if len(rows) == 1 and "\n" not in rows[0][0]:
        return [f"{key} = [{rows[0][0]}]{_line_comment(rows[0][1])}"]
    return [f"{key} = [", *(f"  {row},{_line_comment(line)}" for row, line in rows), "]"]


def _to_value(setting: Any) -> str:
    """Return a setting (a text, number, bool or list) as TOML. A text of several lines stands
    between three quotes, unless these are in it, or a character that TOML has only with an escape:
    a control character other than a tab or the line's end."""
    is_literal = isinstance(setting, str) and "\n" in setting and "'''" not in setting
    if is_literal and not _CONTROL.search(setting):
        return f"'''\n{setting}'''"
    return json.dumps(setting, ensure_ascii=False).replace("\x7f", "\\u007f")  # which is TOML, too


def to_comment(text: str) -> str:
    """Return a comment of one line of TOML: ``#`` and the text, with a blank for the end of a line,
    and a ``?`` for any other control character."""
    return f"# {_CONTROL.sub('?', ' '.join(text.splitlines()))}"


def _line_comment(line: int) -> str:
    """Return the comment behind a value, ``  # 7`` for line 7; '' for 0, which is no line."""
    return f"  # {line}" if line else ""


def subtract_site(conversion: Conversion, site: Mapping[str, Any]) -> None:
    """Remove from a conversion, in place, what the `site`'s settings (by key) have as well:
    settings, variables, and the entries of ``sbatch``, ``srun`` and ``setup``. Add to ``without``,
    the key that takes options out, those of sbatch and srun that the site adds and the script does
    not have."""
    for key, setting in site.items():
        if str(conversion.values.get(key, ("",))[0]) == str(setting):
            conversion.values.pop(key, None)
        elif key in ("sbatch", "srun", "setup"):
            _subtract_entries(conversion, key, setting)
    for name, text in site.get("env", {}).items():
        if conversion.env.get(name, ("",))[0] == text:
            conversion.env.pop(name, None)


def _subtract_entries(conversion: Conversion, key: str, site_entries: Sequence[str]) -> None:
    """Remove a site's entries of ``sbatch``, ``srun`` or ``setup`` (`key`) from a conversion. An
    option of the site goes to ``without`` if the script does not have it; if the script has it with
    the same value under a key of its own (``partition``), this setting is removed."""
    entries = conversion.lists.pop(key, [])
    if remaining := [entry for entry in entries if entry[0] not in site_entries]:
        conversion.lists[key] = remaining
    if key == "setup":  # whose entries are no options
        return
    names = {name for name, _ in as_pairs(text for text, _ in entries)}
    for entry in site_entries:
        ((name, text),) = as_pairs([entry])
        if key == "sbatch" and conversion.values.get(name, ("",))[0] == text:
            del conversion.values[name]
        elif name not in names:
            conversion.append("without", entry, 0)


def is_code(line: str) -> bool:
    """Return whether a line of a job script is a directive (``#SBATCH``, or of a burst buffer) or
    code, and neither empty nor a comment."""
    is_directive = line.startswith("#SBATCH") or BURST_BUFFER.match(line)
    return bool(is_directive or (line.strip() and not line.lstrip().startswith("#")))


def format_table(conversion: Conversion, text: str) -> list[str]:
    """Return the rows of a table that says what became of each line of a script's `text`.

    The groups come in the order TAKEN, OURS, LOST, each with a head that has the number of its
    lines. A row has the line's number, its text with single blanks, cut to `_WIDTH` characters, and
    the reason. Neighbours with the same group and reason share one row, with the text of the first.
    A line of which a part alone is lost counts as TAKEN, and has a row among LOST for this part.
    Empty lines and comments have no row. Only the beginning of a line with a secret is shown.
    """
    rows: dict[str, list[str]] = {group: [] for group in (TAKEN, OURS, LOST)}
    counts, parts = dict.fromkeys(rows, 0), conversion.lines_lost_in_part()
    lines = [
        (n, _shorten(line, "secret" in str(conversion.marks.get(n))))
        for n, line in enumerate(text.splitlines(), 1) if is_code(line)
    ]  # fmt: skip
    marks = {
        n: (TAKEN, conversion.reasons(n, TAKEN)) if n in parts else conversion.group(n)
        for n, _ in lines
    }
    for (group, reason), equal in groupby(lines, lambda pair: marks[pair[0]]):
        members = list(equal)
        first, last = members[0][0], members[-1][0]
        place = str(first) if first == last else f"{first}-{last}"
        rows[group].append(f"  {place:>7}  {members[0][1]:{_WIDTH}}  {reason}")
        counts[group] += len(members)
        for number in sorted(parts & dict(members).keys()):
            reason = conversion.reasons(number, LOST)
            rows[LOST].append(f"  {number:>7}  {'(a part)':{_WIDTH}}  {reason}")
    heads = {group: f"{group}: {n} line{'s' * (n != 1)}" for group, n in counts.items()}
    heads[LOST] += f", and parts of {len(parts)}" if parts else ""
    return [row for group in rows for row in (heads[group], *rows[group])]


def _shorten(line: str, has_secret: bool) -> str:
    """Return a script's line with single blanks, cut to `_WIDTH` characters with ``...`` at the
    end. Only the first two words, up to a ``=``, are in it for a line that `has_secret`."""
    content = " ".join(line.split())
    if has_secret:
        content = f"{' '.join(content.split()[:2]).partition('=')[0]} ..."
    return content if len(content) <= _WIDTH else content[: _WIDTH - 3] + "..."
