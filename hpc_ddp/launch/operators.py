"""What the operators of a cluster have from hpc-ddp: a mark on its jobs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hpc_ddp import __version__


def comment_pairs(options: Sequence[str]) -> list[tuple[str, str]]:
    """Return the comment by which operators find the jobs of hpc-ddp, as options of sbatch.

    None where the user has one, among the raw `options` or in sbatch's variable: some sites charge,
    or decide, by a job's comment.
    """
    named = any(option.partition("=")[0] == "--comment" for option in options)
    return (
        [] if named or "SBATCH_COMMENT" in os.environ else [("comment", f"hpc-ddp/{__version__}")]
    )
