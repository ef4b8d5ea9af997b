"""The jobs: on four ranks, interrupted, in one process, on MNIST's own files, on bad data."""

from __future__ import annotations

import gzip
import re
import runpy
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_ddp.core.checkpoints import candidates
from hpc_ddp.training.checkpoint.restore import open_checkpoint

JOBS = Path(__file__).parents[2] / "jobs"
HEAVY = ("torchvision",)


@dataclass(frozen=True)
class Job:
    """A small training on four ranks; `alone` makes steps of the same size in one process.

    `metric` is a pattern of what is printed at the end, which may be `apart` by that much between
    four ranks and one process. The signal comes in step `at`.
    """

    name: str
    argv: str
    alone: str
    at: int
    metric: str
    apart: float

    @property
    def script(self) -> str:
        return str(JOBS / f"{self.name}.py")


SMALL_HOUSES = "--data ../houses --size 32 --arch shufflenet_v2_x0_5 --lr 2e-3 --epochs 2"
TEST_ACCURACY = r"test accuracy (\S+)"
LIST = [
    # Sums in another order only.
    Job("linear_regression", "--epochs 3", "--batch-size 40", 14, r"y = (\S+) x", 0.0011),
    # Dropout draws other numbers on other ranks.
    Job(
        "mnist",
        "--epochs 2 --batch-size 8 --lr 1.25e-3",
        "--batch-size 32 --lr 5e-3",
        50,
        TEST_ACCURACY,
        0.03,
    ),
    # Each rank has its own statistics for batch norm, where there is no GPU.
    Job(
        "convnet_amp",
        "--epochs 1 --batch-size 8 --lr 5e-2 --precision bf16",
        "--batch-size 32",
        14,
        TEST_ACCURACY,
        0.05,
    ),
]
LATER = ("mnist", "convnet_amp")  # only in `make test-more`
each_job = pytest.mark.parametrize(
    "job",
    [
        pytest.param(job, id=job.name, marks=[pytest.mark.more] if job.name in LATER else [])
        for job in LIST
    ],
)
HOUSES = Job(
    "designsafe", f"{SMALL_HOUSES} --batch-size 4", "--batch-size 16", 5, TEST_ACCURACY, 0.5
)


@pytest.fixture(scope="module", autouse=True)
def _imported(zygote: Any) -> None:
    """Have what the jobs import once, and not in each of some fifty processes."""
    zygote.ask({"import": HEAVY})


def draw(folder: Path, train: int, test: int, size: int = 32) -> None:
    """Draw so many houses of each class."""
    draw_set = runpy.run_path(str(JOBS / "data" / "draw_houses.py"))["draw_set"]
    draw_set(folder, {"Train": train, "Validation": test, "Test": test}, size=size, seed=0)


@pytest.fixture
def houses(tmp_path: Path) -> Path:
    draw(tmp_path / "houses", 16, 4)
    return tmp_path / "houses"


def go(crew: Any, ranks: int, job: Job, *more: str, at: int = -1) -> str:
    """Run a job to its end, or to a stop in step `at`, and return what it printed."""
    argv = [str(at), job.script, *job.argv.split(), *more]
    launch = crew.launch(ranks, *argv, script="sigterm_at_step.py")
    assert not any(launch.wait()), launch.output()
    output: str = launch.output()
    return output


def final(run: Any) -> dict[str, torch.Tensor]:
    reader = open_checkpoint(candidates(run.checkpoints)[0]).reader
    return {name: reader.read(name).clone() for name in reader}


def metric(job: Job, output: str) -> float:
    found = re.search(job.metric, output)
    assert found, output
    return float(found[1])


