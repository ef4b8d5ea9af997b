"""Packages that a script imports before torch, where torch is imported already."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[4]
# Imports what each argument names behind torch, in a process of its own; prints "taken" or the
# refusal, and whether torch's compiler was imported.
PROGRAM = """
import os, sys
from hpc_ddp.node.workers.preload import forget_rank
from hpc_ddp.node.workers.import_order import import_always, import_up_to_torch
from hpc_ddp.node.workers.script_imports import OrderError, ScriptImports, UnfitError
import torch
forget_rank()
output = os.memfd_create("output")
for words in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    imports = ScriptImports(words.split(), "no torch", sets_variables=True)
    try:
        import_up_to_torch(imports, output)
        import_always(imports, output)
        print("taken", "torch._dynamo" in sys.modules)
    except UnfitError as error:
        print(type(error).__name__, error)
    sys.stdout.flush()
    os._exit(0)
"""
WATCH = """
import sys
class Watch:
    def find_spec(self, name, path, target=None):
        return sys if name == "torch.nn" else None
sys.meta_path.insert(0, Watch())
"""


CASES = [
    # It might set variables next.
    ("int(os.environ.get('LOCAL_RANK', 0))", "torch",
     "OrderError an import has read LOCAL_RANK, before the import of torch"),
    ("if 'torch' in sys.modules: raise ImportError('late')", "torch",
     "OrderError the import of case_1 has failed: ImportError('late'), before the import of torch"),
    ("dict(os.environ)\nos.environ['OMP_NUM_THREADS'] = '2'", "torch",
     "OrderError an import has changed variables of torch: OMP_NUM_THREADS"),
    (f"dice = random.Random()\n{WATCH}", "torch",
     "OrderError an import has changed how torch is imported"),
    ("sys.path_hooks.insert(0, print)", "torch",
     "OrderError an import has changed how torch is imported"),
    # What differs in a fork alone does not matter to torch.
    ("dict(os.environ)", "torch", "UnfitError an import has read all variables"),
    ("dice = random.Random()", "torch",
     "UnfitError an import has changed the generators of random numbers"),
    (WATCH.replace("torch.nn", "click"), "torch", "taken False"),
    ("import torch\nos.environ.get('RANK')", "torch", "EndedError an import has read RANK"),
    # Without an import of torch in the script: a package may make it.
    ("from torch import nn", "", "taken False"),
    ("import json", "", "OrderError no torch"),
    ("dict(os.environ)", "", "OrderError no torch"),
]  # fmt: skip


def test_a_package_before_torch_is_tried(tmp_path: Path) -> None:
    arguments = []
    for number, (text, next_name, _) in enumerate(CASES):
        name = f"case_{number}"
        (tmp_path / f"{name}.py").write_text(f"import os, random, sys\n{text}")
        arguments.append(f"{name} {next_name}")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPO}"}
    argv = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [outcome for _, _, outcome in CASES]
