"""The options with which each node starts torchrun: rendezvous, workers, restarts."""

from __future__ import annotations

from hpc_ddp.core.job.options import JobSpec

# torchrun's options; the variables are exported by `batch begin`, or by the local back-end.
TORCHRUN_OPTIONS = (
    "--nnodes={nnodes}",
    "--nproc-per-node={workers}",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=$HPC_DDP_HEAD:$HPC_DDP_PORT",
    "--rdzv-id=$HPC_DDP_RDZV_ID",
    "--rdzv-conf={conf}",
    "--max-restarts={restarts}",
)
RENDEZVOUS = "join_timeout={wait_s},read_timeout={wait_s}"
# Nodes wait so long for each other: one may import torch from a cold disk.
WAIT_S = 600
# With set-up lines of nodes, which may copy data. Where they fail, their node ends the others.
WAIT_FOR_SETUP_S = 3600
# Seconds for which an elastic start waits for late nodes; after a loss these are fewer
# (`elastic_rendezvous.LAST_CALL_S`).
LATE_S = 120


def torchrun_options(spec: JobSpec) -> list[str]:
    """Return torchrun's options, a word each, with ``$`` variables that are known only in the job;
    the user's raw options come last.

    Unless the job is elastic, only one number of nodes is accepted: a late node must not be shut
    out, and a world of fewer nodes must not start.
    """
    least, late = "", ""  # of an elastic job: the least number of nodes, the wait for late ones
    if spec.elastic:
        least, late = "$HPC_DDP_LEAST_NODES:", f",last_call_timeout={LATE_S}"
    values = {
        "nnodes": f"{least}$HPC_DDP_NNODES",
        "workers": spec.workers_per_node,
        "conf": RENDEZVOUS.format(wait_s=WAIT_FOR_SETUP_S if spec.node_setup else WAIT_S) + late,
        "restarts": spec.restarts,
    }
    return [*(word.format(**values) for word in TORCHRUN_OPTIONS), *spec.torchrun]
