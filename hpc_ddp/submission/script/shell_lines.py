"""A check that bash can read the user's set-up lines.

After a missing quote, bash would take hpc-ddp's own lines for the rest of the user's: the job would
end, after its wait in the queue, with an error in a line of hpc-ddp's.
"""

from __future__ import annotations

import os
import re
import subprocess

from hpc_ddp.core.errors import UsageError
from hpc_ddp.core.job.options import JobSpec

KEYS = ("setup", "node-setup", "worker-setup", "teardown")


def check_shell_lines(spec: JobSpec) -> None:
    """Raise UsageError where bash can't read a job's lines of one of `KEYS`, or where they end
    within a here-document, which hpc-ddp's lines behind them would continue. Without bash on this
    machine nothing is checked."""
    for key in KEYS:
        lines = [line for line in getattr(spec, key.replace("-", "_")) if line not in spec.without]
        if not lines:
            continue
        # With -n bash executes nothing. Extended patterns are on, since a line may switch them on.
        argv = ["bash", "-O", "extglob", "-n", "-c", "--", "\n".join(lines)]
        try:
            bash = subprocess.run(
                argv,
                capture_output=True,
                text=True,
                errors="replace",
                env={**os.environ, "LC_ALL": "C"},
            )
        except OSError:
            return
        # An open here-document is a warning of bash's. Behind the teardown lines nothing comes.
        is_open = "here-document" in bash.stderr and key != "teardown"
        if bash.returncode or is_open:
            reason = re.sub(r"^bash: (-c: )?", "", bash.stderr.partition("\n")[0])
            raise UsageError(
                f"{key}: bash can't read it: {reason}",
                hint=f"look for a missing quote or bracket in its {len(lines)} line(s)",
            )
