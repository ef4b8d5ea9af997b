"""Training on an accelerator, the stand-in of tests/device: the CPU's numbers, bit for bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crews import Zygote, crews_of

from hpc_ddp.node.outcome.first_failure import abort_reason
from tests.devices import DEVICE, HAS_SIM_RECORD, ROOT, device_env, reports_of
from tests.skips import skip_or_fail

KIND = "cuda" if DEVICE == "cuda" else "sim"
CHECKS = ROOT / "tests" / "device" / "checks.py"


@pytest.fixture(scope="session")
def stand_in(session_folder: Path) -> Iterator[Zygote]:
    """A process that forks workers which see four devices."""
    if DEVICE == "cuda":
        pytest.skip("it needs the stand-in device, and DEVICE=cuda is a GPU")
    if shutil.which("g++") is None or shutil.which("ninja") is None:
        skip_or_fail("the stand-in device is compiled by g++ and ninja (apt: g++ ninja-build)")
    process = Zygote(session_folder, "sim")
    yield process
    process.end()


@pytest.fixture
def make_sim_crew(stand_in: Zygote, tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    yield from crews_of(stand_in, tmp_path / "sim")


@pytest.fixture
def make_device_crew(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[str], Any]]:
    """What makes crews on a GPU of this machine with ``DEVICE=cuda``, else on the stand-in."""
    process = request.getfixturevalue("zygote" if DEVICE == "cuda" else "stand_in")
    yield from crews_of(process, tmp_path / "device")


def test_the_stand_in_has_the_cpus_numbers_and_reports_mistakes(stand_in: object) -> None:
    env = {**os.environ, **device_env("sim")} | {"SIM_DEVICES": "2"}
    done = subprocess.run([sys.executable, str(CHECKS)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == CHECKS.read_text().count("\n@check\n")


def test_stopped_and_killed_it_ends_with_the_cpus_bits(
    make_crew: Callable[[str], Any], make_device_crew: Callable[[str], Any]
) -> None:
    """DDP with dropout and batch norm; saves go through pinned memory."""
    on_cpu = make_crew("cpu")
    on_cpu.go(2)
    crew = make_device_crew("device")
    stopped = crew.launch(2, "--at", "5", "--signal", str(int(signal.SIGTERM)), "--ranks", "1")
    assert stopped.wait() == [0, 0], stopped.output()
    saved = ("--save-every-steps", "3", "--wait", str(crew.run.checkpoints / "step-15"))
    killed = crew.launch(2, *saved, "--at", "17", "--signal", str(int(signal.SIGKILL)))
    killed.wait_for_kill()
    crew.go(2)
    assert crew.weights == on_cpu.weights


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_half_precision_a_kill_leaves_the_same_bits(
    make_device_crew: Callable[[str], Any], precision: str
) -> None:
    words = ("--precision", precision, "--save-every-steps", "4")
    whole = make_device_crew("whole")
    whole.go(2, *words, script="run_update.py")
    killed = make_device_crew("killed")
    assert any(killed.launch(2, *words, "--kill-at", "7", script="run_update.py").wait())
    killed.go(2, *words, script="run_update.py")
    assert killed.weights == whole.weights


def test_each_way_of_sharing_a_model_trains_and_goes_on(
    make_device_crew: Callable[[str], Any], tmp_path: Path
) -> None:
    """Tensor parallel first: its optimizer has DTensors and plain ones; then sharded, offloaded."""
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 14)
    text = ("--text", str(tmp_path / "text"), "--batch-size", "16", "--epochs", "2")
    crew = make_device_crew("ways")
    ways = (
        (2, ("--parallel", "tp"), "2"),
        (2, ("--parallel", "fsdp", "--offload"), "5"),
        (2, ("--parallel", "pp"), "0"),
    )
    for ranks, spread, at in ways:
        launch = crew.launch(ranks, *text, *spread, script="small_gpt.py", AT=at)
        assert launch.wait() == [0] * ranks, launch.output()
    assert crew.events("finished")
    assert not reports_of(launch.output())


def test_each_device_of_a_worker_has_its_random_numbers_back(
    make_sim_crew: Callable[[str], Any],
) -> None:
    def losses(crew: Any, epochs: int) -> list[str]:
        output = crew.go(2, "--epochs", str(epochs), script="model_over_two_devices.py")
        return sorted(line for line in output.splitlines() if line.startswith("LOSS"))

    crew = make_sim_crew("twice")
    whole = losses(make_sim_crew("once"), 2)
    assert sorted(losses(crew, 1) + losses(crew, 2)) == whole
    assert {line.split()[3] for line in whole} == {"sim:1", "sim:3"}
    draws = [line.split()[4] for line in whole]
    assert len(set(draws)) == len(draws) == 16  # each rank draws its own


def test_mfu_counts_each_device_of_a_worker(make_sim_crew: Callable[[str], Any]) -> None:
    """Where their peak is not known, rank 0 says so once."""
    two = "model_over_two_devices.py"
    crew = make_sim_crew("mfu")
    assert "SHARE 2.0\n" in crew.go(2, "--flops", "8", "--peak", "1", script=two)
    output = crew.go(2, "--flops", "8", script=two)
    assert "SHARE None\n" in output
    assert output.count("start(peak_flops=) gives it") == 1


def test_each_device_of_a_worker_draws_by_the_seed_numbers_of_its_own(
    make_sim_crew: Callable[[str], Any],
) -> None:
    """The same on each worker. Its first device is the one that torch takes if none is named."""
    drawn = set()
    for seed in ("7", "70"):
        output = make_sim_crew(seed).go(2, seed, script="device_placement.py")
        lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"devices"')]
        assert [(line["devices"], line["current"]) for line in lines] == [([0, 1], 0), ([2, 3], 2)]
        drawn |= {tuple(numbers) for line in lines for numbers in line["drawn"]}
    assert len(drawn) == 4


DROPOUT = "dropout_over_ranks.py"
COUNTED = {"SIM_COUNTED_RANDOM": "1"}  # as a GPU's: DTensors set the offset


def losses_of(crew: Any, *words: str, script: str, **env: str) -> list[str]:
    """Return a line for each step of each rank."""
    output = crew.go(4, *words, script=script, **env)
    return sorted(line for line in output.splitlines() if line.startswith("LOSS"))


def test_random_numbers_of_ranks_that_share_a_layer_go_on(
    make_device_crew: Callable[[str], Any],
) -> None:
    """torch would give all ranks rank 0's at a process's first one."""
    whole = losses_of(make_device_crew("once"), "--epochs", "2", script=DROPOUT, **COUNTED)
    crew = make_device_crew("twice")
    parts = [
        line
        for epochs in ("1", "2")
        for line in losses_of(crew, "--epochs", epochs, script=DROPOUT, **COUNTED)
    ]
    assert sorted(parts) == whole
    last = [line.split()[3] for line in whole if line.split()[2] == "7"]
    assert len(last) == 4
    assert len(set(last)) == 2  # one for each pair of ranks that share the model


def test_a_stage_may_draw_alone(make_device_crew: Callable[[str], Any]) -> None:
    """torch would wait for all ranks of the run at its first random number."""
    assert losses_of(make_device_crew("stages"), "--pp", "2", script=DROPOUT, **COUNTED)


def test_an_error_of_a_loader_worker_is_told_once(make_device_crew: Callable[[str], Any]) -> None:
    """The worker's thread that lends memory to pin may fail as well, when the rank has left."""
    crew = make_device_crew("loader")
    launch = crew.launch(1, "--workers", "2", "--bad-sample", "9")
    assert launch.wait() == [1]
    (failed,) = crew.events("failed")
    assert failed["error"] == "ValueError: no sample 9"


