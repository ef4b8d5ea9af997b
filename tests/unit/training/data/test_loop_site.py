"""Whether the script is still in a loop whose generator a name keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from hpc_ddp.core.errors import UsageError
from hpc_ddp.training.data.batch_plan import Position
from hpc_ddp.training.data.call_order import CallOrder
from hpc_ddp.training.data.loop_site import LoopSite


class Run:
    """A run's loop, with the frames that `Run.steps` has."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.calls, self.position = CallOrder(self.lines.append), Position()
        self.places: list[bool] = []
        self.resumed = 0  # how often a loop that was taken for left has gone on

    def steps(self, total: int) -> Iterator[int]:
        with self.calls.enter_loop("steps", total, True, self.position) as (_, site):
            for step in range(total):
                yield step
                self._go_on(site)

    def _go_on(self, site: LoopSite) -> None:
        self.resumed += self.calls.continue_loop(site, self.position)

    def note(self) -> None:
        """Note whether the script is outside of a loop by now."""
        self.calls.end_left_loop()
        self.places.append(self.calls.loop is None)


class Bar:
    """As tqdm's, which keeps what it iterates over."""

    def __init__(self, iterable: Iterator[int]) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[int]:
        # By `yield from` it would close what it iterates over.
        for step in self.iterable:  # noqa: UP028
            yield step


def play(folder: Path, text: str) -> Run:
    """Run a script, which notes where it is by ``run.note()``; return its run."""
    script = folder / "train.py"
    script.write_text(dedent(text))
    run = Run()
    names: dict[str, Any] = {"run": run, "Bar": Bar, "__name__": "__main__"}
    exec(compile(script.read_text(), str(script), "exec", dont_inherit=True), names)
    return run


IN_A_FUNCTION = """
    def train(loop):
        for step in loop:
            run.note()
            if step == 1:
                break
        run.note()
    bar = {bar}
    train(bar)
    run.note()
"""
AT_THE_TOP = """
    def body(step):
        run.note()
        return step == 1
    for step in (bar := {bar}):
        try:
            if body(step):
                break
        finally:
            pass
    run.note()
    run.note()
"""


@pytest.mark.parametrize("text", [IN_A_FUNCTION, AT_THE_TOP])
@pytest.mark.parametrize("bar", ["Bar(run.steps(9))", "run.steps(9)", "enumerate(run.steps(9))"])
def test_a_loop_is_left_though_a_name_keeps_its_generator(
    tmp_path: Path, text: str, bar: str
) -> None:
    text = text.format(bar=bar)
    if bar.startswith("enumerate"):
        text = text.replace("for step in", "for _, step in")
    run = play(tmp_path, text)
    assert run.places == [False, False, True, True]
    run.calls.abandon_loops(run.position)
    assert run.position.abandoned == {1: ("steps", 9)}


def test_a_second_loop_may_follow_and_outlives_the_first_generator(tmp_path: Path) -> None:
    text = """
        bar = Bar(run.steps(9))
        for step in bar:
            break
        for step in run.steps(4):
            bar = None
            run.note()
        run.note()
    """
    assert play(tmp_path, text).places == [False] * 4 + [True]


def test_a_function_may_run_its_loop_again(tmp_path: Path) -> None:
    text = """
        bars = []
        def fit(total):
            bars.append(Bar(run.steps(total)))
            for step in bars[-1]:
                run.note()
                if step == 1:
                    break
        fit(4)
        fit(7)
        run.note()
    """
    assert play(tmp_path, text).places == [False] * 4 + [True]


def test_a_loop_in_parts_goes_on(tmp_path: Path) -> None:
    """Between two parts nothing shows whether another one will come."""
    text = """
        from itertools import islice
        loop = run.steps(6)
        for _ in range(3):
            for step in islice(loop, 2):
                run.note()
            run.note()
            run.calls.abandon_loops(run.position)
        for step in loop:
            run.note()
    """
    run = play(tmp_path, text)
    assert run.places == [False, False, True] * 3
    assert (run.resumed, run.position.abandoned) == (3, {})
    assert run.calls.loop is None


def test_a_later_part_of_a_loop_is_in_it(tmp_path: Path) -> None:
    text = """
        from itertools import islice
        loop = run.steps(5)
        for step in islice(loop, 2):
            run.note()
        for step in loop:
            run.note()
            if step == 3:
                break
        run.note()
    """
    run = play(tmp_path, text)
    assert run.places == [False] * 4 + [True]


@pytest.mark.parametrize("ends", ["raise StopIteration", "return next(self.steps)"])
def test_an_iterator_that_asks_by_a_loop_is_in_its_callers(tmp_path: Path, ends: str) -> None:
    text = f"""
        class Steps:
            def __init__(self, steps):
                self.steps = steps
            def __iter__(self):
                return self
            def __next__(self):
                for step in self.steps:
                    return step
                {ends}
        steps = Steps(run.steps(5))
        for step in steps:
            run.note()
            if step == 2:
                break
        run.note()
    """
    assert play(tmp_path, text).places == [False] * 3 + [True]


