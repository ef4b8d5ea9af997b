"""Whether bash can read the user's set-up lines.

One that it can't read, as with a missing quote, takes hpc-ddp's own lines behind it for its rest:
the job would end, after its wait in the queue, with an error in a line of hpc-ddp's.
"""

from __future__ import annotations

import os
import re
import subprocess

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec

KEYS = ("setup", "node-setup", "worker-setup", "teardown")


def check_shell_lines(spec: JobSpec) -> None:
    """Raise UsageError where bash can't read a job's lines of one of `KEYS`, or takes what follows
    them for the rest of a here-document. A machine without bash checks nothing."""
    for key in KEYS:
        lines = [line for line in getattr(spec, key.replace("-", "_")) if line not in spec.without]
        if not lines:
            continue
        # A line may switch extended patterns on, which nothing here executes.
        argv = ["bash", "-O", "extglob", "-n", "-c", "\n".join(lines)]
        try:
            done = subprocess.run(
                argv,
                capture_output=True,
                text=True,
                errors="replace",
                env={**os.environ, "LC_ALL": "C"},
            )
        except OSError:
            return
        is_open = "here-document" in done.stderr and key != "teardown"  # behind which nothing comes
        if done.returncode or is_open:
            reason = re.sub(r"^bash: (-c: )?", "", done.stderr.partition("\n")[0])
            raise UsageError(
                f"{key}: bash can't read it: {reason}",
                hint=f"look for a missing quote or bracket in its {len(lines)} line(s)",
            )