def test_a_late_error_of_the_device_is_told_as_it_is(
    make_device_crew: Callable[[str], Any],
) -> None:
    """A kernel fails behind the host, in the first step: the next wait for the device raises."""
    crew = make_device_crew("late")
    launch = crew.launch(1, script="late_device_error.py")
    (code,) = launch.wait()
    if (
        DEVICE == "cuda" and code == -signal.SIGABRT
    ):  # met where torch frees memory, and can't raise
        assert abort_reason(launch.logs[0]).startswith("CUDA error: device-side assert")
        return
    assert code == 1, launch.output()
    (failed,) = crew.events("failed")
    assert failed["error"].startswith("torch.AcceleratorError: CUDA error: device-side")
    assert "that is no number" not in launch.output()
    assert crew.events("first_step")


def test_a_deterministic_run_has_no_sums_in_switches(crew: Any) -> None:
    """The settings stand before NCCL can read them; a user's own stays."""
    output = crew.go(2, script="nccl_settings.py", NCCL_COLLNET_ENABLE="1")
    assert output.count("SETTINGS 0 1\n") == 2
    assert output.count("NCCL_COLLNET_ENABLE=1 lets NCCL add up in switches") == 1


def test_ranks_with_and_without_a_device_are_told(make_device_crew: Callable[[str], Any]) -> None:
    """Else one waits in Gloo's group and the other in its device's, for ever."""
    launch = make_device_crew("mixed").launch(2, script="mixed_devices.py", nodes=("n1", "n2"))
    assert launch.wait() == [1, 1], launch.output()
    assert (
        launch.output().count(f"error: rank 1 on n2 has cpu, and the other ranks have {KIND}") == 2
    )


