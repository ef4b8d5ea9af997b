"""`Place`: the attempt and the node that a process belongs to, with names, interface and fabric."""

from __future__ import annotations

import hmac
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_ddp.core.attempt_env import AttemptEnv
from hpc_ddp.core.file_io import patiently
from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.net.fabric_lookup import Interconnect, fabric_variables, read_nccl_conf
from hpc_ddp.node.net.interface import interface_to
from hpc_ddp.node.net.names_and_ports import LOOPBACK, reachable_name


@dataclass(frozen=True)
class Place:
    """The attempt and node of this process, from the environment that the batch script exported.

    `nodes` are the names of the attempt's nodes, `index` is this node's number among them; a node
    is reached by its name + `suffix`. `end_time` is in unix seconds, None without a limit; `warn_s`
    seconds before it the workers get `notice_signal`. `interface` and `fabric` are the user's
    choices: a network interface or None, and the value of ``--fabric``.
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
    def from_env(cls, environ: dict[str, str], nodes: Sequence[str] = ()) -> Place:
        """Return the place by the `AttemptEnv` variables in `environ`; without `nodes`, the names
        in the order of the ranks, the attempt's file of nodes is read.

        Raises
        ------
        OSError
            the file can't be read, or this host is none of the nodes
        KeyError
            the signal is unknown, the file has no nodes, there is no HPC_DDP_RUN, or srun should
            have started this process, and has not
        ValueError
            the file is damaged, or a variable is no number
        """
        env = AttemptEnv.from_env(environ)
        return cls(
            run=env.run_folder,
            attempt=env.attempt_folder,
            nodes=tuple(nodes) or env.nodes,
            index=node_index(environ, nodes),
            suffix=env.host_suffix,
            end_time=env.end_time,
            warn_s=env.warn_s,
            interface=env.interface or None,
            notice_signal=signal.Signals[f"SIG{env.notice_signal}"],
            fabric=env.fabric,
        )

    @property
    def node(self) -> str:
        """This node's name, as Slurm has it."""
        return self.nodes[self.index]

    @property
    def host(self) -> str:
        """The name or address by which the nodes reach this node."""
        return self.host_of(self.index)

    def host_of(self, index: int) -> str:
        """Return the name or address by which the nodes reach the node number `index`."""
        local = f"127.0.0.{index + 1}"  # nodes that are only processes of one machine
        return local if self.is_local else reachable_name(self.nodes, index, self.suffix)

    @property
    def is_local(self) -> bool:
        """Whether the nodes are processes of one machine, as in the local back-end. The node's name
        shows it: ``local-`` and its index, hardly a name that a cluster has for this very node."""
        return self.node == f"local-{self.index}"

    @property
    def peer(self) -> str:
        """The host name of the node by the route to which the interface is found: the first node;
        on the first node the second; in a job of one node this one."""
        return self.nodes[0 if self.index else min(1, len(self.nodes) - 1)] + self.suffix

    @property
    def chosen_interface(self) -> str | None:
        """The name of the interface to the other nodes: the user's choice, or else the interface
        whose route leads there (loopback's without other machines); None if there is no route."""
        is_one_machine = self.is_local or len(self.nodes) == 1
        return self.interface or interface_to(LOOPBACK if is_one_machine else self.peer)

    def interface_env(self) -> dict[str, str]:
        """Return the variables that give `chosen_interface` to Gloo, NCCL, HCCL (Ascend) and oneCCL
        (Intel); {} where that is None. Variables that this process's environment has are left out;
        where the user has not chosen the interface, so are those that NCCL's files set."""
        name = self.chosen_interface
        if not name:
            return {}
        variables = {
            "GLOO_SOCKET_IFNAME": name,
            "NCCL_SOCKET_IFNAME": f"={name}",  # =: this name, and not as a prefix
            "HCCL_SOCKET_IFNAME": f"={name}",
            "CCL_KVS_IFACE": name,
        }
        # What an administrator has set in NCCL's own files is better than a guess by a route.
        present = {**({} if self.interface else read_nccl_conf(os.environ)), **os.environ}
        return {name: text for name, text in variables.items() if name not in present}

    def store_env(self) -> dict[str, str]:
        """Return the variable with the prefix of this attempt's keys in the store of its workers.

        The prefix is an HMAC with the attempt's secret: workers of another run that come to this
        store by its port, as in a shared allocation, find no key of this attempt. Raise OSError
        where the secret can't be read.
        """
        secret = patiently(self.attempt.secret.read_bytes)
        return {"HPC_DDP_STORE_PREFIX": hmac.new(secret, b"store", "sha256").hexdigest()}

    @property
    def seeks_fabric(self) -> bool:
        """Whether the interconnect has to be looked up: with ``--fabric auto``, in a job of several
        machines."""
        return self.fabric == "auto" and len(self.nodes) > 1 and not self.is_local

    def fabric_env(self, interconnect: Interconnect) -> dict[str, str]:
        """Return the variables that NCCL needs for `interconnect`, without those that this
        process's environment or NCCL's files set already (`fabric_variables`)."""
        return fabric_variables(interconnect, self.run.lib, os.environ)


def node_index(environ: Mapping[str, str], nodes: Sequence[str] = ()) -> int:
    """Return this node's index among the attempt's `nodes`; if none are given, and the index
    depends on them, they are read from the attempt's file.

    The index is HPC_DDP_NODE_INDEX in `environ`, or srun's SLURM_NODEID. Another launcher, an MPI,
    may count in another order or pass on the first node's variables: there this host's name is
    looked for among `nodes`.

    Raises
    ------
    OSError
        this host is none of the nodes, or their names can't be read
    KeyError
        srun should have started this process, and has not
    KeyError, ValueError
        the attempt's file of nodes is damaged, or a variable is no number
    """
    env = AttemptEnv.from_env(environ)
    if env.node_index is not None:
        return env.node_index
    if env.step_launcher == "srun":
        return int(environ["SLURM_NODEID"])
    nodes = nodes or env.nodes
    indexes = {node.lower(): index for index, node in enumerate(nodes)}
    name = socket.gethostname().lower()  # Slurm's names may be short, or in other letters
    index = indexes.get(name, indexes.get(name.partition(".")[0]))
    if index is None:
        raise OSError(f"this host, {name}, is none of the job's {len(nodes)} nodes")
    return index
