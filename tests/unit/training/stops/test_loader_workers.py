"""Loader workers of a script's own DataLoader, and a signal to every process of a step."""

from __future__ import annotations

import subprocess

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data._utils import worker

from hpc_ddp.training.stops.loader_workers import outlive_notices


@pytest.fixture
def patient_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_worker_loop", worker._worker_loop)  # put back in the end
    outlive_notices()


class Programs(Dataset[int]):
    """Each sample is the exit code of a program that the worker has started, and ended."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        program = subprocess.Popen(["sleep", "600"])
        program.terminate()
        return program.wait(60)


@pytest.mark.usefixtures("patient_workers")
def test_a_worker_can_end_a_program_that_it_has_started() -> None:
    (code,) = DataLoader(Programs(), num_workers=1, multiprocessing_context="fork")
    assert code.item() < 0


@pytest.mark.usefixtures("patient_workers")
def test_a_worker_outlives_a_signal_of_the_cluster_and_obeys_its_rank() -> None:
    loader = DataLoader(
        TensorDataset(torch.arange(8.0)),
        num_workers=1,
        multiprocessing_context="fork",
        persistent_workers=True,
    )
    batches = iter(loader)
    next(batches)
    (process,) = batches._workers  # type: ignore[attr-defined]
    for name in ("TERM", "INT", "USR1"):
        subprocess.run(["kill", f"-{name}", str(process.pid)], check=True)
    assert len(list(batches)) == 7
    process.terminate()  # what multiprocessing does at the rank's exit, and then waits
    process.join(60)
    assert process.exitcode == 0
