"""Do the tests on the stand-in accelerator notice what is wrong with device code?

    make device-faults             removes one call or argument at a time; tests/ddp/test_device.py
    make device-faults ALL=1       survivors again, with tests/unit and all of `make test-device`;
                                   and which branches of device code these tests take, or those
                                   of tests/ddp on the CPU
    make device-faults REPORT=1    what there is, without running anything

The list is made from the code of `hpc_ddp/training`: each wait, event, stream, pinned memory, move
to a device, and seed. It works as `make mutants` does; see docs/testing.md.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import device_branches
from tools.command import make_parser, run_command
from tools.mutants import EQUIVALENT, Draw, Examination, Map, Reach, examine_all, report
from tools.mutations import Mutation, Places
from tools.store import REPO, RESULTS, Store, current_commit
from tools.suites import DEVICE_TESTS
from tools.working_copy import WorkingCopy

STORE = RESULTS / "device-faults.jsonl"
FOLDER = REPO / "hpc_ddp" / "training"
FIRST_TESTS = "tests/ddp/test_device.py"
ALL_TESTS = (*DEVICE_TESTS, "tests/cli/test_devices_here.py", "tests/unit")
ENVIRON = {"DEVICE": "sim"}
CPU_TESTS, CPU_ENVIRON = ("tests/ddp",), {"DEVICE": "cpu"}  # further ones that take branches
HANG_S = 60.0  # more than ten times what a test took: a collective that has no peer

# Calls of which nothing but the effect is wanted: the statement is removed.
EFFECTS = re.compile(
    r"(^|\.)(synchronize|wait|wait_event|wait_stream|record_stream|record|set_device_index|seed"
    r"|manual_seed|set_rng_state|put_random_state|set_requires_gradient_sync)$"
)
# Contexts that are removed; what stands below them stays.
CONTEXTS = re.compile(r"(^|\.)(device_index|stream|no_sync)$")
# Calls whose result is kept in an attribute or a dict: that statement is removed.
STATES = re.compile(r"(^|\.)(random_state|get_rng_state|mark)$")
# Arguments, with their values where they are not given.
ARGUMENTS = {"device": "None", "device_id": "None", "non_blocking": "False", "pin_memory": "False"}
SWITCHES = {"require_backward_grad_sync"}  # attributes: what DDP's no_sync sets
# Waits of the host for threads and processes, which have nothing to do with a device.
OTHERS = re.compile(r"self\._(known|ended)\.|multiprocessing\.")


def faults(source: str, file: str = "") -> list[Mutation]:
    """Return a mutation for each call and argument that concerns a device, in the order of the
    text."""
    collector = _Faults(source, file)
    collector.visit(ast.parse(source))
    return collector.in_order()


class _Faults(Places):
    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and _is_call_of(EFFECTS, node.value):
            self.add(node, "drop", "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        calls = [child for child in ast.walk(node.value) if isinstance(child, ast.Call)]
        target = node.targets[0]
        is_switch = isinstance(target, ast.Attribute) and target.attr in SWITCHES
        is_kept = isinstance(target, (ast.Attribute, ast.Subscript))
        if is_switch or (is_kept and any(_is_call_of(STATES, call) for call in calls)):
            self.add(node, "drop", "pass")
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and _is_call_of(CONTEXTS, call):
                self.add(call, "context", "__import__('contextlib').nullcontext()")
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value in ARGUMENTS:
                self.add(value, "argument", ARGUMENTS[key.value])
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        for argument in node.keywords:
            is_fixed = isinstance(argument.value, ast.Constant) and argument.value.value is not True
            if argument.arg in ARGUMENTS and not is_fixed:  # such as device="meta"
                self.add(argument.value, "argument", ARGUMENTS[argument.arg])
        if isinstance(node.func, ast.Attribute):
            receiver = self.text(*self.span(node.func.value))
            if node.func.attr == "to" and node.args and receiver != "self":
                self.add(node, "move", self._without_device(node, receiver))
            elif node.func.attr == "manual_seed" and receiver.endswith("Generator()"):
                self.add(node, "seed", receiver)
        self.generic_visit(node)

    def _without_device(self, node: ast.Call, receiver: str) -> str:
        """Return the text of a call ``.to(device, …)`` without the device: the other arguments, as
        a change of the type, or without any the receiver alone."""
        rest = [self.text(*self.span(argument)) for argument in node.args[1:]]
        return f"{receiver}.to({', '.join(rest)})" if rest else receiver


def _is_call_of(names: re.Pattern[str], call: ast.Call) -> bool:
    function = ast.unparse(call.func)
    return bool(names.search(function)) and not OTHERS.search(function)


def all_faults(folder: Path = FOLDER) -> list[Mutation]:
    """Return the faults of all modules of a folder."""
    paths = sorted(folder.rglob("*.py"))
    return [
        fault for path in paths for fault in faults(path.read_text(), str(path.relative_to(REPO)))
    ]


@dataclass
class DeviceExamination(Examination):
    """Runs the tests on the stand-in alone: the types are not checked."""

    def __post_init__(self) -> None:
        pass

    def _type_errors(self) -> list[str]:
        return []

    def _stages(self, mutation: Mutation, reach: Reach) -> Iterable[tuple[list[str], float]]:
        first = [test for test in reach.tests if test.startswith(FIRST_TESTS)]
        yield first, HANG_S
        yield self._shortest([test for test in reach.tests if test not in first], reach), HANG_S


def run(
    draw: Draw, maps: Sequence[Map], store: Store, commit: str, args: argparse.Namespace
) -> None:
    """Complete the `maps`, then try each fault of the draw on the tests of the first one."""
    copy = WorkingCopy("device-faults", dirty=args.dirty)
    for reached in maps:
        reached.complete(copy)
    examination = DeviceExamination(copy, int(args.all), args.seconds, ENVIRON)
    examine_all([draw], store, commit, maps[0], examination)


def main() -> int:
    parser = make_parser("make device-faults", __doc__)
    parser.add_argument(
        "--all", action="store_true", help="ALL: tests/unit and those of `make test-device`, too"
    )
    parser.add_argument(
        "--seconds", type=float, default=600, help="of the further tests, for each fault"
    )
    parser.add_argument("--list", action="store_true", help="show the faults and the branches")

    def act(args: argparse.Namespace) -> bool:
        draw = Draw("device", 0, all_faults())
        branches = Draw(device_branches.ROOM, 0, device_branches.all_branches())
        if args.list:
            print(*draw.mutations, *branches.mutations, sep="\n")
            return True
        commit, store = current_commit(), Store(None if args.dirty else STORE)
        draws, tests = ([draw, branches], ALL_TESTS) if args.all else ([draw], (FIRST_TESTS,))
        maps = [Map(store, commit, draws, tests, ENVIRON)]
        if args.all:
            maps.append(Map(store, commit, [branches], CPU_TESTS, CPU_ENVIRON))
        if not args.report:
            run(draw, maps, store, commit, args)
        is_whole = report([draw], store, commit, int(args.all))
        if args.all:
            is_whole &= device_branches.report(branches, maps, EQUIVALENT, print)
        return is_whole

    return run_command(parser, act)


if __name__ == "__main__":
    sys.exit(main())
