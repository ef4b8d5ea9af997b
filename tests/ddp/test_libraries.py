"""Trainings of other libraries: stopped at one step, resumed there, by `hpc_ddp.integrations`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from crews import Crew, Zygote, crews_of

from hpc_ddp.core.checkpoints import published, step_of, verify
from hpc_ddp.core.run_folder import RunFolder
from tests.devices import DEVICE

REPO = Path(__file__).parents[2]
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
if DEVICE != "cuda":
    OFFLINE["ACCELERATE_USE_CPU"] = "1"
LIBRARIES = ("transformers", "lightning", "accelerate", "dcp")
MODULES = {
    "transformers": "transformers.trainer",
    "lightning": "lightning",
    "fabric": "lightning",
    "accelerate": "accelerate",
}
# What the import of the first two costs is paid by one test in `make test`.
SOME_MORE = [
    pytest.param(name, marks=[pytest.mark.more] if name in ("transformers", "lightning") else [])
    for name in LIBRARIES
]
SAVE = ("--save-every-steps", "4")
SLOW = ("--step-seconds", "0.15")  # so that the ranks exchange their notices at every step or two


@pytest.fixture(scope="module")
def library_zygote(session_folder: Path) -> Iterator[Zygote]:
    """A process of its own, since the libraries change what is imported, and how."""
    process = Zygote(session_folder, name="libraries")
    yield process
    process.end()


@pytest.fixture
def make_crew(library_zygote: Zygote, tmp_path: Path) -> Iterator[Callable[[str], Crew]]:
    yield from crews_of(library_zygote, tmp_path)


def launch(crew: Crew, library: str, *argv: str, ranks: int = 2, **more: str) -> Any:
    if module := MODULES.get(library):  # its import takes most of a run's time
        crew.zygote.ask({"import": [module]})
    plain = ("--plain",) if library == "lightning" else ()
    env = {**OFFLINE, "TMPDIR": str(crew.base), **more}
    script = f"libraries/with_{library}.py"
    return crew.launch(ranks, *plain, *argv, script=script, **env)


def go(crew: Crew, library: str, *argv: str, ranks: int = 2) -> str:
    started = launch(crew, library, *argv, ranks=ranks)
    codes = started.wait()
    assert not any(codes), started.output()
    return str(started.output())


@pytest.mark.parametrize("library", [*LIBRARIES, pytest.param("fabric", marks=pytest.mark.more)])
def test_a_notice_amid_an_epoch(make_crew: Callable[[str], Crew], library: str) -> None:
    """The ranks are signalled in different steps; a rank may hear of it a step later."""
    whole, stopped = make_crew("whole"), make_crew("stopped")
    assert "WARNING" not in go(whole, library)
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


@pytest.mark.parametrize(
    ("library", "order", "ranks"),
    [
        ("accelerate", "sampler", 1),
        ("accelerate", "buckets", 2),
        ("accelerate", "dispatch", 2),
        pytest.param("accelerate", "neighbours", 2, marks=pytest.mark.more),
        pytest.param("accelerate", "stream", 2, marks=pytest.mark.more),
        pytest.param("fabric", "sampler", 2, marks=pytest.mark.more),
        pytest.param("transformers", "lengths", 2, marks=pytest.mark.more),
        pytest.param("transformers", "rebalance", 2, marks=pytest.mark.more),
        pytest.param("transformers", "split", 2, marks=pytest.mark.more),
        pytest.param("transformers", "persistent", 2, marks=pytest.mark.more),
    ],
)
def test_the_order_of_other_loaders_is_kept(
    make_crew: Callable[[str], Crew], library: str, order: str, ranks: int
) -> None:
    """A stop in the second epoch, whose order a new process would not draw by itself."""
    whole, stopped = make_crew("whole"), make_crew("stopped")
    words = ("--order", order)
    at = "20" if ranks == 1 else "11"
    go(whole, library, *words, ranks=ranks)
    go(stopped, library, *words, *SLOW, "--at", at, ranks=ranks)
    assert len(stopped.events("stopped")) == 1
    go(stopped, library, *words, ranks=ranks)
    assert stopped.weights == whole.weights


@pytest.mark.parametrize(
    ("order", "saved"),
    [
        pytest.param("dispatch", 8, marks=pytest.mark.more),
        ("dispatch-odd", 3),
        pytest.param("shuffle-odd", 3, marks=pytest.mark.more),
    ],
    ids=["dispatched, at the end of an epoch", "dispatched, before a short batch", "short batch"],
)
def test_accelerate_goes_on_with_the_batches_that_are_left(
    make_crew: Callable[[str], Crew], order: str, saved: int
) -> None:
    """What fills up a short last batch is not among the gathered samples."""
    whole, resumed = make_crew("whole"), make_crew("resumed")

    def ends(printed: str) -> list[str]:
        return [line for line in printed.splitlines() if "ends with" in line]

    of_whole = ends(go(whole, "accelerate", "--order", order))
    save = ("--save-every-steps", str(saved), *SLOW, "--at", str(saved + 3), "--signal", "9")
    killed = launch(resumed, "accelerate", "--order", order, *save)
    assert -signal.SIGKILL in killed.wait(), killed.output()
    of_resumed = ends(go(resumed, "accelerate", "--order", order))
    assert len(of_resumed) == len(of_whole)
    # An epoch without batches that are left has no last one.
    assert set(of_resumed) - {"epoch 0 ends with 0 samples"} <= set(of_whole)
    first, second = [event["step"] for event in resumed.events("first_step")]
    assert (first, second % saved) == (1, 1)
    assert resumed.weights == whole.weights


def test_a_scheduler_that_accelerate_does_not_save_is_missed(
    make_crew: Callable[[str], Crew],
) -> None:
    printed = go(make_crew("crew"), "accelerate", "--part", "loose", "--epochs", "1", ranks=1)
    assert printed.count("a scheduler, ExponentialLR, is in no checkpoint") == 1


@pytest.mark.more
def test_fabric_keeps_the_scaler_of_float16(make_crew: Callable[[str], Crew]) -> None:
    whole, stopped = make_crew("whole"), make_crew("stopped")
    half = ("--part", "half")
    go(whole, "fabric", *half)
    go(stopped, "fabric", *half, *SLOW, "--at", "9")
    assert stopped.events("stopped")
    go(stopped, "fabric", *half)
    assert stopped.weights == whole.weights


@pytest.mark.more
@pytest.mark.parametrize(
    ("library", "width"), [("accelerate", "800"), ("fabric", "800"), ("transformers", "160")]
)
def test_four_ranks_add_up_in_the_same_order_after_a_stop(
    make_crew: Callable[[str], Crew], library: str, width: str
) -> None:
    """Gradients of several buckets, which DDP packs anew after a process's first backward."""
    whole, stopped = make_crew("whole"), make_crew("stopped")
    wide = ("--width", width)
    go(whole, library, *wide, ranks=4)
    go(stopped, library, *wide, *SLOW, "--at", "5", ranks=4)
    assert stopped.events("stopped")
    go(stopped, library, *wide, ranks=4)
    assert stopped.weights == whole.weights


