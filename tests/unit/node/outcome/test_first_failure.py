from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from hpc_ddp.core.errors import EARLY_EXIT
from hpc_ddp.core.journal.journal import Journal
from hpc_ddp.core.run_folder import RunFolder
from hpc_ddp.node.outcome.first_failure import (
    Failure,
    abort_reason,
    early_exits,
    first_cause,
    journaled_error,
    last_exception,
    read_failures,
    reason_of,
)
from hpc_ddp.node.workers.worker import AGAIN
from tests.raw_events import changed, raw
from unit.node.outcome.fakes import event_of


def _failure(rank: int, code: int = 1, error: str = "", time: float = 0.0) -> Failure:
    return Failure(rank=rank, node="n", code=code, time=time, error=error)


CAUSE = _failure(3, error="ValueError: boom", time=2.0)


@pytest.mark.parametrize(
    "follower",
    [
        _failure(
            0, error="RuntimeError: [.../gloo/transport/tcp/pair.cc] Connection closed by peer"
        ),
        _failure(1, error="torch.distributed.DistBackendError: NCCL communicator was aborted"),
        _failure(2, code=-15),
        _failure(2, code=143),
    ],
)
def test_a_consequence_is_not_the_cause(follower: Failure) -> None:
    assert first_cause([follower, CAUSE]) == CAUSE


def test_the_earliest_of_equal_failures_is_the_cause() -> None:
    early = _failure(1, error="KeyError: 1", time=1.0)
    assert first_cause([CAUSE, early]) == early
    assert first_cause([]) is None


HANG = _failure(0, error="HangError: no step for 9 s at step 3; stacks in /gloo/s", time=2.0)


def test_a_rank_that_leaves_by_itself_is_the_cause_beside_failures_of_others() -> None:
    exit_event = event_of("failed", rank=1, node="n", step=5, error=EARLY_EXIT)
    exits = early_exits([exit_event], 0)
    lost = _failure(0, error="RuntimeError: Connection closed by peer")
    cause = first_cause([lost], exits)
    assert str(cause) == f"rank 1 on n: {EARLY_EXIT}, at step 5"
    assert cause is not None
    assert (cause.kind, cause.exit_code) == ("left", 1)
    assert first_cause([lost, CAUSE], exits) == CAUSE  # an error behind the loop, say
    assert first_cause([HANG], exits) == cause
    refused = _failure(1, code=3)
    assert first_cause([lost, refused], exits) == refused  # it has an exit code of its own
    other = early_exits([changed(exit_event, rank=0, time=1.0)], 0)  # it has caught its error
    assert first_cause([refused], [*exits, *other]) == refused
    late = _failure(1, code=-15)  # torn down at its exit
    assert first_cause([lost, late], exits) == cause
    assert first_cause([], exits) is None  # all ranks have left
    again = changed(event_of("worker", began=0.0, called=0.0), time=1.0)
    assert early_exits([exit_event, again], 0) == []  # before the last start
    assert early_exits([exit_event], 1) == []
    assert early_exits([changed(exit_event, error="ValueError: boom")], 0) == []


def test_a_hang_is_the_cause_of_silent_and_broken_ends() -> None:
    silent, broken = _failure(1), _failure(2, error="RuntimeError: Connection closed by peer")
    assert first_cause([silent, broken, HANG]) == HANG
    assert first_cause([HANG, CAUSE]) == CAUSE


KINDS: dict[str, dict[str, Any]] = {
    "exception": {"error": "KeyError: 1"},
    "signal": {"code": -11},
    "hang": {"error": "HangError: no step"},
    "exit": {"code": 3},
    "communication": {"error": "RuntimeError: Broken pipe"},
    "torn down": {"code": -15},
}


@pytest.mark.parametrize(("cause", "effect"), [*combinations(KINDS, 2)])
def test_causes_precede_their_consequences_at_any_time(cause: str, effect: str) -> None:
    late, early = _failure(1, time=9.0, **KINDS[cause]), _failure(2, time=1.0, **KINDS[effect])
    assert (late.kind, early.kind) == (cause, effect)
    both_are_causes = {cause, effect} == {"exception", "signal"}
    assert first_cause([early, late]) == (early if both_are_causes else late)


@pytest.mark.parametrize(
    ("code", "kind"), [(0, "exit"), (1, "exit"), (-1, "signal"), (-9, "signal"), (143, "torn down")]
)
def test_a_worker_that_ended_without_a_word_is_known_by_its_code(code: int, kind: str) -> None:
    assert _failure(0, code=code).kind == kind


@pytest.mark.parametrize(("killed", "code"), [(False, -9), (True, -15)])
def test_a_worker_killed_by_its_supervisor_is_not_the_cause(killed: bool, code: int) -> None:
    common = {"time": 1.0, "error": ""}
    failures = [{"rank": 0, "code": -9, **common}, {"rank": 1, "code": 1, **common}]
    record = {"node": "n", "torn_down": "n2", "killed": killed, "failures": failures}
    assert read_failures(record) == [_failure(0, code, time=1.0), _failure(1, 1, time=1.0)]


