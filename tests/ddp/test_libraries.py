"""Trainings of other libraries: stopped at one step, resumed there, by `hpc_ddp.integrations`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crews import Crew, Zygote, crews_of

from hpc_ddp.core.checkpoints import published, step_of, verify

OFFLINE = {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "1", "TOKENIZERS_PARALLELISM": "false"}
LIBRARIES = ("transformers", "lightning", "accelerate", "dcp")
SAVE = ("--save-every-steps", "4")
SLOW = ("--step-seconds", "0.15")  # so that the ranks exchange their notices at every step or two


@pytest.fixture(scope="module")
def library_zygote() -> Iterator[Zygote]:
    """A process of its own, since the libraries change what is imported, and how."""
    process = Zygote()
    process.ask({"import": ["transformers.trainer", "lightning", "accelerate"]})
    yield process
    process.end()


@pytest.fixture
def make_crew(library_zygote: Zygote, tmp_path: Path) -> Iterator[Callable[[str], Crew]]:
    yield from crews_of(library_zygote, tmp_path)


def launch(crew: Crew, library: str, *argv: str, ranks: int = 2) -> Any:
    plain = ("--plain",) if library == "lightning" else ()
    env = {**OFFLINE, "TMPDIR": str(crew.base)}
    script = f"libraries/with_{library}.py"
    return crew.launch(ranks, *plain, *argv, script=script, **env)


def go(crew: Crew, library: str, *argv: str, ranks: int = 2) -> str:
    started = launch(crew, library, *argv, ranks=ranks)
    codes = started.wait()
    assert not any(codes), started.output()
    return str(started.output())


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_notice_amid_an_epoch(make_crew: Callable[[str], Crew], library: str) -> None:
    """The ranks are signalled in different steps; a rank may hear of it a step later."""
    whole, stopped = make_crew("whole"), make_crew("stopped")
    go(whole, library)
    go(stopped, library, *SLOW, "--at", "9")
    (stop,) = stopped.events("stopped")
    assert stop["reason"] == "notice"
    assert 9 <= stop["step"] < 16
    assert not stopped.events("finished")
    (folder,) = published(stopped.run.checkpoints)
    assert step_of(folder) == stop["step"]
    assert verify(folder) is None
    printed = go(stopped, library)
    assert f"going on from step {stop['step']} of" in printed
    assert [event["step"] for event in stopped.events("first_step")] == [1, stop["step"] + 1]
    assert [event["step"] for event in stopped.events("finished")] == [24]
    (*_, line) = stopped.events("metrics")
    assert (line["step"], line["total_steps"]) == (24, 24)
    assert isinstance(line["loss"], float)
    assert stopped.weights == whole.weights