def check(job: Job, make_crew: Callable[[str], Any]) -> None:
    """Interrupted equals undisturbed, bit for bit; one process comes to the same."""
    whole, stopped, alone = (make_crew(name) for name in ("whole", "stopped", "alone"))
    expected = go(whole, 4, job)
    first = go(stopped, 4, job, at=job.at)
    assert "stopped and saved at step" in first
    assert not re.search(job.metric, first)
    output = go(stopped, 4, job)
    assert "going on from step" in output
    assert metric(job, output) == metric(job, expected)
    tensors = final(whole.run)
    assert tensors.keys() == final(stopped.run).keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in final(stopped.run).items())
    one = go(alone, 0, job, *job.alone.split())
    assert metric(job, one) == pytest.approx(metric(job, expected), abs=job.apart)


@each_job
def test_interrupted_it_equals_undisturbed(job: Job, make_crew: Callable[[str], Any]) -> None:
    check(job, make_crew)


@pytest.mark.more
def test_designsafe_interrupted(make_crew: Callable[[str], Any], tmp_path: Path) -> None:
    draw(tmp_path / "houses", 48, 12)
    check(HOUSES, make_crew)


@pytest.mark.more
def test_fp16_interrupted(make_crew: Callable[[str], Any]) -> None:
    argv = LIST[2].argv.replace("bf16", "fp16 --accumulate 3")
    check(Job("convnet_amp", argv, "--batch-size 32", 10, TEST_ACCURACY, 0.05), make_crew)