def test_a_record_of_a_good_end_has_no_failures() -> None:
    assert read_failures({"node": "n", "torn_down": None}) == []


def test_a_failure_names_rank_node_and_error() -> None:
    assert str(CAUSE) == "rank 3 on n: ValueError: boom"
    assert str(_failure(0, code=-9)) == "rank 0 on n: SIGKILL"
    assert _failure(0, code=-9).exit_code == 137
    assert str(_failure(0, code=-40)) == "rank 0 on n: signal 40"
    assert str(_failure(0, code=3)) == "rank 0 on n: exit code 3"
    said = replace(_failure(0, code=3), last_line="no data")
    assert str(said) == 'rank 0 on n: exit code 3 ("no data")'
    assert str(_failure(0, code=0)) == "rank 0 on n: exit code 0"
    assert [_failure(0, code=code).exit_code for code in (0, 1, 3, -15)] == [1, 1, 3, 143]
    assert str(replace(CAUSE, rank=None)) == "torchrun on n: ValueError: boom"


MISMATCH = "[enforce fail at /gloo/tcp/pair.cc:464] op.preamble.length <= op.nbytes. 8 vs 4. Is"
ASSERT = "CUDA error: device-side assert triggered"
CRASH = """Fatal Python error: Segmentation fault

Thread 0x7f (most recent call first):
  File "/x/other.py", line 9 in run

Current thread 0x7e (most recent call first):
  File "/x/train.py", line 3 in step
  File "/x/train.py", line 7 in <module>
"""
USAGE = "train.py: error: argument --backend: invalid choice: 'gloo2' (choose from 'gloo', 'nccl')"


@pytest.mark.parametrize(
    ("code", "text", "error", "last_line"),
    [
        (2, f"usage: train.py [-h]\n{USAGE}\n", USAGE, ""),
        (
            2,
            f"{USAGE}\n{AGAIN.decode()}Error: No such option\n",
            "Error: No such option",
            "",
        ),
        (1, "error: of a library\n" + "line\n" * 10 + "no data\n\n", "", "no data"),
        (-6, f"terminate called\n  what():  {MISMATCH}\n", MISMATCH, ""),
        (-6, f"terminate called\n  what():  {ASSERT}\nSearch for it\n{CRASH}", ASSERT, ""),
        (-11, "no word of it\n", "", ""),
        (-11, f"{CRASH}\nExtension modules: numpy\n", "", 'File "/x/train.py", line 3 in step'),
        (-6, f"terminate called\n{CRASH}", "", 'File "/x/train.py", line 3 in step'),
        (1, "", "", ""),
    ],
)
def test_the_line_that_matters_is_quoted(
    tmp_path: Path, code: int, text: str, error: str, last_line: str
) -> None:
    run = RunFolder(tmp_path / "name" / "id").make()
    folder = run.claim_attempt({}, lambda identity: False).node("n")
    folder.path.mkdir()
    if text:
        folder.rank_log(0).write_text(text)
    end = {"rank": 0, "code": code, "time": time.time()}
    assert reason_of(end, run, folder) == {"error": error, "last_line": last_line}


@pytest.mark.parametrize(
    ("code", "text", "age_s", "error"),
    [
        (1, "Timeout (0:00:33.376221)!\nThread 0x1", 1.0, "HangError: no step for 0:00:33 h; "),
        (-11, "Timeout (0:00:33.376221)!\nThread 0x1", 1.0, "HangError: no step for 0:00:33 h; "),
        (-9, "Timeout (0:00:33.376221)!\nThread 0x1", 1.0, ""),
        (1, "Timeout (0:00:33.376221)!\nThread 0x1", 100.0, ""),  # of a start before
        (1, "Thread 0x1", 1.0, ""),  # the watchdog itself, which has journaled it
        (-11, "", 1.0, ""),
    ],
)
def test_a_hang_that_python_cant_report_is_one(
    tmp_path: Path, code: int, text: str, age_s: float, error: str
) -> None:
    run = RunFolder(tmp_path / "name" / "id").make()
    folder = run.claim_attempt({}, lambda identity: False).node("n")
    folder.path.mkdir()
    stacks = folder.stacks(0)
    stacks.write_text(text)
    now = time.time()
    os.utime(stacks, (now - age_s, now - age_s))
    reason = reason_of({"rank": 0, "code": code, "time": now}, run, folder)["error"]
    assert reason == (f"{error}stacks in {stacks}" if error else "")
    kind = "hang" if error else "signal" if code < 0 else "exit"
    failure = _failure(0, code=code, error=reason)
    assert (failure.kind, failure.is_of_clock) == (kind, kind != "signal")


@pytest.mark.parametrize("error", [MISMATCH, USAGE])
def test_a_mismatch_and_a_wrong_call_are_no_lost_connections(error: str) -> None:
    """Both name gloo, and both come again."""
    peer = _failure(0, error="RuntimeError: [gloo] Connection reset by peer", time=0.0)
    cause = _failure(1, code=-6 if error == MISMATCH else 2, error=error, time=1.0)
    assert cause.kind == "exception"
    assert first_cause([peer, cause]) == cause


