"""`AttemptEnv`: the ``HPC_DDP_*`` variables of an attempt, from the batch script to the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hpc_ddp.core.run_folder import AttemptFolder, RunFolder

# The variables whose names differ from their field's: torchrun's options and templates use them.
NAMES = {"min_nodes": "HPC_DDP_LEAST_NODES", "notice_signal": "HPC_DDP_SIGNAL"}
# In the batch script's environment, beside those of the attempt.
INTERACTIVE = "HPC_DDP_INTERACTIVE"  # the script runs in an allocation, without Slurm's requeue


@dataclass(frozen=True)
class AttemptEnv:
    """The values that the batch script, or the local back-end, passes to an attempt's processes.

    Attributes
    ----------
    run, attempt
        the run's folder, and the attempt's number
    nnodes, min_nodes
        the number of nodes, and with how many an elastic job continues
    head, port, rdzv_id
        host and port of torchrun's rendezvous, and its id, unique among what runs now
    end_time, warn_s
        the end of the job's time in unix seconds, None without a limit; how long before it the
        workers get a notice, in s
    notice_signal
        the notice for the workers, as ``TERM``
    fabric, host_suffix, interface
        the interconnect, the suffix of nodes' names on it, the network interface
    step_launcher
        the command that starts the supervisors
    restarts, cpus
        how often Slurm has requeued the job; CPUs of the smallest node
    node_index
        this node's place among `nodes`, where Slurm does not set it; None elsewhere

    Each value is short whatever the number of nodes: Linux starts no process with a variable of
    more than 128 KiB.
    """

    run: str = ""
    attempt: int = 0
    nnodes: int = 0
    min_nodes: int = 0
    head: str = ""
    port: int = 0
    rdzv_id: str = ""
    end_time: float | None = None
    warn_s: float = 0.0
    notice_signal: str = "TERM"
    fabric: str = ""
    host_suffix: str = ""
    interface: str = ""
    step_launcher: str = "srun"
    restarts: int = 0
    cpus: int = 1
    node_index: int | None = None

    @property
    def run_folder(self) -> RunFolder:
        return RunFolder(Path(self.run))

    @property
    def attempt_folder(self) -> AttemptFolder:
        return self.run_folder.attempt(self.attempt)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes, in the order of the ranks, from the attempt's file; raises as
        `AttemptFolder.node_names` does."""
        return self.attempt_folder.node_names

    def to_env(self) -> dict[str, str]:
        """Return the variables by name. Those that the batch script itself sets are left out."""
        names = (item.name for item in fields(self) if item.name not in _OF_THE_SCRIPT)
        return {variable(name): _text(getattr(self, name)) for name in names}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> AttemptEnv:
        """Return the values of the variables; one that is missing or empty leaves the field's
        default. Raise ValueError for a number that is none."""
        texts = {item.name: environ.get(variable(item.name)) for item in fields(cls)}
        return cls(**{name: _value(name, text) for name, text in texts.items() if text})


def variable(name: str) -> str:
    """Return the name of a field's variable, as ``HPC_DDP_ATTEMPT``."""
    return NAMES.get(name, f"HPC_DDP_{name.upper()}")


def _text(value: Any) -> str:
    """Return a field's value as text: a float in whole units, None as ''."""
    if isinstance(value, float):
        return f"{value:.0f}"
    return "" if value is None else str(value)


def _value(name: str, text: str) -> Any:
    """Return the value of the field `name` from a variable's text; raise ValueError for no
    number."""
    if name in ("end_time", "warn_s"):
        return float(text)
    return int(text) if name in _INTEGERS else text


_OF_THE_SCRIPT = ("host_suffix", "interface", "step_launcher", "node_index")
_INTEGERS = ("attempt", "nnodes", "min_nodes", "port", "restarts", "cpus", "node_index")
