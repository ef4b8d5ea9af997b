"""Runs and checkpoints on disk, for the tests of `core`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpc_ddp.core.checkpoints import facts_of, manifest_crc
from hpc_ddp.core.run_folder import RunFolder


def write_checkpoint(folder: Path, name: str, **values: Any) -> Path:
    checkpoint = folder / name
    checkpoint.mkdir()
    files = {}
    for file in ("a", "b", "c"):
        (checkpoint / file).write_bytes(file.encode() * 10)
        files[file] = vars(facts_of(checkpoint / file))
    manifest = {"files": files, "world_size": 2, **values}
    manifest["crc32"] = manifest_crc(manifest)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return checkpoint


NESTED = "[" * 100_000
BROKEN = {"nested": NESTED.encode(), "no UTF-8": b"\xff\xfe", "torn": b'{"a": ', "no object": b"7"}


def make_run(root: Path, name: str = "n", run_id: str = "20260101-000000-aa") -> RunFolder:
    run = RunFolder(root / name / run_id).make()
    run.job_json.write_text("{}")
    return run
