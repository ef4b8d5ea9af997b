"""`Place`: the attempt and the node that a process belongs to, with names, interface and fabric."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.run_folder import AttemptFolder, RunFolder
from hpc_ddp.node.net.fabric import Found, configured, settings
from hpc_ddp.node.net.network import LOOPBACK, interface_to, reach


@dataclass(frozen=True)
class Place:
    """Where this supervisor runs, from the environment that the batch shell exported.

    `nodes` are all node names of the attempt, `index` this one's place among them, the host
    names to reach them by being name + `suffix`. `end_time` is in unix seconds.
    """

    run: RunFolder
    attempt: AttemptFolder
    nodes: tuple[str, ...]
    index: int
    suffix: str
    end_time: float | None
    warn_s: float
    interface: str | None
    notice_signal: signal.Signals = signal.SIGTERM
    fabric: str = ""

    @classmethod
    def from_env(cls, environ: dict[str, str]) -> Place:
        env = AttemptEnv.from_env(environ)
        return cls(
            run=env.run_folder,
            attempt=env.attempt_folder,
            nodes=env.nodes,
            index=node_index(environ),
            suffix=env.host_suffix,
            end_time=env.end_time,
            warn_s=env.warn_s,
            interface=env.interface or None,
            notice_signal=signal.Signals[f"SIG{env.notice_signal}"],
            fabric=env.fabric,
        )

    @property
    def node(self) -> str:
        return self.nodes[self.index]

    @property
    def host(self) -> str:
        return self.host_of(self.index)

    def host_of(self, index: int) -> str:
        """Return the name or address that the nodes reach one of them by."""
        local = f"127.0.0.{index + 1}"  # nodes that are only processes of one machine
        return local if self.is_local else reach(self.nodes, index, self.suffix)

    @property
    def is_local(self) -> bool:
        return self.node.startswith("local-")

    @property
    def peer(self) -> str:
        """Another node to look for the network by: the first, or the second on the first."""
        return self.nodes[0 if self.index else min(1, len(self.nodes) - 1)] + self.suffix

    @property
    def chosen_interface(self) -> str | None:
        """The interface to the other nodes: as the user says, else the one that leads there."""
        inside = self.is_local or len(self.nodes) == 1
        return self.interface or interface_to(LOOPBACK if inside else self.peer)

    def interface_env(self) -> dict[str, str]:
        """Return what tells Gloo and NCCL their interface, where nothing else has."""
        name = self.chosen_interface
        if not name:
            return {}
        variables = {
            "GLOO_SOCKET_IFNAME": name,
            "NCCL_SOCKET_IFNAME": f"={name}",
        }  # =: exactly this
        # An administrator may have said it in NCCL's own files, and knows better than a route.
        configured_env = {
            **({} if self.interface else configured(os.environ)),
            **os.environ,
        }
        return {key: value for key, value in variables.items() if key not in configured_env}

    @property
    def seeks_fabric(self) -> bool:
        """Whether the interconnect is to be looked up: alone, a node needs none."""
        return self.fabric == "auto" and len(self.nodes) > 1 and not self.is_local

    def fabric_env(self, interconnect: Found) -> dict[str, str]:
        """Return what tells NCCL of the interconnect, where nothing else has."""
        return settings(interconnect, self.run.lib, os.environ)


def node_index(environ: Mapping[str, str]) -> int:
    """Return this node's place among the attempt's nodes.

    Where not srun has started this process, but an MPI, which may count in another order, or
    pass on the first node's variables, the host's own name tells.

    Raises
    ------
    OSError
        this host is none of the nodes
    """
    env = AttemptEnv.from_env(environ)
    if env.node_index is not None:
        return env.node_index
    if env.step_launcher == "srun":
        return int(environ["SLURM_NODEID"])
    nodes = env.nodes
    names = (socket.gethostname(), socket.gethostname().partition(".")[0])
    if match := next((name for name in names if name in nodes), None):
        return nodes.index(match)
    raise OSError(f"this host, {names[0]}, is none of the job's {len(nodes)} nodes")
