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
    over its own. Nothing is written. What differs in every run (its folder, the number of its
    snapshot) is taken from the run, so that it never differs.

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
    prepared = prepare.plan(config.job_spec(settings, cwd), run, settings, is_new=False)
    code = None
    if settings.get("snapshot", True) and (newest := run.newest_code):
        exclude = settings.get("snapshot-exclude", ())
        code = snapshot.changes(Path(prepared.spec.script), run, newest, exclude)
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
