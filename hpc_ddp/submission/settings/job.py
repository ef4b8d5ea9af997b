"""From merged settings to one `JobSpec`."""

from __future__ import annotations

import os
from pathlib import Path

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import FIELDS, JobSpec
from hpc_ddp.submission.settings.config import PROJECT_FILE, Settings
from hpc_ddp.submission.settings.defaults import (
    absolute,
    check_script,
    default_python,
    name_for,
    names_no_file,
    working_directory,
)


def job_spec(settings: Settings, cwd: Path) -> JobSpec:
    """Return the job of merged settings, with defaults for its name and Python; keys that are no
    field of a job are left out. Relative paths are seen from the folder `cwd`, which is also the
    working directory of a job without `chdir`.

    Raises
    ------
    UsageError
        no script is named; the script or the working directory doesn't exist, or the script is not
        Python's; or a value is refused
    OSError
        the script can't be read
    """
    is_no_file = names_no_file(settings.values)
    if not settings.get("script"):
        raise UsageError(
            f"no script is named, neither as an argument nor in {PROJECT_FILE}",
            hint="hpc-ddp submit train.py",
        )
    script = Path(settings.values["script"])
    if not is_no_file:
        script = absolute(cwd / script)
        check_script(script, in_image=bool(settings.get("image") or settings.get("container")))
    values = {key.replace("-", "_"): value for key, value in settings.values.items()}
    job = {name: value for name, value in values.items() if name in FIELDS}
    # A command stays as the user wrote it: as a Path, ./run.sh would become run.sh, of PATH.
    name = settings.values["script"] if is_no_file else str(script)
    job |= {"script": name, "submit_dir": str(cwd)}
    job["chdir"] = working_directory(cwd, settings.get("chdir", ""))
    if "template" in job:
        job["template"] = str(cwd / job["template"])
    if job.get("notify"):
        job["notify"] = str(absolute(cwd / os.path.expanduser(job["notify"])))
    job["job_name"] = job.get("job_name") or name_for(script, bool(settings.get("module")))
    is_local = job.get("backend") == "local"  # without set-up lines and container
    in_container = bool(job.get("container") or job.get("image")) and not is_local
    job.setdefault("python", default_python(() if is_local else job.get("setup", ()), in_container))
    try:
        return JobSpec(**job)
    except UsageError as error:  # a message about a value begins with its key: add the key's file
        key = next((key for key in settings.values if error.message.startswith(f"{key} ")), "")
        layer = settings.layer(key)
        if layer is None or layer.path is None:
            raise
        raise UsageError(f"{layer.path}: {error.message}", hint=error.hint) from None
