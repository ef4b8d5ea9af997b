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
    within a here-document or by a backslash, which hpc-ddp's lines behind them would continue.
    Without bash on this machine nothing is checked."""
    for key in KEYS:
        lines = [line for line in getattr(spec, key.replace("-", "_")) if line not in spec.without]
        if not lines:
            continue
        text = "\n".join(lines)
        try:
            bash = _read_by_bash(text)
        except OSError:
            return
        reason = re.sub(r"^bash: (-c: )?", "", bash.stderr.partition("\n")[0])
        # An open here-document is a warning of bash's. Behind the teardown lines nothing comes.
        is_open = "here-document" in bash.stderr and key != "teardown"
        # A line of a semicolon alone is an error, unless it continues a line.
        if text.endswith("\\") and key != "teardown" and not _read_by_bash(f"{text}\n;").returncode:
            is_open, reason = True, f"line {len(text.splitlines())}: it ends in a backslash"
        if bash.returncode or is_open:
            raise UsageError(
                f"{key}: bash can't read it: {reason}",
                hint=f"look for a missing quote or bracket in its {len(lines)} line(s)",
            )


def _read_by_bash(text: str) -> subprocess.CompletedProcess[str]:
    """Have bash read a text, and execute nothing of it. Raise OSError without bash."""
    # Extended patterns are on, since a line may switch them on.
    return subprocess.run(
        ["bash", "-O", "extglob", "-n", "-c", "--", text],
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "LC_ALL": "C"},
    )
