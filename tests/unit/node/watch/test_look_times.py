"""A supervisor reads the attempt's files after a change, and else as seldom as it may."""

from __future__ import annotations

import pytest

from hpc_ddp.core.job.attempt_folder import AttemptFolder
from hpc_ddp.node.watch import look_times
from hpc_ddp.node.watch.look_times import (
    FENCE_EVERY_S,
    LOOK_EVERY_S,
    QUICK_S,
    QUIET_FIRST_S,
    QUIET_S,
    AttemptWatch,
)
from hpc_ddp.node.watch.wake_links import PeerLinks, Task
from unit.fakes import Clock, stop_clock
from unit.node.fakes import place_of


class Peers:
    """The links of a supervisor, as a test has them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_whole, self.is_woken, self.woken = True, False, 0
        monkeypatch.setattr(PeerLinks, "is_whole", property(lambda links: self.is_whole))
        monkeypatch.setattr(PeerLinks, "take_wake", lambda links: self.take())
        monkeypatch.setattr(PeerLinks, "wake", lambda links: self.count())

    def take(self) -> bool:
        is_woken, self.is_woken = self.is_woken, False
        return is_woken

    def count(self) -> None:
        self.woken += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return stop_clock(monkeypatch, look_times)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Peers:
    return Peers(monkeypatch)


def looks(watch: AttemptWatch, clock: Clock, seconds: int) -> int:
    """Return how often the files are due within some seconds."""
    count = 0
    for _ in range(10 * seconds):
        count += watch.begin_look_if_due()
        clock.now += 0.1
    return count


@pytest.mark.parametrize(
    ("task", "every_s", "fence_every_s"),
    [
        # It alone may see that a later attempt runs, where all nodes have lost the controller.
        (Task(0, 3), QUIET_FIRST_S, QUIET_FIRST_S),
        (Task(1, 3), QUIET_S, 2 * QUIET_S),
        (Task(3, 6, 2), 2 * QUIET_S, 4 * QUIET_S),
    ],
)
def test_looks_are_rare_where_each_change_is_told(
    attempt: AttemptFolder,
    clock: Clock,
    peers: Peers,
    task: Task,
    every_s: float,
    fence_every_s: float,
) -> None:
    watch = AttemptWatch(place_of(attempt), task)
    assert watch.begin_look_if_due()
    assert watch.begin_fence_if_due()
    assert looks(watch, clock, int(every_s) - 1) == 0
    clock.now += 1.1
    assert watch.begin_look_if_due()
    assert watch.begin_fence_if_due() is (every_s == fence_every_s)
    assert not watch.begin_fence_if_due()
    clock.now += fence_every_s
    assert watch.begin_fence_if_due()


def test_without_links_the_disk_is_asked_each_second(
    attempt: AttemptFolder, clock: Clock, peers: Peers
) -> None:
    peers.is_whole = False
    watch = AttemptWatch(place_of(attempt), Task(1, 3))
    assert watch.begin_look_if_due()
    assert watch.begin_fence_if_due()
    assert 9 <= looks(watch, clock, int(10 * LOOK_EVERY_S)) <= 10
    clock.now += FENCE_EVERY_S - 10.0 + 0.1
    assert watch.begin_fence_if_due()
    peers.is_whole = True
    assert watch.begin_look_if_due()
    assert looks(watch, clock, 30) == 0


def test_a_peer_that_has_gone_makes_it_look_for_a_later_attempt(
    attempt: AttemptFolder, clock: Clock, peers: Peers
) -> None:
    watch = AttemptWatch(place_of(attempt), Task(1, 3))
    assert watch.begin_fence_if_due()
    clock.now += FENCE_EVERY_S + 0.1
    assert not watch.begin_fence_if_due()
    peers.is_whole = False
    assert watch.begin_fence_if_due()


def test_a_lone_node_looks_for_a_later_attempt_by_itself(
    attempt: AttemptFolder, clock: Clock, peers: Peers
) -> None:
    """Its slurmd may be dead, and the job requeued, with no peer to be gone."""
    watch = AttemptWatch(place_of(attempt), Task(0, 1))
    assert watch.begin_fence_if_due()
    clock.now += FENCE_EVERY_S + 0.1
    assert watch.begin_fence_if_due()


def test_a_wake_up_makes_it_look_at_once_and_some_more_times(
    attempt: AttemptFolder, clock: Clock, peers: Peers
) -> None:
    watch = AttemptWatch(place_of(attempt), Task(1, 3))
    assert watch.begin_look_if_due()
    peers.is_woken = True
    assert watch.begin_look_if_due()
    assert not watch.begin_look_if_due()
    count = looks(watch, clock, int(QUICK_S) + 2)
    assert QUICK_S - 1 <= count <= QUICK_S + 1
    assert looks(watch, clock, int(QUIET_S) - 5) == 0
    assert peers.woken == 0  # the links pass it on by themselves


def test_the_first_supervisor_sees_what_the_batch_script_writes_and_wakes_the_others(
    attempt: AttemptFolder, clock: Clock, peers: Peers
) -> None:
    watch = AttemptWatch(place_of(attempt), Task(0, 3))
    assert watch.begin_look_if_due()
    (attempt.path / "printed").write_text("of no concern")
    assert not watch.begin_look_if_due()
    for count, file in enumerate((attempt.notice, attempt.end_time, attempt.failed), 1):
        file.write_text("x")
        assert watch.begin_look_if_due()
        assert not watch.begin_look_if_due()
        assert peers.woken == count
    assert watch._folder
    watch._folder.close()  # Linux tells nothing any more
    clock.now += QUICK_S + LOOK_EVERY_S
    assert watch.begin_look_if_due()
    assert 9 <= looks(watch, clock, 10) <= 11


def test_beside_no_batch_script_the_disk_is_asked_each_second(
    attempt: AttemptFolder, clock: Clock, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an allocation the shell with the batch script may be on the login node."""
    monkeypatch.setenv("HPC_DDP_INTERACTIVE", "7")
    watch = AttemptWatch(place_of(attempt), Task(0, 3))
    assert watch.begin_look_if_due()
    assert 9 <= looks(watch, clock, 10) <= 11


def test_other_supervisors_hear_of_the_files_by_their_links_alone(
    attempt: AttemptFolder, clock: Clock, peers: Peers
) -> None:
    watch = AttemptWatch(place_of(attempt), Task(1, 3))
    assert watch.begin_look_if_due()
    attempt.notice.write_text("x")
    assert not watch.begin_look_if_due()