def test_lightning_saves_and_stops_with_one_batch_an_epoch(
    make_crew: Callable[[str], Crew],
) -> None:
    """Each step is the last of its epoch, and is saved before the first batch of the next one."""
    whole, stopped = make_crew("whole"), make_crew("stopped")
    full = ("--batch-size", "32", "--epochs", "16")
    go(whole, "lightning", *full)
    go(stopped, "lightning", *full, *SAVE, *SLOW, "--at", "6")
    (stop,) = stopped.events("stopped")
    assert 6 <= stop["step"] < 16
    saves = [event["step"] for event in stopped.events("checkpoint")]
    assert (saves[0], saves[-1]) == (4, stop["step"])
    go(stopped, "lightning", *full)
    assert [event["step"] for event in stopped.events("first_step")] == [1, stop["step"] + 1]
    assert [event["step"] for event in stopped.events("finished")] == [16]
    assert stopped.weights == whole.weights


@pytest.mark.parametrize("library", SOME_MORE)
def test_killed_in_a_save_and_the_one_before_damaged(
    make_crew: Callable[[str], Crew], library: str
) -> None:
    """The draft counts for nothing, and the damaged checkpoint is passed over."""
    whole, killed = make_crew("whole"), make_crew("killed")
    go(whole, library)
    started = launch(killed, library, *SAVE, "--at", "10", "--kill-in-save")
    assert started.wait()[0] == -signal.SIGKILL, started.output()
    newest, before = published(killed.run.checkpoints)
    assert 8 <= step_of(newest) <= 10
    assert list(killed.run.checkpoints.glob("step-*.tmp-0"))
    damaged = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    printed = go(killed, library, *SAVE)
    assert f"PASSED OVER the checkpoint {newest.name}" in printed
    (restored,) = killed.events("restored")
    assert restored["step"] == step_of(before) == 4
    assert not list(killed.run.checkpoints.glob("step-*.tmp-0"))
    assert len(published(killed.run.checkpoints)) == 3  # keep_last
    assert killed.weights == whole.weights


