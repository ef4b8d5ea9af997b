"""Environments as users have them, made without a network."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from hpc_ddp import slurm
from hpc_ddp.core.job.variables import OF_A_RANK
from tests import results
from tests.children import end_children

REPO = Path(__file__).parents[1]
# fmt: off
LOGIN_PACKAGES = (
    "click", "jinja2", "markupsafe", "submitit", "cloudpickle", "typing_extensions",
)
# fmt: on


# What a profile, an outer job or a launcher has set is none of the tests', but for their switches.
SWITCHES = r"HPC_DDP_(ACCEPT|CLUSTER|DRY_RUN_DEVICES|FAULT|LOOPS|PROGRAMS|SOAK|TEST)"
OF_A_JOB = re.compile(
    rf"(SLURM|SBATCH|SALLOC|SRUN|SQUEUE|SINFO|PMI\d?|PMIX|OMPI|PET|WANDB|MLFLOW)_"
    rf"|({OF_A_RANK}|OMP_NUM_THREADS)$|(?!{SWITCHES})HPC_DDP_"
)
for name in filter(OF_A_JOB.match, list(os.environ)):
    del os.environ[name]

# No test depends on how fast a machine is: those that run these are noisy.
settings.register_profile(
    "here", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("here")


def pytest_addoption(parser: pytest.Parser) -> None:
    results.add_options(parser)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Spread the tests on Slurm, which wait half of their time, among those that start processes
    and compute, and end with the short ones: several processes take tests from this list, and none
    of them is to begin a long one as the last. Of the longer tests those on Slurm come first, and
    those of a module stay together: it may have a cluster of its own."""
    by_folder: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_folder.setdefault(item.path.relative_to(REPO / "tests").parts[0], []).append(item)
    on_slurm, short = by_folder.pop("slurm", []), by_folder.pop("unit", [])
    groups = on_slurm, [item for tests in by_folder.values() for item in tests]
    places = {item: n / len(group) for group in groups for n, item in enumerate(group)}
    is_short = config.getoption("markexpr") == "not more"
    items[:] = [*(sorted(places, key=places.__getitem__) if is_short else places), *short]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while the tests' modules are imported, and leave what their imports have
    made (torch alone: a million objects) out of later collections, each of which would take half a
    second."""
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # else an extension of torch's reports leaks at the exit
    return result


def pytest_configure(config: pytest.Config) -> None:
    results.configure(config)


@pytest.fixture(autouse=True)
def _ask_slurm_anew() -> Iterator[None]:
    """A process asks Slurm once for its configuration, and each test has a cluster of its own."""
    slurm.show_config.cache_clear()
    yield
    slurm.show_config.cache_clear()


@pytest.fixture(autouse=True)
def children_end() -> Iterator[None]:
    yield
    end_children()


def _bare_venv(folder: Path) -> Path:
    """Make an environment with nothing in it; return its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    return site


@pytest.fixture(scope="session")
def wheel_env(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the built wheel of hpc-ddp and what it depends on, and no torch."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*build, str(REPO)], check=True, capture_output=True)
    site = _bare_venv(folder / "env")
    for name in LOGIN_PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec
        assert spec.origin
        path = Path(spec.origin)
        path = path.parent if path.name == "__init__.py" else path
        (site / path.name).symlink_to(path)
    (wheel,) = folder.glob("*.whl")
    python = str(folder / "env" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-index", str(wheel)], check=True)
    return folder / "env"


@pytest.fixture(scope="session")
def torch_env(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with torch, and no hpc-ddp."""
    folder = tmp_path_factory.mktemp("torch") / "env"
    spec = importlib.util.find_spec("torch")
    assert spec
    assert spec.origin
    (_bare_venv(folder) / "torch.pth").write_text(f"{Path(spec.origin).parents[1]}\n")
    look = "import importlib.util as u, sys; sys.exit(u.find_spec('hpc_ddp') is not None)"
    subprocess.run([str(folder / "bin" / "python"), "-c", look], check=True, cwd="/")
    return folder