# --- models that no device has as a whole -----------------------------------------------------


def _result(crew: Any) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((crew.run.path / "result.json").read_text())
    return result


# Of large_model.py. Half of the blocks, which a rank keeps, and the buffers of a forward have room
# below the limits: torch 2.9 holds the buffers of three gathered blocks, and 2.15 those of two.
BLOCKS = 8
BLOCK_BYTES = 4 * (2 * 64 * 256 + 256 + 64 + 2 * 64)


def test_a_model_is_shared_out_before_a_device_has_it(
    make_sim_crew: Callable[[str], Any],
) -> None:
    """A limit below the model's size; on meta the numbers do not depend on the ranks."""
    whole = BLOCKS * BLOCK_BYTES
    limits = {"moved": (), "meta": ("--meta",), "average": ("--meta", "--average")}
    for name, words in limits.items():
        crew = make_sim_crew(name)
        room = whole * (2 if "--average" in words else 1)
        crew.go(2, *words, "--epochs", "0", "--limit", str(room), script="large_model.py")
    alone = make_sim_crew("alone")
    alone.go(1, "--meta", "--epochs", "0", script="large_model.py")
    assert _result(alone)["sums"] == _result(crew)["sums"]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--offload",), marks=pytest.mark.more),  # --meta --offload has it, too
        pytest.param(("--average",), marks=pytest.mark.more),
        pytest.param(("--meta", "--tp", "2"), marks=pytest.mark.more),  # twenty seconds
        ("--offload", "--meta"),
    ],
)
def test_a_model_in_parts_goes_on_where_it_was(
    make_device_crew: Callable[[str], Any], make_crew: Callable[[str], Any], words: tuple[str, ...]
) -> None:
    crew = make_device_crew("parts")
    crew.go(2, *words, "--epochs", "1", script="large_model.py")
    # Less than the optimizer's state, which has to stay on the CPU when it is read, too.
    room = ("--limit", str(5 * BLOCK_BYTES)) if "--offload" in words else ()
    crew.go(2, *words, *room, "--epochs", "2", script="large_model.py")
    undisturbed = make_device_crew("undisturbed")
    undisturbed.go(2, *words, "--epochs", "2", script="large_model.py")
    assert _result(crew) == _result(undisturbed)
    if words == ("--meta", "--tp", "2"):  # one start of torch on the CPU is enough
        on_cpu = make_crew("cpu")
        on_cpu.go(2, *words, "--epochs", "2", script="large_model.py")
        assert _result(crew) == _result(on_cpu)
    assert _result(crew)["step"] == (16 if "--tp" in words else 8)
    assert _result(crew)["frozen"] == []


def test_a_restore_without_room_does_not_blame_the_checkpoint(
    make_sim_crew: Callable[[str], Any],
) -> None:
    """The model and its buffers have room, the optimizer's state (twice as much) has not."""
    crew = make_sim_crew("room")
    crew.go(1, "--epochs", "1", script="large_model.py")
    room = ("--limit", str(20 * BLOCK_BYTES))
    launch = crew.launch(1, *room, "--epochs", "2", script="large_model.py")
    assert launch.wait() == [1]
    assert "OutOfMemoryError: sim out of memory" in launch.output()
    assert "this program's objects" not in launch.output()


def test_a_tensor_without_numbers_is_named(make_device_crew: Callable[[str], Any]) -> None:
    launch = make_device_crew("lost").launch(
        1, "--meta", "--lose", "shift", script="large_model.py"
    )
    assert launch.wait() == [2]
    assert "nothing gives numbers to shift of a Block" in launch.output()


def test_an_average_comes_before_the_model_is_sharded(
    make_device_crew: Callable[[str], Any],
) -> None:
    launch = make_device_crew("late").launch(1, "--late-average", script="large_model.py")
    assert launch.wait() == [2]
    assert "run.ema was called after run.fully_shard" in launch.output()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_loss_may_travel_in_bf16_between_stages(
    make_device_crew: Callable[[str], Any], ranks: int
) -> None:
    """With a batch norm, that the ranks of one stage share, in the last one alone."""
    output = make_device_crew("stages").go(ranks, script="pipeline_loss.py")
    losses = [line.split()[1:] for line in output.splitlines() if line.startswith("LOSS")]
    assert losses == [losses[0]] * ranks
    assert losses[0][0] == "torch.float32"
    # Of two micro-batches: forward is under autocast, and backward is not.
    assert output.count("AUTOCASTS False False True True") == ranks