@pytest.mark.parametrize("library", SOME_MORE)
def test_without_a_launcher(make_crew: Callable[[str], Crew], library: str) -> None:
    """A process alone, with a folder of runs beside it."""
    crew = make_crew("alone")
    local = {"HPC_DDP_RUN": "", "HPC_DDP_RUNS": str(crew.base / "runs")}
    stopped = launch(crew, library, *SLOW, "--at", "9", ranks=0, **local)
    assert stopped.wait() == [0], stopped.output()
    assert "stopped and saved at step" in stopped.output()
    resumed = launch(crew, library, ranks=0, **local)
    assert resumed.wait() == [0], resumed.output()
    assert "going on from step" in resumed.output()
    run = RunFolder(crew.base / "runs" / f"with_{library}" / "local")
    assert run.finished()
    undisturbed = launch(crew, library, ranks=0, **local)
    assert undisturbed.wait() == [0]
    weights = [path.read_bytes() for path in sorted(run.path.parent.glob("*/weights"))]
    assert len(weights) == 2
    assert weights[0] == weights[1]


@pytest.mark.more
def test_the_trainers_own_saves_stay_its_own(make_crew: Callable[[str], Crew]) -> None:
    """Also where both are due at the same step; the Trainer's alone are pushed to the Hub."""
    rare, all_steps = make_crew("rare"), make_crew("all")
    printed = go(rare, "transformers", *SAVE, "--own-saves", "4")
    assert {line for line in printed.splitlines() if "pushes from" in line} == {"pushes from hf"}
    steps = [event["step"] for event in rare.events("checkpoint")]
    assert steps[0] == 4
    own = sorted(path.name for path in (rare.base / "hf").iterdir())
    assert own == ["checkpoint-20", "checkpoint-24"]
    optimizers = [path.parts[-3] for path in rare.base.rglob("optimizer.pt")]
    assert sorted(optimizers) == sorted(
        f"step-{step}" for step in steps[-3:]
    )  # not save_only_model
    go(all_steps, "transformers", *SAVE, "--own-saves", "1")
    assert all_steps.events("checkpoint")[0]["step"] == 4
    assert rare.weights == all_steps.weights


