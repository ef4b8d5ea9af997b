"""Slurm's description of a cluster is parsed."""

from __future__ import annotations

import pytest

from hpc_ddp.submission.site_detect.cluster import gpus_of


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", ()),
        ("gpu:4", (("", 4),)),
        ("gpu:a100:4(S:0-1)", (("a100", 4),)),
        ("gpu:a100:2(S:0,1),gpu:a100_3g.20gb:4(S:1),nvme:1", (("a100", 2), ("a100_3g.20gb", 4))),
        ("craynetwork:4,gpu:h100:8(IDX:0-7)", (("h100", 8),)),
        ("gpu:no_consume:2,shard:8", (("", 2),)),
        ("gpu:gh200:no_consume:4", (("gh200", 4),)),
        ("gpu", (("", 1),)),
        ("gpumem:80,mps:400", ()),
    ],
)
def test_gpus_of_a_node_are_parsed(gres: str, gpus: tuple[tuple[str, int], ...]) -> None:
    assert gpus_of(gres) == gpus
