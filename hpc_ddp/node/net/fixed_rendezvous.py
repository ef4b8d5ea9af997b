"""torchrun's rendezvous for a job of fixed size: a node writes one key of the store and reads one.

torchrun's own rendezvous negotiates the members, over one list of all nodes that each of them reads
once a second and writes every five: the first node's traffic grows with the square of the job. An
elastic job needs that. A job of fixed size does not: its nodes know their ranks, by Slurm's order,
and only wait for each other. The store is the same, of the c10d backend, on the first node.

A round is one start of the workers: the first, and one for each restart within the attempt. These
are its keys, below ``hpc-ddp/<id>/<round>/``:

- ``wanted``: a node wants this round, a restart, and the others have to hear of it
- ``joined/<rank>``: a node waits for the others
- ``outcome``: all have joined, by the first node; or there is to be no such round, by any node

The content of a key is a word's HMAC-SHA256, with the attempt's secret, over key and word: any
process that reaches the port may write keys, but no node believes these.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

ASK_EVERY_S = 1.0  # for a restart that another node wants; it also shows that the store is there
LOOK_EVERY_S = 0.1  # of the first node for the others; a `wait` that is in vain prints warnings
GRACE_S = 60.0  # of the others: the first node, which may join later, can name the missing ones
MOST_NAMED = 8  # of the nodes that are missing
FORGED = "the state of the rendezvous is not from this attempt: a stranger has written it"
WANTED, JOINED, BEGUN, CLOSED = "wanted", "joined", "begun", "closed"


@dataclass
class FixedRendezvous:
    """Has the methods of torch's ``RendezvousHandler`` that its agent calls.

    `store` is the c10d store, `rank` this node's, `hosts` the addresses of all nodes by their
    ranks, `secret` the attempt's; `id` is unique among the attempts; a join takes `join_s` seconds
    at most.

    All methods that ask the store raise torch's RendezvousConnectionError where it does not answer,
    and those that read a key RendezvousStateError where no agent of this attempt has written it.
    """

    store: Any
    id: str
    rank: int
    hosts: Sequence[str]
    secret: bytes
    join_s: float = 600.0
    round: int = 0  # the next round
    joined_round: int = -1  # the round of the workers that run
    _server: Any = None  # the store of the workers, on the first node
    _next_ask: float = 0.0  # by `time.monotonic()`

    @classmethod
    def create(cls, parameters: Any, rank: int, hosts: Sequence[str], secret: bytes) -> Any:
        """Connect to the store of torchrun's ``RendezvousParameters`` (`parameters`), which the
        first node opens, and return a rendezvous with the other arguments. Raise torch's
        RendezvousConnectionError where the port is in use, or the store does not answer."""
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

        _, store = create_backend(parameters)
        join_s = float(parameters.get_as_int("join_timeout", 600))
        return cls(store, parameters.run_id, rank, hosts, secret, join_s)

    def get_backend(self) -> str:
        """Return the name of the backend that torchrun was asked for."""
        return "c10d"

    def get_run_id(self) -> str:
        """Return `id`."""
        return self.id

    @property
    def use_agent_store(self) -> bool:
        """Whether the workers use a store of their agents, by the variable that torchrun's own
        rendezvous reads for this."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> Any:
        """Join the next round, wait until all nodes have joined it, and return torch's
        ``RendezvousInfo``.

        Raise RendezvousTimeoutError on the first node after `join_s` seconds, and on the other
        nodes `GRACE_S` later, since only the first node can name the missing ones;
        RendezvousClosedError where a node has ended for good.
        """
        from torch._C._distributed_c10d import PrefixStore  # torch.distributed has it untyped
        from torch.distributed.elastic.rendezvous import RendezvousInfo

        end = time.monotonic() + self.join_s
        if self.round:  # a restart, of which `num_nodes_waiting` tells the other nodes
            self._write(WANTED, WANTED)
        self._write(f"{JOINED}/{self.rank}", JOINED)
        if self.rank == 0:
            self._wait_for_others(end)
            self._propose_outcome(BEGUN)
        self._wait_for_outcome(end)
        store = PrefixStore(f"torch.rendezvous.{self.id}.{self.round}", self.store)
        self.joined_round, self.round = self.round, self.round + 1
        return RendezvousInfo(store, self.rank, len(self.hosts), self._store_of_workers(store))

    def num_nodes_waiting(self) -> int:
        """Return 1 if another node wants to start the workers again, else 0. The store is asked
        once a second at most; a call in between returns 0."""
        now = time.monotonic()
        if now < self._next_ask:
            return 0
        self._next_ask = now + ASK_EVERY_S
        return int(self._read(WANTED, WANTED) == WANTED)

    def is_closed(self) -> bool:
        """Return whether a node has ended for good, and there is to be no other round."""
        return self._read("outcome", BEGUN, CLOSED) == CLOSED

    def set_closed(self) -> None:
        """Write that there is to be no next round, unless that has begun. Each node that then joins
        the round ends."""
        self._propose_outcome(CLOSED)

    def shutdown(self) -> bool:
        """Close the rendezvous, as `set_closed`; return whether the store, which may be gone by
        now, has answered. Nothing is raised."""
        from torch.distributed.elastic.rendezvous import RendezvousError

        with suppress(RendezvousError):
            self.set_closed()
            return True
        return False

    # --- the parts of a join ---

    def _wait_for_others(self, end: float) -> None:
        """Wait until each node has written its key ``joined``, or the round is closed. Raise
        RendezvousTimeoutError, which names missing nodes, at `end`, a time of time.monotonic()."""
        keys = [self._key(f"{JOINED}/{rank}") for rank in range(len(self.hosts))]
        while not self._call(self.store.check, keys):
            if self.is_closed():
                return
            if time.monotonic() > end:
                pairs = zip(keys, self.hosts, strict=True)
                missing = [host for key, host in pairs if not self._call(self.store.check, [key])]
                more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
                raise self._timeout_error(f"{', '.join(missing[:MOST_NAMED])}{more} did not join")
            time.sleep(LOOK_EVERY_S)
        for rank, content in enumerate(self._call(self.store.multi_get, keys)):  # all from agents?
            self._word_of(f"{JOINED}/{rank}", content, (JOINED,))

    def _wait_for_outcome(self, end: float) -> None:
        """Wait until the round has begun. Raise RendezvousTimeoutError `GRACE_S` after `end`, a
        time of time.monotonic(), and RendezvousClosedError where the round is not to begin."""
        from torch.distributed import DistStoreError
        from torch.distributed.elastic.rendezvous import RendezvousClosedError

        limit = timedelta(seconds=max(0.1, end + GRACE_S - time.monotonic()))
        try:
            self._call(self.store.wait, [self._key("outcome")], limit)
        except DistStoreError:
            raise self._timeout_error("not all nodes joined") from None
        if self.is_closed():
            raise RendezvousClosedError("another node has ended for good")

    def _timeout_error(self, text: str) -> Exception:
        """Return the RendezvousTimeoutError ``TEXT within … s``."""
        from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

        return RendezvousTimeoutError(f"{text} within {self.join_s:.0f} s")

    def _store_of_workers(self, store: Any) -> Any:
        """Return host and port of the store by which the workers make their process group, as
        torch's ``RendezvousStoreInfo``. The first node opens that store if the workers use a store
        of their agents, and tells host and port to the other nodes by `store`, the round's own."""
        from torch._C._distributed_c10d import TCPStore
        from torch.distributed.elastic.rendezvous import RendezvousStoreInfo

        host, port = self.hosts[self.rank], None
        if self.rank == 0 and self.use_agent_store:
            self._server = self._server or TCPStore(host, 0, is_master=True, multi_tenant=True)
            port = self._server.port
        return self._call(RendezvousStoreInfo.build, self.rank, store, host, port)

    # --- keys ---

    def _key(self, name: str) -> str:
        """Return the store's key for the `name` in the next round."""
        return f"hpc-ddp/{self.id}/{self.round}/{name}"

    def _signature(self, name: str, word: str) -> str:
        """Return the content by which the key `name` of the next round stands for `word`."""
        text = f"{self._key(name)}\0{word}".encode()
        return hmac.new(self.secret, text, hashlib.sha256).hexdigest()

    def _write(self, name: str, word: str) -> None:
        """Set the key `name` of the next round to stand for `word`."""
        self._call(self.store.set, self._key(name), self._signature(name, word))

    def _propose_outcome(self, word: str) -> None:
        """Write `word`, `BEGUN` or `CLOSED`, as the outcome of the next round, unless a node has
        already written one: the outcome may then be the other word."""
        self._call(
            self.store.compare_set, self._key("outcome"), "", self._signature("outcome", word)
        )

    def _read(self, name: str, *words: str) -> str:
        """Return the one of `words` for which the key `name` of the next round stands, '' where the
        store has no such key. Raise RendezvousStateError as `_word_of`."""
        if not self._call(self.store.check, [self._key(name)]):
            return ""
        return self._word_of(name, self._call(self.store.get, self._key(name)), words)

    def _word_of(self, name: str, content: bytes, words: Sequence[str]) -> str:
        """Return the one of `words` for which the `content` of the key `name` stands; raise
        RendezvousStateError for any other content, which no agent of this attempt has written."""
        from torch.distributed.elastic.rendezvous import RendezvousStateError

        for word in words:
            if hmac.compare_digest(content, self._signature(name, word).encode()):
                return word
        raise RendezvousStateError(FORGED)

    def _call(self, function: Any, *arguments: Any) -> Any:
        """Call a function of the store, and return its result. Pass on its DistStoreError, after a
        wait in vain; turn its other errors into RendezvousConnectionError."""
        from torch.distributed import DistStoreError
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError

        try:
            return function(*arguments)
        except DistStoreError:
            raise
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError(
                f"the store of the rendezvous, on {self.hosts[0]}, does not answer"
            ) from error


def patch_torchrun(index: int, hosts: Sequence[str], secret: bytes) -> None:
    """Patch torchrun, once in a process, in two places: this node, number `index` of `hosts`, meets
    the other nodes by `FixedRendezvous`, with any backend that torchrun is asked for; and its agent
    closes the rendezvous once its workers have ended well (`close_when_done`). `hosts` are the
    addresses of the job's nodes, by rank; `secret` is the attempt's."""
    from torch.distributed.elastic.rendezvous import registry

    close_when_done()

    def create(parameters: Any) -> Any:
        """Return the rendezvous of this node; raise as `FixedRendezvous.create`."""
        return FixedRendezvous.create(parameters, index, hosts, secret)

    registry.get_rendezvous_handler = create  # type: ignore[assignment]


def close_when_done() -> None:
    """Patch torchrun: once a node's workers have ended well, its agent closes the rendezvous.
    Another node that started its workers again would wait for this node's."""
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent as Agent

    wait: Any = Agent._exit_barrier

    def close_and_wait(self: Any) -> None:
        """Close the rendezvous, then wait for the other agents, as torchrun does."""
        self._worker_group.spec.rdzv_handler.shutdown()
        wait(self)

    Agent._exit_barrier = close_and_wait  # type: ignore[method-assign]