@pytest.mark.more
@pytest.mark.parametrize("strategy", ["epoch", "best"])
def test_the_best_model_and_the_patience_outlast_a_stop(
    make_crew: Callable[[str], Crew], strategy: str
) -> None:
    """Each step is evaluated, and the first one is the best: in ``greater_is_better`` the loss has
    the wrong sign."""
    settings = {
        "per_device_train_batch_size": 64,
        "num_train_epochs": 9,
        "eval_strategy": "epoch",
        "eval_delay": 2,
        "save_strategy": strategy,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        "learning_rate": 1e-3,
    }
    whole, stopped = make_crew("whole"), make_crew("stopped")
    words = ("--settings", str(settings), "--patience", "5")
    last = "evaluated at [2, 3, 4, 5, 6, 7] best at 2"
    assert last in go(whole, "transformers", *words, ranks=1)
    go(stopped, "transformers", *words, *SLOW, "--save-every-steps", "1", "--at", "4", ranks=1)
    (stop,) = stopped.events("stopped")
    assert 4 <= stop["step"] < 7
    assert not list(stopped.run.checkpoints.glob("step-*.tmp-0"))
    assert last in go(stopped, "transformers", *words, ranks=1)
    own = [sorted(path.name for path in (crew.base / "hf").iterdir()) for crew in (whole, stopped)]
    assert own[0] == own[1]
    assert stopped.weights == whole.weights


@pytest.mark.more
@pytest.mark.parametrize(
    ("library", "words", "error"),
    [
        ("transformers", ("--order", "dispatch"), "a resumed Trainer then repeats samples"),
        ("transformers", ("--order", "split-odd"), "split_batches and a multiple of 2 samples"),
        ("transformers", ("--bare",), "the training begins before stop.latest"),
        ("lightning", ("--stateful",), "a StatefulDataLoader has shuffle=True or a sampler"),
        ("lightning", ("--part", "finder"), "a LearningRateFinder is among the callbacks"),
        ("accelerate", ("--part", "late"), "objects of register_for_checkpointing after stop.load"),
    ],
    ids=[
        "repeats samples",
        "fills the last batch",
        "does not resume",
        "draws another order",
        "a finder",
        "registers too late",
    ],
)
def test_what_does_not_resume_is_refused(
    make_crew: Callable[[str], Crew], library: str, words: tuple[str, ...], error: str
) -> None:
    started = launch(make_crew("refused"), library, *words)
    assert all(started.wait())
    assert error in started.output()


@pytest.mark.more
def test_lightning_begins_the_shuffle_of_an_epoch_again(
    make_crew: Callable[[str], Crew],
) -> None:
    """The figures of docs/other-libraries.md: its loaders are not resumed, so the bits differ."""
    crews = make_crew("whole"), make_crew("stopped")
    crews[0].launch(2, script="libraries/with_lightning.py").wait()
    for argv in ((*SLOW, "--at", "9"), ()):
        crews[1].launch(2, *argv, script="libraries/with_lightning.py").wait()
    whole, stopped = (
        torch.frombuffer(bytearray(crew.weights), dtype=torch.float) for crew in crews
    )
    difference = (whole - stopped).abs().max().item()
    print(f"largest difference of a weight: {difference:.1e} of {whole.abs().max().item():.2f}")
    assert 0 < difference < 0.5


@pytest.mark.more
@pytest.mark.parametrize(
    ("settings", "due", "printed"),
    [
        ("{}", 16, "evaluated at [] best at None"),
        ("{'max_steps': 40, 'eval_strategy': 'epoch'}", 16, "evaluated at [16, 32, 40]"),
        (
            "{'per_device_train_batch_size': 64, 'num_train_epochs': 6, 'eval_strategy': 'epoch'}",
            2,
            "evaluated at [1, 2, 3, 4, 5, 6]",
        ),
        (
            "{'eval_strategy': 'steps', 'eval_steps': 0.25, 'save_strategy': 'best',"
            " 'load_best_model_at_end': True, 'learning_rate': 1e-3}",
            12,
            "evaluated at [12, 24, 36, 48] best at 48",
        ),
    ],
    ids=["no evaluation", "not whole epochs", "one step an epoch", "a share of all steps"],
)
def test_what_the_trainer_does_after_a_step_comes_before_a_save_of_the_run(
    make_crew: Callable[[str], Crew], settings: str, due: int, printed: str
) -> None:
    """A resumed Trainer would not evaluate there any more, nor keep its best model."""
    whole, resumed = make_crew("whole"), make_crew("resumed")
    words = ("--settings", settings)
    assert printed in go(whole, "transformers", *words, ranks=1)
    save = ("--save-every-steps", str(due), *SLOW, "--at", str(due + 2), "--signal", "9")
    killed = launch(resumed, "transformers", *words, *save, ranks=1)
    assert killed.wait() == [-signal.SIGKILL], killed.output()
    assert resumed.events("checkpoint")[0]["step"] == due
    if "best" in settings:
        assert [path.name for path in (resumed.base / "hf").iterdir()] == ["checkpoint-12"]
    assert printed in go(resumed, "transformers", *words, ranks=1)
    assert [event["step"] for event in resumed.events("first_step")] == [1, due + 1]
    assert resumed.weights == whole.weights


