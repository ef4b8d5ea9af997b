"""Loader workers that die, explained in an error."""

from __future__ import annotations

import multiprocessing.connection
import re
import signal
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader

from hpc_ddp.core.errors import HpcDdpError
from hpc_ddp.training.data.order import MicroBatch

_SHOWN_HERE = "num_workers=0 shows where: the data set then runs in this process"


DEATH_S = 10.0  # the connection to a worker may break before the kernel says that it has ended


def watched(batches: DataLoader[Any]) -> Iterator[tuple[MicroBatch, Any]]:
    """Yield the batches; raise an error that explains how a loader worker has died."""
    iterator: Any = None
    try:
        try:
            with torch.device("cpu"):  # it draws by a generator of the CPU
                iterator = iter(batches)
            for batch in iterator:
                yield batch.share, batch.content
        except HpcDdpError as error:
            if "in DataLoader worker process" in error.message:  # and a traceback in front of it
                error.message = error.message.strip().splitlines()[-1].partition("Error: ")[2]
            raise
        except (ConnectionError, EOFError) as error:
            _raise_death(error, _workers(batches, iterator))
            raise
    except RuntimeError as error:  # torch's own; its handler may interrupt what is done above
        _raise_death(error, _workers(batches, iterator))
        raise


def _workers(batches: DataLoader[Any], iterator: Any) -> Sequence[BaseProcess]:
    """Return the worker processes; those that persist may fail before there is an iterator."""
    if iterator is None:
        iterator = getattr(batches, "_iterator", None)
    return getattr(iterator, "_workers", ())


def _raise_death(error: BaseException, workers: Sequence[BaseProcess]) -> None:
    """Raise an HpcDdpError that says how a loader worker has ended, if that is what `error` is."""
    try:
        _explain_death(error, workers)
    except RuntimeError as later:  # torch's handler, which raises once for each loader
        _explain_death(later, workers)


def _explain_death(error: BaseException, workers: Sequence[BaseProcess]) -> None:
    """Raise the HpcDdpError, or return.

    torch's handler of SIGCHLD names the signal, also of another loader's worker, if it is the first
    to notice. It raises wherever the main thread happens to be, also where Python drops the
    exception; then the exit codes of this loader's workers show it.
    """
    texts = (str(error.__cause__), str(error))
    report = next((text for text in texts if text.startswith("DataLoader worker (pid")), "")
    killed = re.search(r"killed by signal: ([^.]+)\.", report)
    exited = re.search(r"with exit code (\d+)", report)
    if killed:
        raise _killed(killed[1]) from error
    if exited:
        raise _exited(f" with code {exited[1]}") from error
    raised_by_data_set = "in DataLoader worker process" in str(error)
    if not report and (raised_by_data_set or isinstance(error, RuntimeError)):
        return
    code = _exit_code(workers)
    if code is not None and code < 0:
        raise _killed(signal.strsignal(-code) or f"signal {-code}") from error
    if code is not None:
        raise _exited(f" with code {code}") from error
    if report:
        raise _exited("") from error


def _exit_code(workers: Sequence[BaseProcess]) -> int | None:
    """Return the exit code of a worker that has failed, None where none fails within `DEATH_S`.

    One that has reached the end of its part of a stream ends with 0.
    """
    deadline = time.monotonic() + DEATH_S
    while candidates := [worker for worker in workers if worker.exitcode != 0]:
        sentinels = [worker.sentinel for worker in candidates]
        left_s = max(deadline - time.monotonic(), 0.0)
        ended = multiprocessing.connection.wait(sentinels, left_s)
        if not ended:
            return None
        for worker in candidates:
            if worker.sentinel in ended:
                worker.join()
                if worker.exitcode:
                    return worker.exitcode
    return None


def _killed(name: str) -> HpcDdpError:
    hints = {
        "Killed": "was it out of memory? try fewer num_workers, or more memory for the job",
        "Bus error": "is /dev/shm full? try fewer num_workers, or smaller batches",
    }
    return HpcDdpError(
        f"DataLoader worker is killed by signal: {name}", hint=hints.get(name, _SHOWN_HERE)
    )


def _exited(how: str) -> HpcDdpError:
    return HpcDdpError(f"DataLoader worker exited unexpectedly{how}", hint=_SHOWN_HERE)
