"""Tensor ranks on a square or a cube give what one device gives, in float64 to 1e-9."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.parallel.grid import misplaced
from meshwright.spec.optimizer import Muon, OptimizerSpec
from meshwright.spec.plan import Design, Recompute, Sharding, TensorGrid
from tests.parallel import parity_cases
from tests.parallel.parity_cases import Documents
from tests.support import models
from tests.support.designs import SEQUENCE, Layout, design
from tests.support.pool import Pool
from tests.support.sampled import sampled

SQUARE = Layout(tensor=4, microbatch=2, batch=4, tensor_grid=TensorGrid.SQUARE)
CUBE = Layout(tensor=8, microbatch=4, batch=8, tensor_grid=TensorGrid.CUBE)
ADAMW = OptimizerSpec(learning_rate=1e-2, clip_norm=0.5)
# Grouped queries and gates; layer norms, biases, learned positions and a tied table; norms that ranks share or do not.
QUICK = (
    ("tiny", SQUARE, ADAMW),
    ("gpt", replace(SQUARE, recompute=Recompute.FULL), ADAMW),
    ("full_norm", SQUARE, Muon(learning_rate=1e-2, clip_norm=0.5)),
    ("tied", replace(SQUARE, pipeline=2, recompute=Recompute.SELECTIVE), ADAMW),
    ("head_norm", replace(SQUARE, shard=2, sharding=Sharding.PARAMETERS), ADAMW),
    ("biases", replace(SQUARE, replicate=2, batch=8), ADAMW),
    ("tiny", CUBE, ADAMW),
    pytest.param("gpt", replace(CUBE, recompute=Recompute.FULL), ADAMW, marks=pytest.mark.slow),
)
DENSE = tuple(kind for kind in models.all_models() if not kind.startswith(("mixture", "latent")))


def asked(kind: str, layout: Layout, optimizer: OptimizerSpec | Muon) -> Design:
    entry = design(models.all_models()[kind], layout, z_loss=1e-3)
    return replace(entry, job=replace(entry.job, optimizer=optimizer))


def check(pool: Pool, kind: str, layout: Layout, optimizer: OptimizerSpec | Muon) -> None:
    entry = asked(kind, layout, optimizer)
    sizes = {"count": layout.batch, "length": SEQUENCE, "z_loss": 1e-3}
    expected = parity_cases.one_device(entry.model, **sizes, optimizer=optimizer, packed=Documents.TWO)
    found = pool.run(parity_cases.one_rank, entry, Documents.TWO, ranks=layout.ranks)
    parity_cases.compare(expected, found)


@pytest.mark.parametrize(
    ("kind", "layout", "optimizer"), sampled(QUICK, quick=4), ids=lambda value: getattr(value, "kind", str(value))
)
def test_a_grid_gives_what_one_device_gives(
    pool: Pool, kind: str, layout: Layout, optimizer: OptimizerSpec | Muon
) -> None:
    check(pool, kind, layout, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [SQUARE, replace(CUBE, recompute=Recompute.SELECTIVE)], ids=str)
@pytest.mark.parametrize("kind", DENSE)
def test_so_does_every_dense_model(pool: Pool, kind: str, layout: Layout) -> None:
    check(pool, kind, layout, ADAMW)


@pytest.mark.parametrize(
    ("kind", "layout", "says"),
    [
        ("tiny", replace(SQUARE, tensor=8), "8 tensor ranks are no square"),
        ("tiny", replace(SQUARE, microbatch=1), "1 sequences of a microbatch do not divide in 2"),
        ("tiny", replace(SQUARE, sequence_parallel=True), "takes whole sequences"),
        ("mixture", SQUARE, "only attention and feed-forwards"),
        ("tiny", replace(CUBE, tensor=27, microbatch=9), "does not divide vocabulary of 64 in 9"),
    ],
)
def test_what_does_not_lie_on_a_grid_is_refused(kind: str, layout: Layout, says: str) -> None:
    assert any(says in problem.what for problem in misplaced(asked(kind, layout, ADAMW)))
