"""A conversion as the text of ``hpc-ddp.toml``, and as a table of what became of each line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hpc_ddp.submission.job_script.conversion import LOST, OURS, TAKEN, Conversion
from hpc_ddp.submission.script.effect import as_pairs

_ORDER = ("script", "module", "no-python", "args", "job-name", "nodes", "gpus-per-node")
_WIDTH = 48  # of a line of the script in the table


def to_toml(conversion: Conversion, name: str) -> str:
    """Return the text of a project file, each value with the line of the script (called `name`)
    that it comes from."""
    lines = [f"# From {name}, by hpc-ddp import; the numbers are its lines.", ""]
    keys = [*conversion.values, *conversion.lists]
    for key in sorted(keys, key=lambda key: (*_ORDER, key).index(key)):
        if key in conversion.values:
            setting, line = conversion.values[key]
            lines.append(f"{key} = {_value(setting)}{_comment(line)}")
        else:
            lines += _list(key, conversion.lists[key])
    if conversion.env:
        lines += ["", "[env]"]
        lines += [f"{k} = {_value(v)}{_comment(line)}" for k, (v, line) in conversion.env.items()]
    return "\n".join(lines) + "\n"


def _list(key: str, entries: Sequence[tuple[str, int]]) -> list[str]:
    """Return the lines of a list: of arguments those of one line together, else one each."""
    rows: list[tuple[list[str], int]] = []
    for setting, line in entries:
        if rows and rows[-1][1] == line and key in ("args", "expand", "container-options"):
            rows[-1][0].append(_value(setting))
        else:
            rows.append(([_value(setting)], line))
    if len(rows) == 1 and "\n" not in rows[0][0][0]:
        return [f"{key} = [{', '.join(rows[0][0])}]{_comment(rows[0][1])}"]
    return [f"{key} = [", *(f"  {', '.join(row)},{_comment(line)}" for row, line in rows), "]"]


def _value(setting: Any) -> str:
    if isinstance(setting, str) and "\n" in setting and "'''" not in setting:
        return f"'''\n{setting}'''"
    return json.dumps(setting, ensure_ascii=False)


def _comment(line: int) -> str:
    return f"  # {line}" if line else ""


def subtract_site(conversion: Conversion, site: Mapping[str, Any]) -> None:
    """Take out of a conversion what the `site`'s settings have as well, and put into ``without``
    the options of sbatch and srun that they add."""
    for key, setting in site.items():
        if key in conversion.values and str(conversion.values[key][0]) == str(setting):
            line = conversion.values.pop(key)[1]
            conversion.mark(line, line, TAKEN, f"{key}: the site file has the same")
        elif key in ("sbatch", "srun", "setup"):
            entries = conversion.lists.get(key, [])
            remaining = [(entry, line) for entry, line in entries if entry not in setting]
            for entry, line in entries:
                if entry in setting:
                    conversion.mark(line, line, TAKEN, f"{entry}: the site file has the same")
            if key in conversion.lists and remaining:
                conversion.lists[key] = remaining
            elif key in conversion.lists:
                del conversion.lists[key]
            names = {name for name, _ in as_pairs([entry for entry, _ in entries])}
            for entry in setting if key != "setup" else ():
                if as_pairs([entry])[0][0] not in names:
                    conversion.append("without", entry, 0)
    for name, text in site.get("env", {}).items():
        if name in conversion.env and conversion.env[name][0] == text:
            line = conversion.env.pop(name)[1]
            conversion.mark(line, line, TAKEN, f"{name}: the site file has the same")


def is_code(line: str) -> bool:
    """Return whether a line of a job script is more than a comment."""
    return line.startswith("#SBATCH") or bool(line.strip() and not line.lstrip().startswith("#"))


def table(conversion: Conversion, text: str) -> list[str]:
    """Return what became of each line of a script's `text`: in groups, equal lines that follow each
    other in one row."""
    rows: dict[str, list[tuple[int, int, str, str]]] = {group: [] for group in (TAKEN, OURS, LOST)}
    before: tuple[str, str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if not is_code(line):
            continue
        group, reason = conversion.group(number)
        if before == (group, reason):
            first, _, _, content = rows[group][-1]
            rows[group][-1] = first, number, reason, content
        else:
            words = line.split()
            content = " ".join(words)
            if "secret" in reason:  # nor is it printed
                content = f"{' '.join(words[:2]).partition('=')[0]} ..."
            rows[group].append((number, number, reason, content))
        before = group, reason
    result = []
    for group, entries in rows.items():
        count = sum(is_code(line) and conversion.group(n)[0] == group
                    for n, line in enumerate(text.splitlines(), 1))  # fmt: skip
        result.append(f"{group}: {count} line{'s' * (count != 1)}")
        for first, last, reason, content in entries:
            place = str(first) if first == last else f"{first}-{last}"
            short = content if len(content) <= _WIDTH else content[: _WIDTH - 3] + "..."
            result.append(f"  {place:>7}  {short:{_WIDTH}}  {reason}")
    return result
