"""A trial whether a fork of this process can use an accelerator, which depends on the driver.

This module imports torch: it runs in the fork server, which has imported torch already.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore  # torch.distributed re-exports it untyped

from hpc_ddp.node.workers.worker import die_with_parent

TRIAL_S = 120.0
POLL_S = 0.02


@dataclass
class Trial:
    """A fork of this process that makes a collective on the first accelerator. The fork starts when
    an instance is made; without an accelerator it ends at once."""

    pid: int = field(default_factory=lambda: _fork_trial())

    def await_failure(self) -> str:
        """Wait for the fork's end, or kill it after `TRIAL_S`. Return the reason why a fork can't
        use the accelerator; '' if it can, or if there is no accelerator. Only one call may be made:
        a process can be waited for only once."""
        give_up = time.monotonic() + TRIAL_S
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                return f"a fork can't use the accelerator: it ended with {code}" if code else ""
            if time.monotonic() > give_up:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                return f"a fork can't use the accelerator: no end within {TRIAL_S:.0f} s"
            time.sleep(POLL_S)


def _fork_trial() -> int:
    """Fork a process that tries the accelerator, and return its id. The fork ends with 0 if
    `_try_accelerator` returns True, else with 1; it prints an exception to this process's
    stderr."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent()
        code = 0 if _try_accelerator() else 1
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _try_accelerator() -> bool:
    """Make an all-reduce on the first accelerator, in a process group of this process alone, which
    stays; return whether the sum is right. True without an accelerator."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return True
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    ones = torch.ones(2, device=device)
    dist.all_reduce(ones)
    return bool(ones.sum().item() == 2)
