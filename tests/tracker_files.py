"""What the trackers' clients have written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path


def records_of(path: Path) -> Iterator[bytes]:
    """Yield the records of a .wandb file: LevelDB's log format, with a header of its own."""
    content, record = path.read_bytes(), b""
    position, block, header = 7, 32768, 7
    while position + header <= len(content):
        if block - position % block < header:
            position += block - position % block
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        position += header
        record += content[position : position + length]
        position += length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def recorded_offline(run: Path) -> dict[str, list[int]]:
    """Return the steps in the .wandb files of a run by W&B's id, in the order of the attempts."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    steps: dict[str, list[int]] = defaultdict(list)
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        id = path.stem.removeprefix("run-")
        for content in records_of(path):
            record = Record.FromString(content)
            if record.WhichOneof("record_type") == "run":
                assert record.run.run_id == id
            if record.WhichOneof("record_type") == "history":
                steps[id].append(record.history.step.num)
    return steps
