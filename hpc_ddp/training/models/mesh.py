"""The place of a rank: data, tensor and pipeline parallel ranks, as pure numbers."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_ddp.core.errors import UsageError


@dataclass(frozen=True)
class ParallelDims:
    """The ranks as an array of shape (`pp`, `dp`, `tp`), whose last index changes fastest; and the
    place of this `rank` in it.

    So the ranks of a tensor parallel group, which talk most, are neighbours on a node. A stage is
    one plane of the array: its `dp` x `tp` ranks have the same part of the model. `dp` is
    `replicas` x `shards`, where the shards of one replica are neighbours.
    """

    rank: int = 0
    world_size: int = 1
    tp: int = 1
    pp: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        """Raise UsageError for sizes whose product does not divide the number of ranks."""
        product = self.tp * self.pp * self.replicas
        if self.world_size % product:
            replicas = f", replicas={self.replicas}" if self.replicas > 1 else ""
            raise UsageError(
                f"tp={self.tp} and pp={self.pp}{replicas} with {self.world_size} workers; accepted:"
                " sizes whose product divides the number of workers",
                hint=f"start {product} workers, or a multiple of it",
            )

    @property
    def dp(self) -> int:
        """The number of copies of the model, each of which is trained on samples of its own."""
        return self.world_size // (self.tp * self.pp)

    @property
    def shards(self) -> int:
        """The number of data parallel ranks that share one replica of a sharded model."""
        return self.dp // self.replicas

    @property
    def tp_rank(self) -> int:
        """This rank's number among the ranks that share its layers, from 0."""
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        """The number of this rank's copy of the model, from 0."""
        return self.rank // self.tp % self.dp

    @property
    def pp_rank(self) -> int:
        """The number of this rank's stage, from 0."""
        return self.rank // self.stage_size

    @property
    def stage_size(self) -> int:
        """The number of ranks of a stage."""
        return self.dp * self.tp

    @property
    def stage_rank(self) -> int:
        """This rank's number in its stage, from 0; rank 0 of the stage writes the state that all of
        the stage's ranks have alike."""
        return self.rank % self.stage_size

    @property
    def stage_first(self) -> int:
        """The first rank of this rank's stage, counted over all ranks."""
        return self.pp_rank * self.stage_size

    @property
    def counts(self) -> bool:
        """Whether this rank reports results. Ranks of a tensor or pipeline parallel group see the
        same samples; only tp rank 0 of the last stage reports."""
        return self.tp_rank == 0 and self.pp_rank == self.pp - 1

    @property
    def stream(self) -> int:
        """The number that makes this rank's random generators differ from those of other ranks. The
        ranks of a tensor parallel group have one number, so that they compute the layers that they
        hold in common alike."""
        return self.pp_rank * self.dp + self.dp_rank
