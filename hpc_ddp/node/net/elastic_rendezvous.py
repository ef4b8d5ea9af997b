"""torchrun's own rendezvous, with what an elastic job needs changed: `patch_torchrun`.

Its state is a pickle in a store to which any process that reaches the port may write, and torchrun
would load any pickle: here the state carries a signature with the attempt's secret. Nodes have
Slurm's order; a lost node makes the others start again, while neither a suspension of the job nor a
wrong clock makes a node count as lost; and no source files are looked at while the workers run. A
job of fixed size has `fixed_rendezvous`.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from hpc_ddp.node.net.fixed_rendezvous import FORGED, close_when_done

# How long a restart without a lost node waits for the last of the other nodes. They end their
# workers first, which takes 2 s where these are torn down.
LAST_CALL_S = 15
# How long it waits for the least number of nodes: a node that Slurm has taken out never comes back.
JOIN_AGAIN_S = 60


def patch_torchrun(hosts: Sequence[str], secret: bytes) -> None:
    """Patch torchrun with all of this module's changes. `hosts` are the addresses of the job's
    nodes, by rank; `secret` is the attempt's."""
    leave_sources_alone()
    rank_in_order(hosts)
    sign_state(secret)
    count_lost_nodes()
    time_heartbeats()
    close_when_done()


def sign_state(secret: bytes) -> None:
    """Patch torchrun: it loads a rendezvous state only from an agent that knows `secret`.

    In front of each state stands its HMAC-SHA256, over the rendezvous' key and the state. A state
    with another signature raises torchrun's `RendezvousStateError`, which ends the attempt.
    """
    from torch.distributed.elastic.rendezvous import RendezvousStateError
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
        C10dRendezvousBackend as Backend,
    )

    decode, set_state = Backend._decode_state, Backend.set_state

    def sign(backend: Any, state: bytes) -> bytes:
        """Return the HMAC of a state, 32 bytes."""
        return hmac.digest(secret, backend._key.encode() + b"\0" + state, hashlib.sha256)

    def decode_signed(backend: Any, stored: bytes) -> Any:
        """Return torchrun's (state, token) of the `stored` bytes, without the signature; None for
        an empty store. Raise RendezvousStateError for another signature, and for bytes of another
        form."""
        decoded = decode(backend, stored)
        if decoded is None:
            return None
        (content, token), size = decoded, hashlib.sha256().digest_size
        state = content[size:]
        if not hmac.compare_digest(content[:size], sign(backend, state)):
            raise RendezvousStateError(FORGED)
        return state, token

    def set_signed(backend: Any, state: bytes, token: Any = None) -> Any:
        """Store a state with its signature, if the store still has `token`, of an earlier answer
        (None: if the store is empty). Return torchrun's (state, token, was stored) of the state
        that the store has then, or None where it is empty. Raises as `decode_signed` for that
        state."""
        stored = set_state(backend, sign(backend, state) + state, token)
        return stored and (*stored[:2], stored[0] == state)  # torchrun compared with the signature

    Backend._decode_state = decode_signed  # type: ignore[method-assign,assignment]
    Backend.set_state = set_signed  # type: ignore[method-assign,assignment]


def rank_in_order(hosts: Sequence[str]) -> None:
    """Patch torchrun: nodes get their ranks in the order of `hosts`, spelled as in `--local-addr`.

    A host that is not among `hosts` comes last. torchrun sorts the participants by address, at one
    place of its module `dynamic_rendezvous`: there this sets a global `sorted`, which hides
    Python's.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    places = {host: place for place, host in enumerate(hosts)}

    def sort_by_place(participants: Any) -> list[Any]:
        """Return torchrun's participants in the order of `hosts`."""
        return sorted(participants, key=lambda node: (places.get(node.addr, len(places)), node))

    setattr(dynamic_rendezvous, "sorted", sort_by_place)  # noqa: B010  # mypy knows no such name


