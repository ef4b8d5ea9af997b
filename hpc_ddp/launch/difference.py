"""What has changed since a run: its script as it would be now, and the code around it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpc_ddp.launch import config, prepare, snapshot
from hpc_ddp.launch.backends import BACKENDS
from hpc_ddp.launch.prepare import Prepared
from hpc_ddp.run.errors import UsageError
from hpc_ddp.run.folder import RunFolder, read_json
from hpc_ddp.run.ownership import is_executable


@dataclass(frozen=True)
class Difference:
    """`script` has the lines of a unified diff; `code` by file A (added), M (modified) or D
    (deleted), or is None where the run has no snapshot, or would have none now. Both are empty
    where nothing has changed."""

    script: list[str]
    code: dict[str, str] | None

    def __bool__(self) -> bool:
        return bool(self.script or self.code)

    def to_dict(self) -> dict[str, Any]:
        return {"same": not self, **asdict(self)}


def since(run: RunFolder, options: Mapping[str, Any], cwd: Path, home: Path) -> Difference:
    """Compare a run with the job that the same command would make now.

    The command is the one that began the run, from the folder where it was given, with `options`
    over its own. Nothing is written. Of a run that may only be read the code is not compared: where
    its work tree lies is another user's word. What differs in every run (its folder, the number of
    its snapshot) is taken from the run, so that it never differs.

    Raises
    ------
    UsageError
        the run has no script, or the job is refused as it would be now
    """
    run = RunFolder(run.whole)
    if not run.script.is_file():
        raise UsageError(
            f"run {run.path} has no {run.script.name}: it was not rendered, but started by hand",
            hint="hpc-ddp status lists the runs",
        )
    asked = read_json(run.asked_json)
    if asked and not options.get("script"):  # else it is meant from here
        cwd = Path(str(asked.get("cwd", cwd)))  # as data: it may be another user's run
    settings = config.load(prepare.over(asked.get("options", {}), options), cwd, home)
    newest, like = run.newest_code, None
    if not (options.get("script") or is_executable(run)):
        like = run if newest else None
        settings = replace(settings, values={**settings.values, "snapshot": False})
    spec = config.job_spec(settings, cwd)
    prepared = prepare.plan(spec, run, settings, is_new=False, like=like)
    code = None
    if settings.get("snapshot", True) and newest:
        exclude = settings.get("snapshot-exclude", ())
        code = snapshot.changes(Path(prepared.spec.script), run, newest, exclude)
    if newest and (like or code is not None):
        prepared = _at(prepared, newest)
    now = BACKENDS[prepared.spec.backend].script(prepared)
    before = run.script.read_text()
    names = (str(run.script), "as it would be now")
    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), *names, lineterm="")
    return Difference(list(lines), code)


def _at(prepared: Prepared, code: Path) -> Prepared:
    """Return the job with the code of a snapshot that there is."""
    inside = code / prepared.script.relative_to(prepared.code)
    return replace(prepared, code=code, script=inside)