def test_a_loss_may_be_a_dtensor(make_device_crew: Callable[[str], Any]) -> None:
    crew = make_device_crew("dtensor")
    crew.go(2, script="dtensor_loss.py")
    assert crew.events("metrics")[-1]["loss"] == 3.0


@pytest.mark.skipif(DEVICE == "sim", reason="the stand-in has no Fourier transform")
def test_unusual_weights_are_trained(make_crew: Callable[[str], Any]) -> None:
    """The first one decides of what type the sum is that brings DDP's buckets into order. Of those
    with sparse gradients DDP takes no others, and no hook is called but by the two steps."""
    output = make_crew("unusual").go(2, "gloo", script="unusual_weights.py")
    assert output.count("WEIGHTS equal and moved after 4 hooks") == 2


def test_collectives_of_the_script_send_tensors_of_the_cpu(make_crew: Callable[[str], Any]) -> None:
    output = make_crew("two backends").go(2, script="two_backends.py")
    assert output.count("SUMS 2.0 2.0") == 2


@pytest.mark.parametrize("case", ["sparse", "sparse beside gloo"])
def test_sparse_gradients_end_in_a_sentence(
    make_device_crew: Callable[[str], Any], case: str
) -> None:
    """NCCL does not add them up."""
    launch = make_device_crew("sparse").launch(1, case, script="misuse.py")
    assert launch.wait() == [2], launch.output()
    assert "the gradients of 0 are sparse, and the backend of this device" in launch.output()
    assert "Traceback" not in launch.output()


@pytest.mark.more
@pytest.mark.parametrize("words", [(), ("callables",)], ids=["the step", "the model"])
def test_replays_of_a_graph_go_on(
    make_device_crew: Callable[[str], Any], words: tuple[str, ...]
) -> None:
    """A graph knows addresses: what a restore puts back lies where it lay. CUDA has graphs."""
    script = "graph_replays.py"
    whole = make_device_crew("whole").go(1, *words, script=script)
    crew = make_device_crew("stopped")
    crew.go(1, *words, "--stop-at", "21", script=script)
    output = crew.go(1, *words, script=script)
    assert "going on from step" in output
    assert re.findall("WEIGHTS .*", output) == re.findall("WEIGHTS .*", whole)


def test_what_lies_on_the_device_comes_back_there(make_device_crew: Callable[[str], Any]) -> None:
    crew = make_device_crew("kept")
    crew.go(2, "1", script="objects_with_tensors.py")
    output = crew.go(2, "2", script="objects_with_tensors.py")
    kept = [line for line in output.splitlines() if line.startswith("KEPT")]
    whole = make_device_crew("whole").go(2, "2", script="objects_with_tensors.py")
    assert kept == [line for line in whole.splitlines() if line.startswith("KEPT")]
    assert [line.split()[1:5] for line in kept] == [[KIND, KIND, KIND, "cpu"]] * 2


