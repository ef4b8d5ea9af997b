"""A conversion as the text of ``hpc-ddp.toml``, and as a table of what became of each line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from hpc_ddp.core.job.slurm_options import as_pairs
from hpc_ddp.submission.job_script.conversion import LOST, OURS, TAKEN, Conversion, TextAt
from hpc_ddp.submission.job_script.directives import BURST_BUFFER

_ORDER = ("script", "module", "no-python", "args", "job-name", "nodes", "gpus-per-node")
_WIDTH = 48  # of the text of a line in the table, in characters


def to_toml(conversion: Conversion, name: str) -> str:
    """Return the text of a project file; behind each value stands the line of the script that it
    comes from. The text's first line names the script by its path, `name`."""
    # A name with a line break would begin a setting of its own.
    file = " ".join(name.splitlines())
    lines = [f"# From {file}, by hpc-ddp import; the numbers are its lines.", ""]
    keys = [*conversion.values, *conversion.lists]
    for key in sorted(keys, key=lambda key: (*_ORDER, key).index(key)):
        if key in conversion.values:
            setting, line = conversion.values[key]
            lines.append(f"{key} = {_value(setting)}{_comment(line)}")
        elif entries := conversion.lists[key]:
            lines += _list(key, entries)
    if conversion.env:
        lines += ["", "[env]"]
        lines += [f"{k} = {_value(v)}{_comment(line)}" for k, (v, line) in conversion.env.items()]
    return "\n".join(lines) + "\n"


def _list(key: str, entries: Sequence[TextAt]) -> list[str]:
    """Return the lines of a list as TOML. Arguments, container options and names to expand that
    come from one line of the script share a line; each other entry has its own."""
    is_joined = key in ("args", "expand", "container-options")
    groups = groupby(enumerate(entries), lambda pair: (pair[1][1], is_joined or pair[0]))
    rows = [(", ".join(_value(e) for _, (e, _) in row), line) for (line, _), row in groups]
    if len(rows) == 1 and "\n" not in rows[0][0]:
        return [f"{key} = [{rows[0][0]}]{_comment(rows[0][1])}"]
    return [f"{key} = [", *(f"  {row},{_comment(line)}" for row, line in rows), "]"]


def _value(setting: Any) -> str:
    """Return a setting as TOML; a text of several lines stands between ``'''``, unless these are in
    it."""
    if isinstance(setting, str) and "\n" in setting and "'''" not in setting:
        return f"'''\n{setting}'''"
    return json.dumps(setting, ensure_ascii=False)


def _comment(line: int) -> str:
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
            entries = conversion.lists.pop(key, [])
            names = {name for name, _ in as_pairs([e for e, _ in entries if key != "setup"])}
            if remaining := [entry for entry in entries if entry[0] not in setting]:
                conversion.lists[key] = remaining
            if key == "setup":
                continue
            for entry in setting:
                ((name, text),) = as_pairs([entry])
                if key == "sbatch" and conversion.values.get(name, ("",))[0] == text:
                    del conversion.values[name]  # the site has it as a raw option
                elif name not in names:
                    conversion.append("without", entry, 0)
    for name, text in site.get("env", {}).items():
        if conversion.env.get(name, ("",))[0] == text:
            conversion.env.pop(name, None)


def is_code(line: str) -> bool:
    """Return whether a line of a job script is neither empty nor a mere comment."""
    is_directive = line.startswith("#SBATCH") or BURST_BUFFER.match(line)
    return bool(is_directive or (line.strip() and not line.lstrip().startswith("#")))


def table(conversion: Conversion, text: str) -> list[str]:
    """Return the rows of a table that says what became of each line of a script's `text`.

    The rows of a group stand behind a head with the number of its lines. A row has the line's
    number, its text without further blanks, cut to `_WIDTH` characters, and the reason. Neighbours
    with the same group and reason share one row, with the text of the first. Empty lines and
    comments have no row; a secret's value is not shown.
    """
    rows: dict[str, list[str]] = {group: [] for group in (TAKEN, OURS, LOST)}
    counts = dict.fromkeys(rows, 0)
    lines = ((n, line) for n, line in enumerate(text.splitlines(), 1) if is_code(line))
    for (group, reason), equal in groupby(lines, lambda pair: conversion.group(pair[0])):
        members = list(equal)
        (first, line), last = members[0], members[-1][0]
        content = " ".join(line.split())
        if "secret" in reason:  # nor is it printed
            content = f"{' '.join(content.split()[:2]).partition('=')[0]} ..."
        short = content if len(content) <= _WIDTH else content[: _WIDTH - 3] + "..."
        place = str(first) if first == last else f"{first}-{last}"
        rows[group].append(f"  {place:>7}  {short:{_WIDTH}}  {reason}")
        counts[group] += len(members)
    heads = {group: f"{group}: {n} line{'s' * (n != 1)}" for group, n in counts.items()}
    return [row for group in rows for row in (heads[group], *rows[group])]
