"""How a worker ends when something goes wrong: say it once, and be gone.

An ordinary exit would wait for the process group, and that for peers which may never come.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType

from hpc_ddp.run.errors import HpcDdpError
from hpc_ddp.run.journal import Journal
from hpc_ddp.training.checkpoint import SupersededError
from hpc_ddp.training.facts import DistInfo


class FailureHook:
    """A ``sys.excepthook`` that journals, prints, and ends the process without a teardown.

    `journal` is None until the run's folder is known. The exit code is 1, or an HpcDdpError's
    own. ``sys.exit(n)`` does not pass here and keeps its code.
    """

    def __init__(self, info: DistInfo, node: str) -> None:
        self.journal: Journal | None = None
        self._info, self._node = info, node

    def install(self) -> None:
        sys.excepthook = self

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        code = 1
        try:
            self._journal(error)
            code = self._show(kind, error, trace)
            _tell_torchrun(error)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def _journal(self, error: BaseException) -> None:
        # A superseded attempt writes nothing: the files belong to its successor.
        if self.journal is None or isinstance(error, SupersededError):
            return
        lines = traceback.format_exception(error)
        self.journal.write(
            "failed",
            rank=self._info.rank,
            node=self._node,
            error=lines[-1].strip(),
            traceback="".join(lines),
        )

    def _show(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> int:
        if not isinstance(error, HpcDdpError):
            sys.__excepthook__(kind, error, trace)
            return 1
        hint = f"\nhint: {error.hint}" if error.hint else ""
        print(f"error: {error.message}{hint}", file=sys.stderr)
        return error.exit_code


def _tell_torchrun(error: BaseException) -> None:
    """Leave the error where torchrun's own summary of a failure finds it."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise error
    except BaseException as raised:
        get_error_handler().record_exception(raised)
