"""What a process does only once is done before others wait for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from meshwright.nn import Decoder
from meshwright.run.elastic.rehearsal import rehearse
from meshwright.spec.plan import Sharding
from meshwright.train.build import prepare_corpus
from tests.run.runs import design
from tests.support.designs import Layout


@pytest.mark.parametrize(
    ("layout", "passes"),
    [
        (Layout(shard=4, sharding=Sharding.PARAMETERS, batch=12), True),
        (Layout(pipeline=2, replicate=2, batch=12), True),
        (Layout(tensor=2, pipeline=2, sequence_parallel=True, batch=12), False),
    ],
    ids=str,
)
def test_a_rank_is_laid_and_steps_alone(
    layout: Layout, passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, places, forward = design(tmp_path, layout, steps=3), list[tuple[int, int]](), Decoder.forward

    def noted(part: Decoder, x: Tensor, **options: Any) -> Tensor:
        places.append((dist.get_rank(), dist.get_world_size()))
        return forward(part, x, **options)

    monkeypatch.setattr(Decoder, "forward", noted)
    corpus = prepare_corpus(made, cache=tmp_path / "cache")
    for _ in range(2):
        rehearse(made, rank=3, corpus=corpus)
        assert not dist.is_initialized()
    assert set(places) == ({(3, 4)} if passes else set())
