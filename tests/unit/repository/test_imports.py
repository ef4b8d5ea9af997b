"""Folders of the package import in one direction, and the command line stays light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "hpc_ddp"
FORBIDDEN = ("torch", "torchvision", "numpy", "submitit")
STDLIB = set(sys.stdlib_module_names) | {"tomllib"}  # since 3.11

# Room: (our rooms that it may import, other packages).
MAY_IMPORT: dict[str, tuple[set[str], set[str]]] = {
    "core": ({"core"}, set()),
    "slurm": ({"core", "slurm_text"}, set()),
    "slurm_text": ({"core"}, set()),
    "live_jobs": ({"core", "slurm", "slurm_text"}, set()),
    "submission": (
        {"core", "live_jobs", "slurm", "slurm_text", "submission"},
        {"jinja2", "submitit", "tomli", "tree_sitter", "tree_sitter_bash", "yaml"},
    ),
    "node": ({"core", "live_jobs", "slurm", "slurm_text", "node"}, set()),
    "training": ({"core", "training"}, {"torch", "numpy", "safetensors"}),
    "integrations": (
        {"core", "training", "integrations"},
        {"torch", "transformers", "lightning", "pytorch_lightning", "accelerate"},
    ),
    "report": ({"core", "live_jobs", "slurm", "slurm_text", "report"}, {"jinja2"}),
    "cli": ({"core", "live_jobs", "slurm", "slurm_text", "submission", "report", "cli"}, {"click"}),
    "api": ({"core", "live_jobs", "slurm", "slurm_text", "submission", "report"}, set()),
}
# The agent is torchrun, so it runs where torch is, as do its rendezvous and the trial of devices;
# the bandwidth is that of torch's own collectives; submitit is given the supervisor by name.
EXCEPTIONS = {
    ("node/elastic_agent.py", "torch"),
    ("node/net/elastic_rendezvous.py", "torch"),
    ("node/net/fixed_rendezvous.py", "torch"),
    ("node/preflight/bandwidth.py", "torch"),
    ("node/workers/device_check.py", "torch"),
    ("submission/backends.py", "hpc_ddp.node.supervisor"),
}


def _imports(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            deeper = node.module == "hpc_ddp"
            modules |= {f"hpc_ddp.{a.name}" for a in node.names} if deeper else {node.module}
    return modules


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_one_way(room: str) -> None:
    ours, packages = MAY_IMPORT[room]
    paths = sorted((PACKAGE / room).rglob("*.py")) or [PACKAGE / f"{room}.py"]
    assert paths
    for path in paths:
        name = str(path.relative_to(PACKAGE))
        for module in _imports(path):
            top, _, submodule = module.partition(".")
            if (name, module) in EXCEPTIONS or (name, top) in EXCEPTIONS:
                continue
            if top == "hpc_ddp":
                assert submodule.split(".")[0] in ours | {"__version__"}, f"{name} imports {module}"
            else:
                assert top in STDLIB | packages, f"{name} imports {module}"


def test_command_line_imports_nothing_heavy() -> None:
    code = (
        "import sys; from hpc_ddp.cli.main import main;"
        "[main.get_command(None, name) for name in main.list_commands(None)];"
        f"print([name for name in {FORBIDDEN!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_submitting_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    code = (
        "import sys; from hpc_ddp.cli.main import main;"
        "main(['render', '--backend', sys.argv[1], 'train.py'], standalone_mode=False);"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "slurm"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr.splitlines()[-1] == "False", done.stderr


def test_package_itself_imports_nothing() -> None:
    code = "import sys; before = {*sys.modules}; import hpc_ddp; print({*sys.modules} - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'hpc_ddp'}"


def test_names_in_proc_may_have_any_bytes() -> None:
    """A process may have any name, and Linux cuts it after 15 bytes; so may a mount's folder."""
    strict = re.compile(r"""["']/proc/.*read_text\(\)|open\(f?["']/proc/[^,]*\)""")
    lines = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
        if strict.search(line)
    ]
    assert not lines, "read_text(errors='replace'), or proc_text"
