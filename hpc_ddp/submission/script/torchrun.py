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
# A first node that imports torch from a cold disk is waited for as long as any other one.
RENDEZVOUS = "join_timeout={wait_s},read_timeout={wait_s}"
WAIT_S = 600
# Lines of a node's own may copy data to it. One where they fail ends the others by itself.
WAIT_FOR_SETUP_S = 3600
# How long an elastic start waits for late nodes, in s; after a loss it is `agent.LAST_CALL_S`.
LATE_S = 120


def torchrun_options(spec: JobSpec) -> list[str]:
    """Return torchrun's options, with ``$`` variables that are known only in the job.

    Unless the job is elastic, min = max nodes: a late node must not be shut out, nor a world of
    fewer nodes start.
    """
    least, late = "", ""
    if spec.elastic:
        least, late = "$HPC_DDP_LEAST_NODES:", f",last_call_timeout={LATE_S}"
    values = {
        "nnodes": f"{least}$HPC_DDP_NNODES",
        "workers": spec.workers_per_node,
        "conf": RENDEZVOUS.format(wait_s=WAIT_FOR_SETUP_S if spec.node_setup else WAIT_S) + late,
        "restarts": spec.restarts,
    }
    return [*(word.format(**values) for word in TORCHRUN_OPTIONS), *spec.torchrun]
