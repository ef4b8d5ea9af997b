"""Loader workers that die, explained in an error."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.training.data.batch_plan import MicroBatch
from hpc_ddp.training.devices import CPU

DEATH_S = 10.0  # the connection to a worker may break before the kernel says that it has ended
POLL_S = 0.01
HINTS = {
    "is killed by signal: Killed": "was it out of memory? try fewer num_workers, or more memory for"
    " the job",
    "is killed by signal: Bus error": "is /dev/shm full? try fewer num_workers, or smaller batches",
}
# torch's own words.
_REPORT = re.compile(
    r"DataLoader worker \(pid.*?\) (is killed by signal: [^.]+|exited unexpectedly)"
    r"(?: with exit (code \d+))?"
)


def iterate_watched(
    batches: DataLoader[Any], on_begin: Callable[[], None] = lambda: None
) -> Iterator[tuple[MicroBatch, Any]]:
    """Yield each micro-batch of a loader of `make_dataloader` with its content, the collated
    samples; errors of the data set come through. `on_begin` is called before the first micro-batch
    is made, and after the loader has drawn its own random numbers.

    Raises
    ------
    HpcDdpError
        a loader worker has died; the message names the signal or the exit code
    """
    try:
        yield from _iterate(batches, on_begin)
    # torch's handler of SIGCHLD raises once for each loader: perhaps while `_iterate` explains the
    # first error.
    except RuntimeError as error:
        death = _explain(error, ())
        if death is None:
            raise
        raise death from error


def _iterate(
    batches: DataLoader[Any], on_begin: Callable[[], None]
) -> Iterator[tuple[MicroBatch, Any]]:
    """Do what `iterate_watched` does; but RuntimeError comes through if torch's handler raises it
    during the explanation. Shorten the message of an HpcDdpError that the data set has raised in a
    worker, where torch has put a traceback before it."""
    # If ``iter`` fails for persistent workers, they are those of the last epoch's iterator.
    iterator: Any = getattr(batches, "_iterator", None)
    try:
        # ``iter`` draws by a generator of the CPU, which fails where the script has set another
        # default device. Workers that are forked here keep the context, which costs each call of
        # torch there 2 us, so it is entered only where it changes something.
        is_cpu = torch.get_default_device() == CPU
        with nullcontext() if is_cpu else torch.device("cpu"):
            iterator = iter(batches)
        on_begin()
        for batch in iterator:
            yield batch.micro_batch, batch.content
    except HpcDdpError as error:
        if "in DataLoader worker process" in error.message:
            # A traceback ends with "NAME OF THE CLASS: message".
            error.message = re.split(r"^[\w.]+Error: ", error.message.strip(), flags=re.M)[-1]
        raise
    except (RuntimeError, ConnectionError, EOFError) as error:
        death = _explain(error, getattr(iterator, "_workers", ()))
        if death is None:
            raise
        raise death from error


def _explain(error: BaseException, workers: Sequence[BaseProcess]) -> HpcDdpError | None:
    """Return the error for the death of a loader worker, None if `error` has another cause.

    If torch's handler of SIGCHLD has noticed the death first, its text names the signal; the worker
    may be another loader's. The handler raises wherever the main thread happens to be, also where
    Python drops the exception. Without the handler's text, or with no more than "exited
    unexpectedly" in it, wait for the exit codes of this loader's `workers`, `DEATH_S` seconds at
    most.
    """
    report = _REPORT.match(str(error.__cause__)) or _REPORT.match(str(error))
    if report is not None:
        how = report[1] + (f" with {report[2]}" if report[2] else "")
    elif isinstance(error, RuntimeError) or "in DataLoader worker process" in str(error):
        return None  # the data set has raised it
    else:
        how = ""
    if how in ("", "exited unexpectedly"):
        how = _wait_for_failure(workers) or how
    hint = HINTS.get(how, "num_workers=0 shows where: the data set then runs in this process")
    return HpcDdpError(f"DataLoader worker {how}", hint=hint) if how else None


def _wait_for_failure(workers: Sequence[BaseProcess]) -> str:
    """Wait until one of `workers` fails, or all have ended, `DEATH_S` seconds at most. Return how
    the first one in their order failed, as a piece of a sentence; "" where none did.

    A worker that has reached the end of its share of a stream ends with 0, and has not failed.
    """
    deadline = time.monotonic() + DEATH_S
    codes = [worker.exitcode for worker in workers]
    while None in codes and not any(codes) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        codes = [worker.exitcode for worker in workers]
    code = next(filter(None, codes), 0)
    if code < 0:
        return f"is killed by signal: {signal.strsignal(-code) or -code}"
    return f"exited unexpectedly with code {code}" if code else ""
