"""From the text of a job script to settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from hpc_ddp.submission.job_script import program
from hpc_ddp.submission.job_script.conversion import LOST, OURS, TAKEN, Conversion
from hpc_ddp.submission.job_script.directives import direct, read_directives, sizes
from hpc_ddp.submission.job_script.launch import Launch
from hpc_ddp.submission.job_script.shell import Scope, literal
from hpc_ddp.submission.job_script.sorting import Sorter
from hpc_ddp.submission.job_script.statements import Reader


def convert(text: str, cwd: Path, folder: Path, environ: Mapping[str, str]) -> Conversion:
    """Return the settings of a job script's text; none of it is run.

    `cwd` is where it is submitted from, `folder` the one of the file that is to be written. Raise
    UsageError without the parser of bash.
    """
    directives = read_directives(text)
    numbers = sizes(directives)
    reader = Reader(Scope({"PWD": literal(str(cwd))}, numbers))
    reader.read(text)
    converter = Sorter(reader, Conversion(), numbers, cwd, environ)
    result = converter.result
    for name, (assigned, line) in directives.options.items():
        result.mark(line, line, TAKEN, f"--{name}={assigned}" if assigned else f"--{name}")
    for group, key, setting, line, reason in direct(directives):
        if group == "taken" and key == "sbatch":
            result.append(key, str(setting), line)
        elif group == "taken":
            result.values[key] = setting, line
        else:
            result.marks[line] = [(OURS if group == "ours" else LOST, reason)]
    for line, reason in {**directives.replaced, **directives.strange}.items():
        result.marks[line] = [(LOST if line in directives.strange else OURS, reason)]
    for line in directives.late:
        result.mark(line, line, OURS, "after the first command: sbatch ignores it")
    first = text.splitlines()[:1]
    if first and first[0].startswith("#!") and re.search(r"\s-\w*l", first[0]):
        result.notes.append((1, "a login shell (-l): if the job needs its profile, setup ="
                             ' ["source ~/.bash_profile"]'))  # fmt: skip
    converter.take_statements()
    program.take(converter.launch or Launch(0), result, directives, numbers, cwd, folder)
    for line, reason in reader.skipped.items():
        result.marks[line] = [(OURS, reason)]
    for line, reason in reader.resolved.items():
        if line not in result.marks:
            result.mark(line, line, TAKEN, reason)
    converter.take_secrets_out()
    return result