def test_a_generator_of_the_script_is_in_its_loop_behind_its_yield(tmp_path: Path) -> None:
    text = """
        def trainer():
            for step in run.steps(3):
                yield step
                run.note()
        for step in trainer():
            run.note()
        run.note()
    """
    assert play(tmp_path, text).places == [False] * 6 + [True]


def test_a_kept_loop_that_is_replaced_was_left_by_break(tmp_path: Path) -> None:
    text = """
        for _ in range(2):
            bar = Bar(run.steps(9))
            for step in bar:
                break
            run.note()  # as run.load_best
        for step in run.steps(9):
            pass
    """
    run = play(tmp_path, text)
    assert run.places == [True, True]
    assert [line.partition(":")[0] for line in run.lines] == ["WARNING"]


def test_a_loop_does_not_go_on_behind_a_later_one(tmp_path: Path) -> None:
    text = """
        first, second = run.steps(6), run.steps(8)
        for loop in (first, second, first):
            for step in loop:
                break
    """
    with pytest.raises(UsageError, match="asked for more after a later one had begun"):
        play(tmp_path, text)


def test_within_the_loop_it_is_not_left(tmp_path: Path) -> None:
    text = """
        def trainer():
            for step in run.steps(3):
                yield step
        for step in trainer():
            run.note()
        for step in (bar := run.steps(2)):
            try:
                1 / 0
            except ZeroDivisionError:
                run.note()
        run.note()
    """
    assert play(tmp_path, text).places == [False] * 5 + [True]
    nested = """
        for step in (bar := run.steps(2)):
            for other in run.steps(3):
                pass
    """
    with pytest.raises(UsageError, match=r"run\.steps was called inside run\.steps"):
        play(tmp_path, nested)


@pytest.mark.parametrize(
    "call",
    [
        "asyncio.run(main())",
        "list(trainer())",
        "[step for step in trainer()]",
        "next(trainer(), 0)",
    ],
)
def test_a_coroutine_or_generator_leaves_its_loop(tmp_path: Path, call: str) -> None:
    text = f"""
        import asyncio
        async def main():
            for step in (bar := Bar(run.steps(9))):
                await asyncio.sleep(0)
                run.note()
                break
            run.note()
            for step in run.steps(2):
                run.note()
        def trainer():
            for step in (bar := Bar(run.steps(9))):
                run.note()
                break
            run.note()
            for step in run.steps(2):
                run.note()
            yield
        {call}
    """
    assert play(tmp_path, text).places == [False, True, False, False]


@pytest.mark.parametrize(
    "loop",
    [
        "map(train, run.steps(3))",
        "(train(step) for step in run.steps(3))",
        "Bar(train(step) for step in Bar(run.steps(3)))",
        "Trainer()",
    ],
)
def test_a_body_in_place_of_an_element_is_within_the_loop(tmp_path: Path, loop: str) -> None:
    text = f"""
        def train(step):
            run.note()
        class Trainer:
            def __iter__(self):
                self.steps = iter(run.steps(3))
                return self
            def __next__(self):
                return train(next(self.steps))
        for _ in {loop}:
            pass
        run.note()
    """
    assert play(tmp_path, text).places == [False] * 3 + [True]


@pytest.mark.parametrize(
    "text",
    [
        "loop = run.steps(9)\nnext(loop)\nrun.note()",
        "[run.note() for step in run.steps(1)]",
    ],
)
def test_where_nothing_shows_it_the_loop_goes_on(tmp_path: Path, text: str) -> None:
    assert play(tmp_path, text).places == [False]


def test_batches_of_another_thread_are_refused(tmp_path: Path) -> None:
    """A thread that fetches ahead would save in the midst of a step, for a later position."""
    text = """
        from threading import Thread
        for step in run.steps(2):
            run.calls.note_batch()
            run.calls.check_step(False)
            fetcher = Thread(target=run.calls.note_batch)
            fetcher.start()
            fetcher.join()
            run.calls.check_step(False)
    """
    in_step = """
        from concurrent.futures import ThreadPoolExecutor
        def train():
            run.calls.note_batch()
            run.calls.check_step(False)
        with ThreadPoolExecutor(1) as pool:
            for step in run.steps(2):
                pool.submit(train).result()
                run.calls.note_batch()
                pool.submit(run.calls.check_step, False).result()
    """
    play(tmp_path, in_step)
    with pytest.raises(UsageError, match="iterated in another thread"):
        play(tmp_path, text)


def test_a_script_that_was_changed_shows_nothing(tmp_path: Path) -> None:
    text = f"""
        from pathlib import Path
        for step in (bar := run.steps(9)):
            break
        Path({str(tmp_path / "train.py")!r}).write_text("print()")
        run.note()
    """
    assert play(tmp_path, text).places == [False]
