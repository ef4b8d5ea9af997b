"""Real worker processes on gloo, several per test, without waiting for torch each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crews import Crew, Zygote, crews_of


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    process = Zygote()
    yield process
    process.end()


@pytest.fixture
def make_crew(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[[str], Crew]]:
    yield from crews_of(zygote, tmp_path)


@pytest.fixture
def crew(make_crew: Callable[[str], Crew]) -> Crew:
    return make_crew("crew")
