"""Real worker processes on gloo, several per test, without waiting for torch each time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crews import Crew, Zygote, crews_of


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all processes of the test session."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def zygote(session_folder: Path) -> Iterator[Zygote]:
    process = Zygote(session_folder)
    yield process
    process.end()


@pytest.fixture
def make_crew(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[[str], Crew]]:
    yield from crews_of(zygote, tmp_path)


@pytest.fixture
def crew(make_crew: Callable[[str], Crew]) -> Crew:
    return make_crew("crew")