def test_the_last_exception_of_a_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "Traceback (most recent call last):\n  File x\nKeyError: 'first'\n\nDuring …\n\n"
        "Traceback (most recent call last):\n  File x\n    y\nValueError: boom é\nbye\n"
    )
    assert last_exception(log) == "ValueError: boom é"
    log.write_text(f"Traceback (most recent call last):\n  File x\nE: {'x' * 600}\n")
    assert last_exception(log) == f"E: {'x' * 497}"
    log.write_text("  File x, line 1\nSyntaxError: no\nSyntaxError: of another file\n")
    assert last_exception(log) == "SyntaxError: no"
    log.write_text("all fine\n")
    assert last_exception(log) == ""
    assert last_exception(tmp_path / "none") == ""


def test_an_explained_error_is_in_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "rank-0")
    assert journaled_error(journal.path, 0.0, 0) == ""
    journal.write(raw("failed", error="hpc_ddp.core.errors.HpcDdpError: 3 saves failed: why"))
    assert journaled_error(journal.path, 0.0, 0) == "3 saves failed: why"
    assert journaled_error(journal.path, time.time() + 60, 0) == ""  # of an earlier start
    assert journaled_error(journal.path, 0.0, 1) == ""  # of an earlier attempt
    journal.write(raw("failed", error=EARLY_EXIT))  # by sys.exit("why"), which the log has
    assert journaled_error(journal.path, 0.0, 0) == "3 saves failed: why"
    journal.write(raw("failed", error="ValueError: boom"))
    with open(journal.path, "a") as file:
        file.write('{"event": "failed", "tim')
    assert journaled_error(journal.path, 0.0, 0) == "ValueError: boom"


def test_a_worker_that_nccl_aborts_is_not_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("[rank0]:[E1122 ProcessGroupNCCL.cpp:700] Watchdog caught collective\nbye\n")
    reason = abort_reason(log)
    assert reason.endswith("Watchdog caught collective")
    log.write_text("free(): invalid pointer\n")
    assert abort_reason(log) == ""
    aborted = Failure(1, "n2", -signal.SIGABRT, 1.0, reason)
    silent = replace(aborted, error="")
    departed = Failure(0, "n1", 3, 2.0, "")
    assert first_cause([aborted, departed]) is departed
    assert first_cause([silent, departed]) is silent


ASSERT = "CUDA error: device-side assert triggered"
LEGACY = f"""\
[rank3]:[E1126 10:00:00.1 ProcessGroupNCCL.cpp:2068] [PG ID 0 PG GUID 0(default_pg) Rank 3] Process\
 group watchdog thread terminated with exception: {ASSERT}
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below

Exception raised from c10_cuda_check_implementation at /pytorch/c10/cuda/CUDAException.cpp:42
frame #6: c10d::ProcessGroupNCCL::Watchdog::run() + 0x10c (0x7fc9 in /torch/lib/libtorch_cuda.so)

terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with\
 exception: {ASSERT}
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below

frame #6: c10d::ProcessGroupNCCL::Watchdog::run() + 0x10c (0x7fc9 in /torch/lib/libtorch_cuda.so)

Exception raised from run at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2074 (most
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98 (0x7fc9 in /lib/libc10.so)
"""  # in the form of torch's issues 126544 and 113128
NCCL2 = f"""\
[rank3]:[E1126 10:00:00.1 WorkNCCL.cpp:240] [rank=3] CUDA error during end event query: {ASSERT}
[rank3]:[E1126 10:00:00.2 ProcessGroupNCCL.cpp:640] [rank=3] Aborting process on rank 3 due to error
"""  # by the strings of torch 2.15


@pytest.mark.parametrize("text", [LEGACY, NCCL2, LEGACY.replace("CUDA error", "HIP error")])
def test_an_error_of_the_device_by_which_nccl_aborts_is_the_cause(
    tmp_path: Path, text: str
) -> None:
    log = tmp_path / "rank-3.log"
    log.write_text(text)
    reason = abort_reason(log)
    assert reason.removeprefix("HIP").removeprefix("CUDA") == ASSERT.removeprefix("CUDA")
    cause = _failure(3, code=-signal.SIGABRT, error=reason, time=2.0)
    peer = _failure(5, error="RuntimeError: [1] is in Gloo: Connection closed by peer", time=1.0)
    assert cause.kind == "exception"
    assert first_cause([peer, cause]) == cause


def test_a_stack_is_no_reason_to_abort(tmp_path: Path) -> None:
    """NCCL's watchdog writes one below its reason."""
    log = tmp_path / "rank-3.log"
    timeout = "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"
    log.write_text(LEGACY.replace(ASSERT, timeout))
    assert abort_reason(log).endswith(timeout)
    assert _failure(3, code=-signal.SIGABRT, error=abort_reason(log)).kind == "communication"


def test_an_exception_before_a_restart_is_not_that_of_the_end(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    trace = "Traceback (most recent call last):\n  File x\nKeyError: 1\n"
    log.write_text(f"{trace}hpc-ddp: the workers start again\nbye\n")
    assert last_exception(log) == ""
    log.write_text(f"hpc-ddp: the workers start again\n{trace}")
    assert last_exception(log) == "KeyError: 1"
