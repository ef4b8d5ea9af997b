"""The mutants tool finds places to change, draws some by a seed, and puts probes there."""

from __future__ import annotations

import ast
import random
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tools.mutations import (
    Equivalent,
    Mutation,
    draw_from,
    files_of,
    mutations,
    outdated,
    read_equivalent,
    reason_by_mutation,
    with_probes,
)
from tools.store import REPO, ToolError

PROGRAM = '''\
"""A docstring, 1."""
from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from x import y

__all__ = ["go"]
LIMIT: int = 5


class Thing:
    size = 0.5

    def go(self, a: int, b: list[int] = [1]) -> bool | None:
        """Go, 2."""
        self.a = a  # a < b
        if a in b and (a == 1 or
                       not b):  # and so
            os.getpid()
            return None
        while a < 3 <= 4:
            a += 1
            if a == 2: continue
        assert a == 3, "é"
        if "é" and not a:
            raise ValueError("wording" if a else 1)
        print("wording", 7, end="" if a else "x")
        return [each for each in b if each is not None] == b or -1 > a


def run() -> bool | None:
    return Thing().go(1, [1, 2])
'''


def changes(source: str) -> list[str]:
    return [f"{mutation.kind} {mutation.change}" for mutation in mutations(source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a and b and c", ["and/or a and b and c -> a or b or c"]),
        ("(a) or (b)", ["and/or (a) or (b) -> (a) and (b)"]),
        ("a is not b", ["compare a is not b -> a is b"]),
        ("a not in b", ["compare a not in b -> a in b"]),
        ("a < b == c", ["compare a < b == c -> a < b != c", "compare a < b == c -> a <= b == c"]),
        ("x[0]", ["constant 0 -> 1"]),
        ("x(True, 2.5, -1)", [
            *("drop x(True, 2.5, -1) -> pass", "constant True -> False", "constant 2.5 -> 3.5"),
            "constant 1 -> 2",
        ]),
        ("raise X(1)", ["drop raise X(1) -> pass"]),
        ("print(1, end=2)", ["drop print(1, end=2) -> pass"]),
        ("x = 1 if a else b", ["constant 1 -> 2", "negate a -> not (a)"]),
        ("x.y = z", ["drop x.y = z -> pass"]),
        ("x.y += z", ["drop x.y += z -> pass"]),
        ("x.y: int = z", ["drop x.y: int = z -> pass"]),
        ("x: Literal[1] = z", []),
        ("assert a == 1", []),
        ("f'{a + 1}'", []),
        ("def f(a: Literal[1]) -> Literal[2]: ...", []),
        ("def f(): return None", []),
        ("def f(): return 0", ["return return 0 -> return None", "constant 0 -> 1"]),
        ("@cache(1)\ndef f(): ...", []),
        ("match a:\n case 1: b", []),
        ("'a'", []),
    ],
)  # fmt: skip
def test_each_kind_of_code_has_its_mutations(source: str, expected: list[str]) -> None:
    assert changes(source) == expected


def test_each_mutation_changes_the_program_and_one_place_of_it() -> None:
    places = mutations(PROGRAM)
    assert {place.kind for place in places} == {
        *("and/or", "negate", "compare", "constant", "return", "drop")
    }
    for mutation in places:
        content = mutation.apply(PROGRAM.encode())
        assert ast.dump(ast.parse(content)) != ast.dump(ast.parse(PROGRAM)), mutation
        assert content[: mutation.start] == PROGRAM.encode()[: mutation.start]
        assert PROGRAM.splitlines()[mutation.line - 1].strip() == mutation.text


def test_a_seed_draws_the_same_each_time() -> None:
    sources = {"a.py": PROGRAM, "b.py": PROGRAM.replace("Thing", "Other")}
    few, many, third = (
        draw_from(sources, random.Random(seed), count) for seed, count in ((7, 5), (7, 12), (8, 12))
    )
    assert few == draw_from(sources, random.Random(7), 5)
    assert few == many[:5]
    assert many != third
    assert len({(mutation.file, mutation.line) for mutation in many}) == 12


