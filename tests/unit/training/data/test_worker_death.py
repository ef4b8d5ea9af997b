"""The death of a loader worker is named by its exit code or by torch's words."""

from __future__ import annotations

from typing import Any, cast

import pytest

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.training.data import worker_death


class Worker:
    """A loader worker: it has ended with `exitcode`, or lives where that is None."""

    def __init__(self, exitcode: int | None) -> None:
        self.exitcode = exitcode


class Batches:
    """An iterator of torch's whose next batch is an error."""

    def __init__(self, error: BaseException, *workers: Worker) -> None:
        self._error, self._workers = error, workers
        self._iterator: Batches | None = None

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        raise self._error


def _watch(error: BaseException, *exit_codes: int | None) -> BaseException:
    """Return what comes of an error of a loader whose workers have these exit codes."""
    workers = [Worker(code) for code in exit_codes]
    explained: BaseException | None = None
    try:
        list(worker_death.iterate_watched(cast(Any, Batches(error, *workers))))
    except Exception as raised:
        explained = raised
    assert explained is not None
    return explained


GONE = "DataLoader worker (pid(s) 41) exited unexpectedly"
EXITED = "DataLoader worker (pid 41) exited unexpectedly with exit code 7"
KILLED = "DataLoader worker (pid 41) is killed by signal: Killed. "


@pytest.mark.parametrize(
    ("error", "exit_codes", "message", "hint"),
    [
        (RuntimeError(GONE), (None, -9), "is killed by signal: Killed", "out of memory"),
        (RuntimeError(KILLED), (-9, None), "is killed by signal: Killed", "out of memory"),
        (ConnectionResetError(), (-7, None), "is killed by signal: Bus error", "/dev/shm"),
        (EOFError(), (-11,), "is killed by signal: Segmentation fault", "num_workers=0"),
        (RuntimeError(GONE), (7,), "exited unexpectedly with code 7", "num_workers=0"),
        (RuntimeError(GONE), (0,), "exited unexpectedly", "num_workers=0"),
        (RuntimeError(GONE), (0, -9), "is killed by signal: Killed", "out of memory"),
        (EOFError(), (0, 0, -9), "is killed by signal: Killed", "out of memory"),
        # Another loader's worker: torch's handler is the same for all.
        (RuntimeError(KILLED), (None, None), "is killed by signal: Killed", "out of memory"),
        (RuntimeError(KILLED), (), "is killed by signal: Killed", "out of memory"),
        (RuntimeError(f"{EXITED}. Details"), (), "exited unexpectedly with code 7", "num_workers"),
        (RuntimeError(GONE), (-40,), "is killed by signal: Real-time signal 6", "num_workers=0"),
    ],
)
def test_a_dead_worker_is_named_by_its_exit_code(
    error: BaseException, exit_codes: tuple[int | None, ...], message: str, hint: str
) -> None:
    explained = _watch(error, *exit_codes)
    assert isinstance(explained, HpcDdpError)
    assert explained.message == f"DataLoader worker {message}"
    assert hint in str(explained.hint)
    assert explained.__cause__ is error


def test_no_worker_is_waited_for_where_torch_has_named_the_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_death, "_wait_for_failure", pytest.fail)
    assert "signal: Killed" in str(_watch(RuntimeError(KILLED), None))


def test_persistent_workers_may_die_before_an_iterator_exists() -> None:
    class Persistent(Batches):
        def __iter__(self) -> Batches:
            raise self._error

    batches = Persistent(RuntimeError(GONE))
    batches._iterator = Batches(KeyError(), Worker(-9))
    with pytest.raises(HpcDdpError, match="killed by signal: Killed"):
        list(worker_death.iterate_watched(cast(Any, batches)))


def test_the_cause_of_an_error_may_name_the_worker() -> None:
    error = RuntimeError("unable to open a file")
    error.__cause__ = RuntimeError(KILLED)
    assert "signal: Killed" in str(_watch(error, -9))


@pytest.mark.parametrize(
    ("error", "exit_codes"),
    [
        (RuntimeError("mine"), (-9,)),
        (ConnectionResetError("the data set's own, without workers"), ()),
        (EOFError("x"), (None,)),
        (ValueError("x"), (-9,)),
        (ConnectionError("Caught ConnectionError in DataLoader worker process 0."), (-9,)),
    ],
)
def test_an_error_without_a_dead_worker_is_unchanged(
    error: BaseException, exit_codes: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_death, "DEATH_S", 0.0)
    assert _watch(error, *exit_codes) is error


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("Caught UsageError in DataLoader worker process 0.\nTrace\na.b.Error: no x\n", "no x"),
        ("Caught A in DataLoader worker process 0.\nTrace\na.Error: no x:\n y\n", "no x:\n y"),
        ("two\nlines", "two\nlines"),
    ],
)
def test_an_error_of_a_data_set_is_shown_without_torchs_words(message: str, shown: str) -> None:
    error = HpcDdpError(message)
    assert _watch(error) is error
    assert error.message == shown


class Late(Worker):
    """A loader worker whose exit code is known only a moment later."""

    def __init__(self, code: int) -> None:
        self._codes = iter([None, None])
        self._code = code

    @property
    def exitcode(self) -> int | None:  # type: ignore[override]
        return next(self._codes, self._code)


def test_a_worker_that_has_just_ended_is_waited_for() -> None:
    with pytest.raises(HpcDdpError, match="killed by signal: Killed"):
        list(worker_death.iterate_watched(cast(Any, Batches(RuntimeError(GONE), Late(-9)))))


class Interrupted:
    """A loader worker during whose burial torch's handler raises once more."""

    @property
    def exitcode(self) -> int:
        raise RuntimeError(KILLED)


def test_a_signal_during_the_search_for_the_dead_worker_is_reported() -> None:
    batches = Batches(RuntimeError(GONE))
    batches._workers = cast(Any, [Interrupted()])
    with pytest.raises(HpcDdpError, match="killed by signal: Killed"):
        list(worker_death.iterate_watched(cast(Any, batches)))


class Unreadable(ConnectionResetError):
    """A broken connection to a worker; torch's handler raises while it is looked at."""

    def __str__(self) -> str:
        raise RuntimeError(KILLED)


def test_a_signal_during_the_explanation_is_reported() -> None:
    with pytest.raises(HpcDdpError, match="killed by signal: Killed"):
        list(worker_death.iterate_watched(cast(Any, Batches(Unreadable()))))
