"""The origin of each setting's value: the command line, a file, or hpc-ddp's default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hpc_ddp.core.job.option_declaration import key_of
from hpc_ddp.core.job.options import JobSpec
from hpc_ddp.submission.package_files import folder
from hpc_ddp.submission.plan import Plan
from hpc_ddp.submission.script.overridden_options import words_of
from hpc_ddp.submission.settings.config import Layer, Settings
from hpc_ddp.submission.settings.fabric_profiles import fabric_env
from hpc_ddp.submission.settings.user import home_folder


@dataclass(frozen=True)
class Origin:
    """The value of a setting as text, and its origin.

    `source` is option, project, site, operators, profile (a site file that comes with hpc-ddp),
    fabric, run (the run that is continued) or default. `file` is the path of the file that sets the
    value; None where no file does.
    """

    key: str
    value: str
    source: str
    file: str | None = None

    @property
    def place(self) -> str:
        """The origin as text for the user: ``--nodes``, ``command line`` (for the script and its
        arguments), ``--set`` (for the sweep), ``site lumi``, ``fabric efa``, the file's path, as
        ``hpc-ddp.toml``, or else the `source`, as ``default``. A path is short as by `_short_path`,
        which raises UsageError."""
        if self.source == "option":
            names = {"script": "command line", "args": "command line", "sweep": "--set"}
            names["env-names"] = "--env"
            return names.get(self.key, f"--{self.key.partition('.')[0]}")
        if self.source in ("profile", "fabric"):
            kind = "site" if self.source == "profile" else "fabric"
            return f"{kind} {Path(self.file or '').stem}"
        return _short_path(self.file) if self.file else self.source

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes by name, for JSON, without a `file` that is None."""
        return {name: text for name, text in asdict(self).items() if text is not None}


def find_origins(plan: Plan, settings: Settings) -> list[Origin]:
    """Return the settings of a planned job, with the origin of each, in the order of the options'
    declaration. Settings that are empty, False, or taken out by ``without`` are left out.

    Each line of a list has an origin of its own, and so has each variable of ``env`` and of the
    fabric: one line may be a site's, the next the job's. Raise UsageError for a broken fabric
    profile, and for a job without a script (`Plan.rendering`).
    """
    rows: list[Origin] = []
    for field in fields(JobSpec):
        key = key_of(field)
        value = getattr(plan.spec, field.name)
        if field.name == "env":
            rows += _variables(plan, settings)
        elif isinstance(value, tuple):
            rows += [_origin(plan, settings, key, line, line) for line in value]
        elif value not in (None, "", {}) and value is not False and field.name != "submit_dir":
            rows.append(_origin(plan, settings, key, str(value), None))
    taken_out = {*plan.spec.without}
    return [row for row in rows if not _words_for_without(row) & taken_out]


def _words_for_without(row: Origin) -> set[str]:
    """Return the words by which ``without`` can take a setting out: the line of a list, or the
    variable's name; and the option, with or without its value."""
    is_line = row.key in ("setup", "node-setup", "worker-setup", "sbatch", "srun")
    entry = row.value if is_line else row.key.removeprefix("env.")
    return {entry, *words_of(row.key, row.value)}


def table(rows: list[Origin]) -> str:
    """Return the settings (at least one) as text: one line each, with key, origin and value."""
    key_width = max(len(row.key) for row in rows)
    place_width = max(len(row.place) for row in rows)
    return "\n".join(
        f"{row.key:{key_width}}  {row.place:{place_width}}  {row.value}" for row in rows
    )


def _variables(plan: Plan, settings: Settings) -> Iterator[Origin]:
    """Yield each environment variable that the script of a job sets, with its origin: the file of
    the fabric, or what `_origin` returns. Raise UsageError as `find_origins`."""
    spec = plan.spec
    for name, value in plan.rendering.environment.items():
        if name not in spec.env and name in fabric_env(spec.fabric):
            file = folder("templates") / "fabrics" / f"{spec.fabric}.toml"
            yield Origin(f"env.{name}", value, "fabric", str(file))
        else:
            origin = _origin(plan, settings, "env", value, name)
            yield Origin(f"env.{name}", value, origin.source, origin.file)


def _origin(plan: Plan, settings: Settings, key: str, value: str, entry: str | None) -> Origin:
    """Return the origin of the value of a key. `entry` is one line of a list or the name of one
    variable; None stands for the value as a whole. In a run that is continued, a value that no
    option sets is the run's, or the default where it equals the default."""
    layer: Layer | None = settings.layer(key, entry)
    if plan.is_new or (layer and layer.kind == "option"):
        path = str(layer.path) if layer and layer.path else None
        return Origin(key, value, layer.kind if layer else "default", path)
    default = getattr(JobSpec, key.replace("-", "_"), None)
    if value == str(default):
        return Origin(key, value, "default")
    return Origin(key, value, "run", str(plan.run.job_json))


def _short_path(path: str) -> str:
    """Return a path in the working directory as a relative path, and one in the home folder as
    ``~/…``; any other path as it is. Raise UsageError for a user without a home folder."""
    for base, sign in ((Path.cwd(), ""), (home_folder(), "~/")):
        if Path(path).is_relative_to(base):
            return sign + str(Path(path).relative_to(base))
    return path