@pytest.mark.parametrize("count", [-1, 0, 1000])
def test_nonsense_counts_are_refused(count: int) -> None:
    with pytest.raises(ToolError, match=r"accepted: 1 to \d+"):
        draw_from({"a.py": PROGRAM}, random.Random(7), count)


def test_a_room_names_its_files() -> None:
    assert files_of("slurm") == ["hpc_ddp/slurm.py", "hpc_ddp/slurm_text.py"]
    assert "hpc_ddp/training/stops/consensus.py" in files_of("training")
    assert "hpc_ddp/training/telemetry/metrics.py" not in files_of("training")
    assert {*files_of("node"), *files_of("core")} < {*files_of("essential")}
    with pytest.raises(
        ToolError, match=r"ROOM is 'kitchen'; accepted: essential, node, .*, report"
    ):
        files_of("kitchen")


def run_program(source: str) -> Any:
    space: dict[str, Any] = {"__name__": "program"}
    exec(compile(source, "program.py", "exec"), space)
    return space["run"]()


def test_probes_record_the_test_and_change_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = dict(enumerate(mutations(PROGRAM)))
    probed = with_probes(PROGRAM, places, tmp_path)
    for test in ("tests/a.py::b (call)", "tests/a.py::c (setup)"):
        monkeypatch.setenv("PYTEST_CURRENT_TEST", test)
        assert run_program(probed) == run_program(PROGRAM)
    assert ast.get_docstring(ast.parse(probed)) == "A docstring, 1."
    reached = {int(path.name): path.read_text().splitlines() for path in tmp_path.iterdir()}
    place = {n for n, mutation in places.items() if mutation.text == "self.a = a  # a < b"}
    assert place <= reached.keys()
    assert all(lines == sorted(lines) and len(lines) == 2 for lines in reached.values())
    (raised,) = (n for n, mutation in places.items() if mutation.before.startswith("raise"))
    assert raised not in reached


def test_a_probe_without_the_variable_takes_the_current_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    (place,) = mutations("def run(): return 0")[:1]
    probed = with_probes("def run(): return 0", {3: place}, tmp_path)
    assert run_program(probed) == 0
    (tmp_path / "current").write_text("tests/a.py::b")
    assert run_program(probed) == 0
    assert (tmp_path / "3").read_text() == "import\ntests/a.py::b\n"


def test_a_probe_that_cannot_write_does_not_raise(tmp_path: Path) -> None:
    (place,) = mutations("def run(): return 0")[:1]
    probed = with_probes("def run(): return 0", {3: place}, tmp_path / "gone")
    assert run_program(probed) == 0


def equivalent(text: str) -> Equivalent:
    return Equivalent("hpc_ddp/slurm.py", text, "1 -> 2", "a pause")


def test_equivalent_mutations_are_found_by_the_text_of_their_line() -> None:
    mutation = Mutation("hpc_ddp/slurm.py", 3, "constant", "1", "2", 0, 1, text="pause(1)")
    assert reason_by_mutation([mutation], [equivalent("  pause(1)")]) == {mutation: "a pause"}
    assert reason_by_mutation([mutation], [equivalent("pause(2)")]) == {}


def test_a_line_that_is_gone_is_reported() -> None:
    line = REPO.joinpath("hpc_ddp/slurm.py").read_text().splitlines()[0]
    entries = [equivalent(line), equivalent("no such line")]
    assert list(outdated(entries)) == entries[1:]


def test_the_list_of_equivalent_mutations_is_current() -> None:
    entries = read_equivalent(REPO / "docs" / "results" / "equivalent.toml")
    assert list(outdated(entries)) == []


def test_a_list_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "equivalent.toml"
    path.write_text(textwrap.dedent('[[equivalent]]\nfile = "a"\nmutants = 3\n'))
    with pytest.raises(ToolError, match=r"equivalent\.toml can't be read"):
        read_equivalent(path)