@pytest.mark.more
@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_the_trainers_warn_of_another_number_of_ranks(
    make_crew: Callable[[str], Crew], library: str
) -> None:
    crew = make_crew("fewer")
    go(crew, library, *SLOW, "--at", "9")
    printed = go(crew, library, ranks=1)
    assert printed.count("WARNING: 2 ranks have done") == 1
    assert "and there are 1 now" in printed


@pytest.mark.more
@pytest.mark.parametrize("saved", [19, 16], ids=["amid an epoch", "at its end"])
def test_lightning_resumes_a_stateful_loader_and_the_validations(
    make_crew: Callable[[str], Crew], saved: int
) -> None:
    """No batch and no epoch is lost, and a validation every seven steps stays there."""
    whole, resumed = make_crew("whole"), make_crew("resumed")
    script = "libraries/with_lightning.py"
    words = ("--stateful", "--order", "in-turn")

    def run(crew: Crew, *argv: str) -> tuple[list[int], list[str]]:
        started = crew.launch(1, *words, *argv, script=script, **OFFLINE)
        codes = started.wait()
        lines = started.output().splitlines()
        return codes, [line.split()[-1] for line in lines if "validates at" in line]

    assert run(whole) == ([0], ["7", "14", "21", "28", "35", "42"])
    kill = ("--save-every-steps", str(saved), *SLOW, "--at", str(saved + 3), "--signal", "9")
    assert run(resumed, *kill)[0] == [-signal.SIGKILL]
    assert run(resumed) == (
        [0],
        [step for step in ("21", "28", "35", "42") if int(step) > saved],
    )
    assert [event["step"] for event in resumed.events("first_step")] == [1, saved + 1]
    assert [event["step"] for event in resumed.events("finished")] == [48]
    assert resumed.weights == whole.weights


@pytest.mark.more
@pytest.mark.parametrize(
    ("words", "due", "saved"),
    [
        (("--order", "stream"), 5, 6),
        (("--order", "stream"), 16, 16),
        (("--order", "stream", "--accumulate", "2"), 3, 4),
        (("--order", "in-turn", "--accumulate", "2"), 8, 8),
        (("--order", "in-turn", "--batch-size", "64", "--epochs", "8"), 3, 3),
        (("--order", "counted"), 16, 16),
        *[
            (("--order", "in-turn", "--part", part), step, step)
            for part in ("unfreeze", "plateau", "cycle")
            for step in (16, 20)
        ],
        (("--order", "in-turn", "--part", "average"), 3, 3),
        (("--order", "in-turn", "--part", "accumulate"), 4, 4),
        (("--order", "in-turn", "--part", "accumulate"), 7, 7),
    ],
    ids=[
        "a stream",
        "a stream at its end",
        "a stream, accumulated",
        "an accumulation at the end of an epoch",
        "one batch an epoch",
        "a sampler with a state",
        *[
            f"{part}, {where}"
            for part in ("unfreezing", "a plateau scheduler", "a cycle")
            for where in ("at the end of an epoch", "amid one")
        ],
        "averaging of weights",
        "a schedule of accumulations, at the end of an epoch",
        "a schedule of accumulations, amid one",
    ],
)
def test_lightning_trains_each_batch_of_a_stateful_loader_once(
    make_crew: Callable[[str], Crew], words: tuple[str, ...], due: int, saved: int
) -> None:
    """Lightning fetches a batch ahead from a stream; its save comes a step later amid an epoch."""
    whole, resumed = make_crew("whole"), make_crew("resumed")

    def run(crew: Crew, *argv: str) -> tuple[list[int], str]:
        argv = ("--stateful", *words, *argv)
        started = crew.launch(1, *argv, script="libraries/with_lightning.py", **OFFLINE)
        return started.wait(), started.output()

    codes, printed = run(whole)
    assert codes == [0], printed
    kill = ("--save-every-steps", str(due), *SLOW, "--at", str(saved + 3), "--signal", "9")
    codes, printed = run(resumed, *kill)
    assert codes == [-signal.SIGKILL], printed
    codes, printed = run(resumed)
    assert codes == [0], printed
    assert [event["step"] for event in resumed.events("first_step")] == [1, saved + 1]
    (end,) = whole.events("finished")
    assert [event["step"] for event in resumed.events("finished")] == [end["step"]]
    assert f"has logged up to step {end['step']}" in printed
    assert resumed.weights == whole.weights