def count_lost_nodes() -> None:
    """Patch torchrun: its agents start the workers again without a node that has sent no heartbeat
    for 15 s.

    torchrun drops such a node from the rendezvous, but restarts the workers only where
    `num_nodes_waiting`, the number of new nodes, is above 0: workers whose peer has lost its link
    would stay in their collective. So lost nodes are added to that number.
    """
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
        DynamicRendezvousHandler as Handler,
    )

    waiting, join = Handler.num_nodes_waiting, Handler.next_rendezvous

    def count_waiting_or_lost(self: Any) -> int:
        """Return how many nodes wait to join, or have been lost since the last rendezvous. 0 once
        the rendezvous is closed: a node's workers have ended well, and its agent will end, too,
        while rank 0 may have work left; nor could the workers start again."""
        state = self._state_holder.state
        if state.closed:
            return 0
        waiting_nodes: int = waiting(self)
        lost_nodes: int = self.joined - len(state.participants)
        return waiting_nodes + lost_nodes

    def join_and_count(self: Any) -> Any:
        """Join the next rendezvous, and return what torchrun does; note its size and its number.
        Later rendezvous wait `LAST_CALL_S` for the last nodes, and `JOIN_AGAIN_S` for the least
        number, and not as long as the first."""
        joined = join(self)
        self.joined, self.joined_round = joined.world_size, self._state_holder.state.round
        self._settings.timeout._last_call = timedelta(seconds=LAST_CALL_S)
        self._settings.timeout._join = timedelta(seconds=JOIN_AGAIN_S)
        return joined

    Handler.num_nodes_waiting = count_waiting_or_lost  # type: ignore[method-assign]
    Handler.next_rendezvous = join_and_count  # type: ignore[method-assign]


def time_heartbeats() -> None:
    """Patch torchrun: a node is lost once its heartbeat has not changed for 15 s of this agent's
    own clock. torchrun compares heartbeats, times of other nodes' clocks, with its own clock: a
    node whose clock is 15 s ahead takes all others for lost, and one that is behind never joins.

    An agent that has stood still, as in a suspension of the job by Slurm, finds all heartbeats old
    at first: it counts no node as lost before the other nodes have had 15 s for a new heartbeat.
    """
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
        _BackendRendezvousStateHolder as Holder,
    )

    sanitize = Holder._sanitize

    def sanitize_in_time(self: Any) -> None:
        """Drop nodes without a new heartbeat from the state, unless this agent has just stood
        still."""
        now, interval_s = time.monotonic(), self._settings.keep_alive_interval.total_seconds()
        if now > getattr(self, "sanitized_at", now) + 2 * interval_s:  # it has stood still
            self.waits_until = now + interval_s * self._settings.keep_alive_max_attempt
        self.sanitized_at = now
        heartbeats = dict(self._state.last_heartbeats)
        earlier = getattr(self, "changed_at", {})  # by node: its heartbeat, and when that was new
        self.changed_at = {
            node: earlier[node] if earlier.get(node, ("",))[0] == heartbeat else (heartbeat, now)
            for node, heartbeat in heartbeats.items()
        }
        self._dead_nodes = []
        if now >= getattr(self, "waits_until", now):
            # For torchrun's look the heartbeats are times of this clock; then they are put back.
            wall_time = datetime.now(timezone.utc)
            for node, (_, since) in self.changed_at.items():
                self._state.last_heartbeats[node] = wall_time - timedelta(seconds=now - since)
            sanitize(self)
            for node in self._state.last_heartbeats:
                self._state.last_heartbeats[node] = heartbeats[node]

    Holder._sanitize = sanitize_in_time  # type: ignore[method-assign]


def leave_sources_alone() -> None:
    """Patch torchrun: it finds the name of a calling method without a look at source files. At each
    read or write of the rendezvous torchrun puts that name into an event that is not kept, and
    Python would look at the files of all callers: 30 to 50 stats a second and node on the
    environment's disk (torch 2.15)."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    def name_of_method(depth: int = 2) -> str:
        """Return the name of the function that is `depth` calls above this one."""
        return sys._getframe(depth).f_code.co_name

    dynamic_rendezvous.get_method_name = name_of_method
