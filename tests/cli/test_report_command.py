"""`hpc-ddp report` as typed, and its page in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import call_here
from tests.waiting import LIMIT_S

REPO = Path(__file__).parents[2]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
LOOK = """<iframe src="{page}" style="width:{width}px;height:800px;border:0"></iframe>
<script>
onload = () => {{
  const page = document.querySelector("iframe").contentDocument;
  const area = page.querySelector(".area"), box = area.getBoundingClientRect();
  const at = {{ clientX: box.left + box.width / 2, clientY: box.top + 9, bubbles: true }};
  area.dispatchEvent(new (page.defaultView.PointerEvent)("pointermove", at));
  const number = page.querySelector(".last").textContent;
  const {{ scrollWidth, clientWidth }} = page.documentElement;
  const told = {{ scrollWidth, clientWidth, number }};
  document.body.innerHTML = "<pre>@" + JSON.stringify(told) + "@</pre>";
}};
</script>
"""


def call(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return call_here(folder, {**os.environ, "HPC_DDP_RUNS": str(folder / "runs")}, *words)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was rendered, and some steps of it, written by hand."""
    (tmp_path / "train.py").write_text("print('hello')\n")
    told = json.loads(
        call(tmp_path, "render", "--json", "train.py", "--a-very-long-option" * 9).stdout
    )
    lines: list[dict[str, Any]] = [
        {"event": "started", "nodes": ["n" * 40]},
        {"event": "training", "step": 0},
    ]
    lines += [{"event": "metrics", "step": step, "loss": 1 / step} for step in range(1, 200)]
    with open(Path(told["run"], "journal", "all.jsonl"), "w") as file:
        for i, line in enumerate(lines):
            file.write(json.dumps({"time": 1.79e9 + i, "attempt": 0, **line}) + "\n")
    return Path(told["run"])


def test_the_page_and_where_it_is_written(tmp_path: Path, run: Path) -> None:
    done = call(tmp_path, "report", "train")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{run / 'report.html'}\n"
    assert "<title>train" in (run / "report.html").read_text()


def test_what_can_not_be_reported(tmp_path: Path, run: Path) -> None:
    done = call(tmp_path, "report", "train", "-o", "gone/page.html")
    assert (done.returncode, done.stdout) == (1, "")
    assert "gone/page.html" in done.stderr
    assert "Traceback" not in done.stderr
    assert call(tmp_path, "report", "nope").returncode == 2


@pytest.mark.more
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser(tmp_path: Path, run: Path, width: int) -> None:
    """Nothing is wider than the screen, no script fails, and the pointer finds values."""
    if BROWSER is None:
        pytest.skip("no chromium here")
    page = call(tmp_path, "report", "train").stdout.strip()
    (tmp_path / "look.html").write_text(LOOK.format(page=f"file://{page}", width=width))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-web-security"]
    options += ["--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}"]
    options += ["--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom"]
    argv = [BROWSER, *options, f"file://{tmp_path / 'look.html'}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S)
    assert "CONSOLE" not in done.stderr, done.stderr
    told = json.loads(done.stdout.split("@")[1])
    assert width - 20 < told["scrollWidth"] == told["clientWidth"]
    assert re.fullmatch(r"0.0\d* at step 1?\d\d", told["number"])