@pytest.mark.more
def test_lightning_stops_amid_a_stream_of_an_ordinary_loader(
    make_crew: Callable[[str], Crew],
) -> None:
    """The stream has no length, and begins anew after the stop."""
    crew = make_crew("stopped")
    stream = ("--order", "stream", "--epochs", "1")
    go(crew, "lightning", *stream, *SLOW, "--at", "4", ranks=1)
    (stop,) = crew.events("stopped")
    assert 4 <= stop["step"] < 16
    go(crew, "lightning", *stream, ranks=1)
    assert [event["step"] for event in crew.events("finished")] == [stop["step"] + 16]


@pytest.mark.more
def test_signals_are_ordinary_ones_behind_a_fit_without_a_launcher(
    make_crew: Callable[[str], Crew],
) -> None:
    crew = make_crew("alone")
    local = {"HPC_DDP_RUN": "", "HPC_DDP_RUNS": str(crew.base / "runs")}
    started = launch(crew, "lightning", ranks=0, **local)
    assert started.wait() == [0], started.output()
    assert "SIGTERM is ended by 0" in started.output()  # SIG_DFL


ORDER = """
from types import SimpleNamespace as Holder
import hpc_ddp.integrations.lightning as ours  # as isort has it: above the library
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import LearningRateFinder, StochasticWeightAveraging
from pytorch_lightning.plugins.io import AsyncCheckpointIO
from hpc_ddp.core.errors import UsageError

assert ours._is_one_of(StochasticWeightAveraging(0.1), ours.SET_AT_EPOCH_START)
for options in ({"callbacks": [LearningRateFinder()]}, {"plugins": [AsyncCheckpointIO()]}):
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **options)
    try:
        ours.StopCallback.setup(None, trainer, None, "fit")
    except UsageError as error:
        print(error.message)

def long_steps(accumulate=1, check=float("inf"), every=1, before=0):
    loop = Holder(total_batch_idx=0)
    trainer = Holder(accumulate_grad_batches=accumulate, num_training_batches=8, fit_loop=loop)
    trainer.val_check_batch, trainer.check_val_every_n_epoch = check, every
    batches = []
    for batch in range(accumulate - 1, 8, accumulate):
        loop.total_batch_idx = before + batch
        batches += [batch] * ours._is_before_long_step(trainer, batch)
    return batches

print(long_steps(), long_steps(2), long_steps(2, check=4), end=" ")
print(long_steps(check=5, every=None, before=8))
"""


def test_lightning_is_known_by_both_names_and_its_validations_are_foreseen(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ORDER)
    env = {**os.environ, **OFFLINE, "PYTHONPATH": str(REPO), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    finder, writer, steps = done.stdout.splitlines()
    assert "a LearningRateFinder is among the callbacks" in finder
    assert "an AsyncCheckpointIO" in writer
    # The step behind each of these batches ends with a validation, or the epoch.
    assert steps == "[6, 7] [5, 7] [1, 5, 7] [0, 5, 6, 7]"
