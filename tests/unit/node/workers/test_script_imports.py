"""The imports of a script are read, and what makes a fork differ from a start is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_ddp.node.workers.module_files import find_hiding_file
from hpc_ddp.node.workers.script_imports import UnfitError, modules_ahead

BEFORE = "comes before the import of torch"
NONE_SEEN = "no import of torch is seen at the top level of the script"


COMPILER, TRAINING = "torch._dynamo", "hpc_ddp.training"


def _read(folder: Path, text: str, **others: str) -> list[str]:
    """Write a script, and other files by name (``a__b`` is ``a/b.py``); return what can be imported
    ahead."""
    for name, content in {"train": text, **others}.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return modules_ahead(folder / "train.py", [folder])


@pytest.mark.parametrize(
    "text",
    [
        "import os, json\nimport numpy as np\nfrom torch import nn\n",
        "from torchvision import models\nown()\nimport anything\n",
        "from transformers import AutoModelForCausalLM\n",
        "from hpc_ddp import training\n",
        "from hpc_ddp.training import start\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pytest\nimport torch\n",
        "try:\n    import torch\nexcept ImportError:\n    torch = None\n",
        "with open('x'):\n    pass\nimport torch\n",
        "import app\n",
        "if __name__ == '__main__':\n    from app import main\n    main()\n",
        "import tools, no_such_module\nimport app\napp.main()\n",
        "import click, tools\nif click:\n    import jinja2\nimport torch\n",
        "def later():\n    import pytest\nimport torch\n",
    ],
)
def test_torch_is_seen_wherever_it_always_comes_first(tmp_path: Path, text: str) -> None:
    """Of the script itself also below its guard, and in modules of its own."""
    files = {"app": "import torch\ndef main(): ...\n", "tools": "import os\n"}
    assert (TRAINING in _read(tmp_path, text, **files)) is ("hpc_ddp" in text)


def test_training_is_imported_ahead_only_where_nothing_may_patch_torch_before(
    tmp_path: Path,
) -> None:
    training = "from hpc_ddp.training import start\n"
    assert TRAINING in _read(tmp_path, f"import torch\n{training}")
    for line in ("import pytest", "os.environ['OMP_PLACES'] = '1'", "torch.set_default_dtype(a)"):
        assert TRAINING not in _read(tmp_path, f"import os, torch\n{line}\n{training}")
    assert TRAINING not in _read(tmp_path, f"import torch\nif torch:\n    {training}")


@pytest.mark.parametrize(
    "text",
    [
        "def main():\n    import torch\nmain()\n",
        "import json\n",
        "import sys\nif sys.argv:\n    import torch\n",
        "import app\n",
        "from app import main\nif __name__ == '__main__':\n    main()\n    import torch\n",
        "from transformers import AutoTokenizer\n",
        "from transformers import DataCollatorForLanguageModeling\n",
        "try:\n    import jinja2\n    import torch\nexcept ImportError:\n    pass\n",
        "if __name__ == '__main__':\n    pass\nelse:\n    import torch\n",
    ],
)
def test_a_script_whose_import_of_torch_is_not_seen_is_refused(tmp_path: Path, text: str) -> None:
    app = "def main():\n    import torch\nif __name__ == '__main__':\n    import torch\n"
    with pytest.raises(UnfitError, match="import of torch"):
        _read(tmp_path, text, app=app)


def test_modules_of_its_own_are_read(tmp_path: Path) -> None:
    own = {
        "data": "import numpy\nfrom models.net import Net\n",
        "models__net": "from . import layers\nfrom ..models.blocks import deep\nimport click\n",
        "models__layers": "import jinja2\n",
        "models__blocks": "import train\nimport pytest\n",
    }
    with pytest.raises(UnfitError, match=rf"blocks\.py, line 2, {BEFORE}"):
        _read(tmp_path, "import data\nfrom models import net\nimport torch\n", **own)
    own["models__blocks"] = "import train\nimport yaml\n"
    assert _read(tmp_path, "import data\nfrom models import net\nimport torch\n", **own) == [
        COMPILER
    ]


def test_a_plain_folder_hides_no_package_and_a_package_of_its_own_does(tmp_path: Path) -> None:
    (tmp_path / "numpy").mkdir()
    assert _read(tmp_path, "import numpy, torch\n")
    assert find_hiding_file([tmp_path], ["numpy.random", "os"]) is None
    (tmp_path / "numpy" / "__init__.py").touch()
    with pytest.raises(UnfitError, match=BEFORE):
        _read(tmp_path, "import numpy, torch\n")
    assert find_hiding_file([tmp_path], ["numpy.random", "os"]) == tmp_path / "numpy"


def test_our_package_comes_from_the_library_unless_it_is_beside_the_script(tmp_path: Path) -> None:
    code, jobs = tmp_path, tmp_path / "jobs"
    jobs.mkdir()
    (code / "hpc_ddp").mkdir()
    (code / "hpc_ddp" / "__init__.py").write_text("import os\nos.environ['OMP_PLACES'] = '1'\n")
    script = jobs / "train.py"
    script.write_text("from hpc_ddp.training import start\n")
    assert TRAINING in modules_ahead(script, [jobs, code])
    assert find_hiding_file([jobs, code], ["hpc_ddp"]) is None
    assert find_hiding_file([code, jobs], ["hpc_ddp"]) == code / "hpc_ddp"
    beside = code / "train.py"
    beside.write_text("import hpc_ddp\nimport torch\n")
    with pytest.raises(UnfitError, match=r"__init__\.py, line 2, comes before"):
        modules_ahead(beside, [code])


@pytest.mark.parametrize(
    "line",
    [
        "environ['OMP_NUM_THREADS'] = '1'",
        "os.environ.setdefault('OPENBLAS_NUM_THREADS', '1')",
        "os.environ['TQDM_DISABLE'] = '1'",
        "os.environ['TMPDIR'] = '1'",
        "os.environ.update(values)",
        "os.environ.update(**values)",
        "os.environ.update({**values})",
        "os.environ.update({'MKL_DYNAMIC': '1'})",
        "os.environ.update(TORCH_LOGS='a')",
        "os.environ[name] = '1'",
        "del os.environ['PYTORCH_ALLOC_CONF']",
        "os.environ.pop('KMP_AFFINITY', None)",
        "os.environ |= {'A': '1'}",
        "os.putenv('A', '1')",
        "load_dotenv()",
        "sys.path.insert(0, '..')",
        "sys.path[:0] = ['..']",
        "sys.path = ['..', *sys.path]",
        "os.environ['OMP_PLACES'], b = '1', 2",
        "os.environ['OMP_PLACES']: str = '1'",
        "os.environb[b'MKL_DYNAMIC'] = b'1'",
        "os.environ.__setitem__('TORCH_LOGS', '1')",
        "os.environ.__ior__({})",
        "sys.modules['numpy'] = None",
        "import sys as s; s.path.insert(0, 'a')",
        "from sys import path; path.insert(0, 'a')",
        "from sys import modules; modules['a'] = 0",
        "p = sys.path; p.insert(0, 'a')",
        "from os import environ as e; e['OMP_PLACES'] = '2'",
        "if name: os.environ['OMP_PLACES'] = '1'",
        "os.chdir('/')",
        "simplefilter()",
    ],
)
def test_a_change_counts_before_torch_and_not_behind_it(tmp_path: Path, line: str) -> None:
    with pytest.raises(UnfitError, match=f"train.py, line 2, {BEFORE}"):
        _read(tmp_path, f"import os, sys\n{line}\nimport torch\n")
    own = f"import os, sys\n{line}\n"
    with pytest.raises(UnfitError, match=f"own.py, line 2, {BEFORE}"):
        _read(tmp_path, "import own, torch\n", own=own)
    assert _read(tmp_path, f"import torch\nimport os, sys\n{line}\n", own=own) is not None
    assert _read(tmp_path, "import torch, own\n", own=own) is not None


@pytest.mark.parametrize(
    "lines",
    [
        "if own(os.name): pass",
        "assert own(os.name)",
        "with own(): pass",
        "for a in own(): pass",
        "@own()\ndef main(): pass",
        "def main(a=own()): pass",
        "class A(own()): pass",
        "class A:\n    a = own()",
        "match own():\n    case _: pass",
        "os.cpu_count = len",
        "import logging\nlogging.getLogger('a').setLevel(10)",
        "import logging\nlogging.getLogger('a').propagate = False",
        "if __name__ == '__main__':\n    own()",
        "if os:\n    import pytest",  # it may have to come before torch
        "import pytest",
        *("import trace", "import datasets"),  # its own ones
        "import spaced.settings",  # of an installed folder without an __init__.py
        "import typing\nif not typing.TYPE_CHECKING:\n    own()",
        "import compiled",
        "start = own\nstart()",
        "from config import *\nunknown()",
        "match os:\n    case 1:\n        import pytest",
        "with own():\n    import torch",
        "@own\ndef main(): pass",
        "class A:\n    @own\n    def main(self): pass",
        "class A(own): pass",
        "with own: pass",
        "list(map(own, [1]))",
        "import functools\nstart = functools.partial(own)\nstart()",
        "import threading\nthreading.Thread(target=own).start()",
        "import multiprocessing\nmultiprocessing.set_start_method('spawn')",
        "import multiprocessing\nmanager = multiprocessing.Manager()",
        "from concurrent.futures import ProcessPoolExecutor\npool = ProcessPoolExecutor(2)",
        "os.umask(0)",
        "net.Linear = Zero",
        "net.defaults['a'] = 1",
        "setattr(net, 'Linear', Zero)",
        "import sys\nsys.path.append('..')",
        "import sys\nsys.meta_path.insert(0, Watch())",
        "from unittest import mock\nmock.patch.dict({}, A='1').start()",
        "a: str = own()",
        "net.configure()",
        "if True:\n    own()",
        "net.Linear, net.Norm = Zero, One",
        "for module in (os, net):\n    module.Linear = Zero",
        "vars(net)['Linear'] = Zero",
        "try:\n    import no_such_module\nexcept ImportError:\n    import pytest",
        "import click\nclick.set_up()",
    ],
)
def test_a_call_wherever_it_runs_comes_before_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str
) -> None:
    (tmp_path / "compiled.abi3.so").touch()
    (tmp_path / "trace.py").touch()
    (tmp_path / "datasets.py").touch()
    (tmp_path / "installed" / "spaced").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "installed")
    text = f"import os, net\nfrom config import own\n{lines}\nimport torch\n"
    with pytest.raises(UnfitError, match=BEFORE):
        _read(tmp_path, text, config="", net="")


@pytest.mark.parametrize(
    "lines",
    [
        "def main():\n    own()",
        "class A:\n    def main(self):\n        own()",
        "import dataclasses\n@dataclasses.dataclass\nclass A:\n    a: int = dataclasses.field()",
        "if __name__ != '__main__':\n    pass",
        "from config import *\nprint(', '.join(str(1)))",
        "import argparse\nparser = argparse.ArgumentParser()\nparser.set_defaults(a=own.A)",
        "here = os.path.join(own.A, 'b')\nprint(own.A)",
        "import sys\nwith open(sys.argv[0]) as file:\n    code = file.read()",
        "import sys\nsys.stdout.reconfigure(line_buffering=True)",
        "import matplotlib\nmatplotlib.use('Agg')",
        "import numpy as np\nnp.set_printoptions(precision=3)",
        "import gc, atexit\ngc.disable()\natexit.register(print, 'end')",
    ],
)
def test_a_call_that_does_not_run_there_is_harmless(tmp_path: Path, lines: str) -> None:
    text = f"import os\nfrom config import own\n{lines}\nimport torch\n"
    assert _read(tmp_path, text, config="")


@pytest.mark.parametrize(
    ("line", "is_setting"),
    [
        ("import logging as log\nlog.disable(log.WARNING)", True),
        ("import logging.config\nlogging.captureWarnings(True)", True),
        ("import logging\nlogging.root.handlers.clear()", True),
        ("from warnings import resetwarnings\nresetwarnings()", True),
        ("from logging import disable as end\nend(1)", True),
        ("import logging\nlogging.getLogger('a').info('b')\nlogging.Formatter('%s')", False),
        ("import warnings, locale\nwarnings.warn('a')\nlocale.getlocale()", False),
    ],
)
def test_a_function_of_logging_or_warnings_is_a_setting_unless_it_only_writes(
    tmp_path: Path, line: str, is_setting: bool
) -> None:
    text = f"{line}\nimport torch\n"
    if is_setting:
        with pytest.raises(UnfitError, match=BEFORE):
            _read(tmp_path, text)
    else:
        assert _read(tmp_path, text)


@pytest.mark.parametrize(
    "line",
    [
        *("A = os.environ['A']", "if 'A' in os.environ: pass", "A = os.environ.get('A', '')"),
        *("print(dict(os.environ), sys.path)", "a = {**os.environ, 'A': '1'}"),
        *("os.environ['MASTER_PORT'] = '1'", "path['a'] = 1", "update('a')"),
        *(
            "os.environ['CUDA_VISIBLE_DEVICES'] = '1'",
            "os.environ['HF_HOME'] = '1'",
            "os.environ.setdefault('MPLBACKEND', 'Agg')",
            "os.environ['TORCH_HOME'] = '1'",
            "os.environ.update({'HF_HOME': '1'}, WANDB_MODE='offline')",
            "for name in os.environ: pass",
            "env = os.environ.copy()",
        ),
        *("names = [name for name in sys.modules]", "print(f'{sys.path}')", "sys.path[0]"),
    ],
)
def test_what_only_reads_changes_nothing(tmp_path: Path, line: str) -> None:
    assert _read(tmp_path, f"import os, sys\n{line}\nimport torch\n") is not None


def test_modules_on_the_search_path_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, script = tmp_path / "other", tmp_path / "script"
    (other / "pack").mkdir(parents=True)
    script.mkdir()
    (other / "single.py").write_text("import numpy\n")
    (other / "pack" / "__init__.py").write_text("from . import part\n")
    (other / "pack" / "part.py").write_text("import os\nos.environ['OMP_PLACES'] = '1'\n")
    monkeypatch.syspath_prepend(str(other))
    assert _read(script, "import single, torch\n")
    with pytest.raises(UnfitError, match=r"part\.py, line 2, comes before"):
        _read(script, "import pack\n")


def test_a_script_that_is_no_python_is_refused(tmp_path: Path) -> None:
    for text in ("def", "\0", "(" * 300):
        with pytest.raises(UnfitError, match=r"train\.py can't be read"):
            _read(tmp_path, text)
    with pytest.raises(UnfitError, match="can't be read"):
        modules_ahead(tmp_path / "none.py", [tmp_path])


def test_modules_that_are_imported_later_are_read(tmp_path: Path) -> None:
    text = "import torch\ndef main():\n    import late\n"
    late = "import torch, later\ntorch.set_default_dtype(0)\n"
    assert _read(tmp_path, text, late=late, later="") == [COMPILER]
    assert not _read(tmp_path, text, late=late, later="a = torch.compile(b)\n")
    with pytest.raises(UnfitError, match=r"later\.py can't be read"):
        _read(tmp_path, text, late=late, later="def")


@pytest.mark.parametrize(
    ("line", "is_ahead"),
    [
        *((line, True) for line in (
            "torch.backends.cudnn.benchmark = True",
            "pattern = re.compile('a')",
            "from importlib.metadata import version",
            "torch.nn.functional.dropout = own",
            "setattr(torch.nn, 'Linear', Own)",
            "os.environ['OMP_PLACES'] = 'a'",
            "os.chdir('a')",
            "from unittest import mock",
            "DataLoader(0, worker_init_fn=torch.manual_seed)",
            "torch.hub.load_state_dict_from_url('a')",
            "try: import not_there\n    except ImportError: pass",
        )),
        *((line, False) for line in (
            "net = torch.compile(net)",
            "torch.export.export(net)",
            "from torch.distributed import (\n        init_process_group, tensor as dt)",
            "from torch.distributed import _functional_collectives as funcol",
            "parser.add_argument('--torch_compile')",
            "torch._dynamo.config.cache_size_limit = 64",
            "print(torch._inductor.config.max_autotune)",
            "import triton",
            "from torch.distributed.fsdp import fully_shard",
            "from torch.distributed.tensor import distribute_tensor",
            "trainer = Trainer(strategy='fsdp')",
            "from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as a",
            "from sympy import Symbol",
            "attn_implementation='flex_attention'",
            "import pytest",
            "import importlib",
            "from importlib.machinery import A",
            "from pydoc import locate",
            "net = torch.hub.load('a', 'b')",
            "import not_there",
            "import hydra",
            "exec(open('configurator.py').read())",
            "for a in entry_points(group='a'): a.load()",
            "sys.path.append('..')",
        )),
    ],
)  # fmt: skip
def test_a_script_that_may_use_the_compiler_imports_it_itself(
    tmp_path: Path, line: str, is_ahead: bool
) -> None:
    text = f"import os, re, sys, torch\ndef main(parser, net):\n    {line}\n"
    assert (COMPILER in _read(tmp_path, text)) == is_ahead


def test_a_script_whose_arguments_ask_for_the_compiler_imports_it_itself(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    assert modules_ahead(script, [tmp_path], ["--lr", "1"]) == [COMPILER]
    assert not modules_ahead(script, [tmp_path], ["--torch_compile", "1"])