def write_mnist(folder: Path) -> None:
    """Write the shipped digits, three times as large, as MNIST's own files."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    with gzip.open(JOBS / "data" / "digits.csv.gz", "rt") as lines:
        table = torch.tensor([[int(number) for number in line.split(",")] for line in lines])
    images = table[:, :64].reshape(-1, 8, 8).mul(15).to(torch.uint8)
    images = images.repeat_interleave(3, 1).repeat_interleave(3, 2)
    images = torch.nn.functional.pad(images, (2, 2, 2, 2))
    test = torch.arange(len(table)) % 5 == 4
    for name, chosen in (("train", ~test), ("t10k", test)):
        count = int(chosen.sum())
        head = struct.pack(">iiii", 2051, count, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(head + images[chosen].numpy().tobytes())
        labels = table[chosen, 64].to(torch.uint8).numpy().tobytes()
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 2049, count) + labels)


def test_mnist_reads_its_own_format(crew: Any, tmp_path: Path) -> None:
    write_mnist(tmp_path / "data")
    job = Job("mnist", f"--data {tmp_path / 'data'} --epochs 3 --lr 3e-3", "", 0, TEST_ACCURACY, 0)
    output = go(crew, 0, job)
    assert metric(job, output) >= 0.95
    assert "digits" not in output


@pytest.mark.more
@pytest.mark.parametrize("ranks", [0, 4])
def test_mnist_reads_the_shipped_digits(crew: Any, ranks: int) -> None:
    job = Job("mnist", "--epochs 10", "", 0, TEST_ACCURACY, 0)
    output = go(crew, ranks, job)
    assert metric(job, output) >= 0.95
    assert "training on the shipped 8x8 digits, not on MNIST" in output


@pytest.mark.parametrize("job", ["mnist", "convnet_amp"])
def test_no_mnist_there_is_said(crew: Any, job: str) -> None:
    launch = crew.launch(0, "--data", "nowhere", script=str(JOBS / f"{job}.py"))
    assert launch.wait() == [2]
    assert "error: nowhere has no MNIST that torchvision can read" in launch.output()
    assert "Traceback" not in launch.output()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gpt --text nowhere", "error: --text nowhere can't be read: [Errno 2]"),
        ("gpt --text binary", "error: --text binary can't be read: 'utf-8' codec"),
        ("gpt --text short", "error: the text is too short to train and to test with --length 128"),
        ("gpt --heads 0", "--heads is 0; accepted: a whole number from 1"),
        ("gpt --curve nowhere/curve", "--curve is nowhere/curve; accepted: a file in a folder"),
        ("mnist --epochs 0", "--epochs is 0; accepted: a whole number from 1"),
        ("data/draw_houses short", "short is no folder to write into"),
        ("data/draw_houses new --size 0", "--size is 0; accepted: a whole number from 1"),
    ],
)
def test_bad_arguments_are_said_plainly(crew: Any, line: str, words: str) -> None:
    (crew.base / "short").write_text("short")
    (crew.base / "binary").write_bytes(b"\xff")
    job, *argv = line.split()
    launch = crew.launch(0, *argv, script=str(JOBS / f"{job}.py"))
    assert launch.wait() == [2], launch.output()
    assert words in launch.output()
    assert "Traceback" not in launch.output()


def test_frozen_means_frozen() -> None:
    model = runpy.run_path(HOUSES.script)["make_model"]("shufflenet_v2_x0_5", None, 3, freeze=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(torch.randn(4, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    changed = {k for k, value in model.state_dict().items() if not torch.equal(value, before[k])}
    assert changed == {"fc.0.weight", "fc.0.bias", "fc.2.weight", "fc.2.bias"}


@pytest.mark.more
def test_a_frozen_backbone_stays_as_it_was(crew: Any, houses: Path) -> None:
    module = runpy.run_path(HOUSES.script)
    torch.manual_seed(3)
    model = module["make_model"]("shufflenet_v2_x0_5", None, 3, freeze=False)
    given = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save(given, crew.base / "given.pth")
    argv = (*SMALL_HOUSES.split(), "--weights", str(crew.base / "given.pth"), "--freeze")
    launch = crew.launch(0, *argv, "--epochs", "1", script=HOUSES.script)
    assert launch.wait() == [0], launch.output()
    trained = final(crew.run)
    for name, tensor in given.items():
        after = trained[name.replace("module.", "model.", 1)] if ".fc." not in name else None
        assert after is None or torch.equal(after, tensor), name
    assert not torch.equal(trained["model.fc.2.weight"], given["module.fc.2.weight"])
    assert {"confusion.png", "predictions.png"} <= {path.name for path in crew.run.path.iterdir()}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("missing", "Train is no folder of images"),
        ("no class", "Couldn't find any class folder"),
        ("other class", "Validation has the classes C0, C2, C4, C9; accepted: those of Train"),
        ("no image", "000.png can't be read as an image"),
        ("no weights", "given.pth can't be read as weights"),
        ("other weights", "given.pth has no weights of a shufflenet_v2_x0_5: Missing key(s)"),
    ],
)
def test_bad_houses_are_said_plainly(crew: Any, houses: Path, damage: str, words: str) -> None:
    argv = [*SMALL_HOUSES.split(), "--workers", "1"]
    given = crew.base / "given.pth"
    if damage == "missing":
        argv[1] = "nowhere"
    elif damage == "no class":
        (crew.base / "empty" / "Train").mkdir(parents=True)
        argv[1] = "empty"
    elif damage == "other class":
        (houses / "Validation" / "C9").mkdir()
        (houses / "Validation" / "C9" / "0.png").touch()
    elif damage == "no image":
        for path in (houses / "Train").glob("*/000.png"):
            path.write_bytes(path.read_bytes()[:100])
    else:
        argv += ["--weights", str(given)]
        torch.save({"weight": torch.ones(3)}, given)
        if damage == "no weights":
            given.write_text("no weights")
    launch = crew.launch(0, *argv, script=HOUSES.script)
    assert launch.wait() == [2], launch.output()
    assert words in launch.output()
    assert "Traceback" not in launch.output()


@pytest.mark.more
def test_designsafe_learns(crew: Any, tmp_path: Path) -> None:
    draw(tmp_path / "houses", 80, 20, size=64)
    argv = f"--data {tmp_path / 'houses'} --size 64 --epochs 5"
    job = Job("designsafe", argv, "", 0, TEST_ACCURACY, 0)
    assert metric(job, go(crew, 2, job)) > 0.6  # chance is 0.33
