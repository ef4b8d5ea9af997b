"""Environments as users have them, made without a network."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

REPO = Path(__file__).parents[1]
LOGIN_PACKAGES = (
    *("click", "jinja2", "markupsafe", "rich", "pygments", "markdown_it", "mdurl"),
    *("submitit", "cloudpickle", "typing_extensions"),
)


# No test depends on how fast a machine is: those that run these are noisy.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("here")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="a table of the rows of docs/bad-days.md")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that wait most, on Slurm, and end with the short ones: several processes
    take tests from this list, and none of them is to begin a long one as the last."""
    order = ("slurm", "cli", "ddp", "unit")
    items.sort(key=lambda item: order.index(item.path.relative_to(REPO / "tests").parts[0]))


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--results"):
        config.pluginmanager.register(Results(path))


class Results:
    """Writes a line for each test that shows a row, as soon as it is through."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Iterator[None]:
        report: pytest.TestReport = yield  # type: ignore[misc]
        row = item.get_closest_marker("row")
        # Of the phases set-up, call and tear-down: the call, and what else does not pass.
        if row and (report.when == "call" or not report.passed):
            why = f": {str(call.excinfo.value).splitlines()[0]}" if report.skipped else ""
            measured = ", ".join(f"{name} {value}" for name, value in report.user_properties)
            with open(self.path, "a") as file:
                if not file.tell():  # only now, since the tests may have installed Slurm
                    file.write(_head())
                file.write(
                    f"| {row.args[0]} | `{item.nodeid}` | {report.outcome}{why} |"
                    f" {call.duration:.0f} | {measured} |\n"
                )
        return report  # type: ignore[return-value]


def _head() -> str:
    commit = _said("git", "-C", str(REPO), "describe", "--always", "--dirty")
    return (
        f"# Bad days, seen on {time.strftime('%Y-%m-%d')}\n\n"
        f"Commit {commit}, {_said('slurmctld', '-V')}, Python {sys.version.split()[0]}.\n\n"
        "| bad day | test | outcome | seconds | measured |\n|---|---|---|---|---|\n"
    )


def _said(*argv: str) -> str:
    name = shutil.which(argv[0], path=f"{os.environ['PATH']}:/usr/sbin")
    if name is None:
        return f"no {argv[0]}"
    return subprocess.run([name, *argv[1:]], capture_output=True, text=True).stdout.strip()


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