def test_weights_that_are_not_trained_come_back(
    make_device_crew: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are hashed on the device, and copied once for each change, beside the training."""
    monkeypatch.setenv("SIM_STREAM_DELAY_MS", "4")
    crew = make_device_crew("kept")
    crew.go(2, "1", script="frozen_weights.py")
    output = crew.go(2, "2", "again", script="frozen_weights.py")
    sums = {line for line in output.splitlines() if line.startswith("SUM")}
    whole = make_device_crew("whole").go(2, "2", script="frozen_weights.py")
    assert sums == {line for line in whole.splitlines() if line.startswith("SUM")}
    assert len(sums) == 1
    assert sums.pop().endswith("False")
    files = [path.stat().st_ino for path in crew.run.checkpoints.glob("step-*/frozen-*.bin")]
    assert len(files) > len({*files}) == 1  # all saves have the same one


def test_a_model_without_gradients_shares_the_overflow(make_crew: Callable[[str], Any]) -> None:
    """All ranks skip the same steps of an optimizer, and of its schedule."""
    output = make_crew("idle").go(2, script="idle_expert.py")
    lines = [line for line in output.splitlines() if line.startswith("STEPS")]
    assert len(lines) == 2
    assert len({*lines}) == 1


def test_sums_of_a_stream_are_waited_for(
    make_device_crew: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIM_STREAM_DELAY_MS", "50")
    assert "EQUAL True" in make_device_crew("sums").go(1, script="sums_of_a_stream.py")


# --- a step waits for nothing --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (("--precision", "bf16"), 0),
        (("--sharded", "--precision", "bf16"), 0),
        (("--precision", "fp16"), 64),  # once in each: whether a gradient has overflowed
        (("--average",), 0),
        (("--average", "--default-device"), 0),
        (("--sharded", "--look"), None),  # once for each look, an exchange later
        # A step: FSDP2 for each gradient, 7 times in all; clipping twice, also for more gradients.
        (("--sharded", "--offload"), 9 * 61),
        (("--save-every-steps", "16"), 7),  # the thread that saves: 3 copies, and twice 2 sums
    ],
)
def test_a_step_does_not_wait_for_its_device(
    make_device_crew: Callable[[str], Any], words: tuple[str, ...], most: int | None
) -> None:
    """Also where it journals a loss."""
    output = make_device_crew("waits").go(2, *words, script="count_waits.py")
    (line,) = (line.split() for line in output.splitlines() if line.startswith("WAITS"))
    waits, looks, steps = map(int, line[1::2])
    assert steps == 64
    assert "simccl:all_reduce" in output or not HAS_SIM_RECORD  # what a hang would leave
    assert waits <= (looks if most is None else most)


@pytest.mark.parametrize(
    ("ranks", "words", "waits"),
    [
        (2, (), 0),
        (4, ("--pp", "2", "--elsewhere"), 2),  # one to the device and one back
    ],
)
def test_an_evaluation_has_the_first_ranks_buffers_without_a_wait(
    make_device_crew: Callable[[str], Any], ranks: int, words: tuple[str, ...], waits: int
) -> None:
    check_buffers(make_device_crew("buffers"), ranks, words, waits)


def test_on_the_cpu_an_evaluation_has_the_first_ranks_buffers(
    make_crew: Callable[[str], Any],
) -> None:
    check_buffers(make_crew("buffers"), 2, (), 0)
    check_buffers(make_crew("stages"), 4, ("--pp", "2"), 0)


def check_buffers(crew: Any, ranks: int, words: tuple[str, ...], waits: int) -> None:
    """Compare buffers inside of `run.evaluating`: the persistent ones of all types are those of the
    stage's first rank, others each rank's own."""
    output = crew.go(ranks, *words, script="evaluation_buffers.py")
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"rank"')]
    assert sorted(line["rank"] for line in lines) == list(range(ranks))
    for line in lines:
        first = line["rank"] // 2 * 2 if "--pp" in words else 0
        expected = {name: [first] for name in line["values"]}
        expected |= {"value5": [bool(first)], "own": [line["rank"]]}
        assert line["values"] == expected
        assert line["places"].pop("elsewhere", "cpu") == "cpu"
        assert len(set(line["places"].values())) == 1
        assert line["waits"] <= waits


@pytest.mark.skipif(not HAS_SIM_RECORD, reason="this torch records no collectives of simccl")
def test_gradients_that_accumulate_travel_once(make_device_crew: Callable[[str], Any]) -> None:
    output = make_device_crew("once").go(2, "--accumulate", "8", script="count_waits.py")
    (flight,) = (line for line in output.splitlines() if line.startswith("FLIGHT"))
    assert 0 < flight.count("all_reduce") < 64  # micro-batches


def test_gradients_that_accumulate_stay_sharded(make_device_crew: Callable[[str], Any]) -> None:
    """Whole ones, which FSDP2 can add up, would take the memory that sharding saves."""
    peaks = []
    for count in ("1", "4"):
        output = make_device_crew(count).go(2, count, script="accumulated_memory.py")
        peak, share = re.findall(r"PEAK ([\d.]+) SHARE ([\d.]+)", output)[0]
        peaks.append(float(peak) / float(share))
    assert peaks[1] < peaks[0] + 0.25, peaks


@pytest.mark.parametrize("words", [(), ("offload",)])
def test_replicas_of_a_sharded_model_begin_alike(
    make_device_crew: Callable[[str], Any], words: tuple[str, ...]
) -> None:
    """On GPUs of two kinds the same seed gives other numbers."""
    output = make_device_crew("replicas").go(2, *words, script="parted_replicas.py")
    assert "EQUAL True" in output


def test_replicas_that_part_are_refused_at_a_save(make_device_crew: Callable[[str], Any]) -> None:
    launch = make_device_crew("parted").launch(2, "later", script="parted_replicas.py")
    assert launch.wait() != 0
    expected = r"model\.0\.weight at \(0, 0\) differs between rank 0 and rank 1, which have copies"
    assert re.search(expected, launch.output())
