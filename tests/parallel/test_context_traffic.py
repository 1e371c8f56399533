"""Bytes that context ranks exchange in a step are those the cost model prices, under the line it predicts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist

from meshwright.cost.operators import block_work
from meshwright.cost.work import Sizes
from meshwright.parallel import build_mesh, lay
from meshwright.spec.cluster import Precision
from meshwright.spec.exchange import Exchange, ExchangeKind
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design, Plan, Sharding
from meshwright.spec.report import LineName
from meshwright.train.observe.collectives import CollectiveTimer
from tests.parallel.parity_cases import batch
from tests.support import models
from tests.support.designs import Layout, design
from tests.support.pool import Pool

ITEMSIZE = {Precision.FP64: 8.0, Precision.BF16: 2.0}


def exchanged(design: Design) -> dict[str, int]:
    """Bytes that this rank sends of each kind of context collective in one step: of a gather or a scatter, those of
    the whole tensor, as the cost model counts them. Nothing else moves under that line."""
    mesh = build_mesh(design.plan, device_type="cpu")
    laid = lay(design, mesh, device="cpu", seed=1)
    tokens, targets, _ = batch(design.plan.batch // design.plan.data, design.plan.sequence_length, design.model.vocab)
    timer = CollectiveTimer(design.plan)
    with timer.watching():
        laid.step(tokens, targets)
    dist.barrier()
    found: Counter[str] = Counter()
    for call in timer.calls:
        if call.line is LineName.CONTEXT:
            found[call.operation] += call.bytes
    assert found.pop("recv", 0) == found["send"]
    return dict(found)


def priced(model: ModelSpec, plan: Plan) -> tuple[float, float, float]:
    """Bytes of one rank's keys and values and of what it trades for heads, of all layers and microbatches of a step,
    and how often over the gradients of keys and values are as large."""
    one, itemsize = np.ones(1), ITEMSIZE[plan.first_group.precision]
    sizes = Sizes(
        batch=plan.microbatch * one,
        sequence=float(plan.sequence_length),
        tensor=plan.tensor * one,
        split=one,
        itemsize=itemsize * one,
        context=plan.context * one,
        inner=plan.exchange.inner * one,
    )
    parts = [part for block in model.blocks for part in block_work(block, sizes)]
    keys, heads = (sum(float(np.sum(getattr(part, name))) for part in parts) for name in ("circulated", "traded"))
    count = plan.schedule.microbatches
    return count * keys, count * heads, max(4.0 / itemsize, 1.0)


@pytest.mark.parametrize("precision", [Precision.FP64, Precision.BF16])
@pytest.mark.parametrize("kind", ["tiny", "latent"])
def test_a_ring_sends_keys_and_values_twice_and_their_gradients(pool: Pool, kind: str, precision: Precision) -> None:
    layout = Layout(context=4, batch=2, precision=precision)
    entry = design(models.all_models()[kind], layout)
    keys, _, gradients = priced(entry.model, entry.plan)
    for found in pool.run(exchanged, entry, ranks=4):
        assert found == {"send": 3 * keys * (2 + gradients)}


@pytest.mark.parametrize("precision", [Precision.FP64, Precision.BF16])
def test_a_gather_brings_keys_and_values_twice_and_scatters_their_gradients(pool: Pool, precision: Precision) -> None:
    exchange = Exchange(kind=ExchangeKind.GATHER)
    entry = design(models.model(), Layout(context=2, tensor=2, batch=2, precision=precision, exchange=exchange))
    keys, _, gradients = priced(entry.model, entry.plan)
    for found in pool.run(exchanged, entry, ranks=4):
        assert found == {"all_gather": 2 * 2 * keys, "all_to_all": 2 * keys * gradients}


def test_trading_heads_moves_queries_keys_values_and_outputs_both_ways(pool: Pool) -> None:
    model = models.model(layer=replace(models.model().layers[0], mixer=models.attention(kv_heads=4)))
    entry = design(model, Layout(context=4, batch=2, exchange=Exchange(inner=2)))
    keys, heads, gradients = priced(entry.model, entry.plan)
    for found in pool.run(exchanged, entry, ranks=4):
        assert found == {"all_to_all": 2 * heads, "send": keys * (2 + gradients)}


@pytest.mark.parametrize("changes", [{}, {"shared_key_value": True}], ids=["few", "shared"])
def test_copies_of_few_key_heads_are_traded(pool: Pool, changes: dict[str, bool]) -> None:
    """Two heads of keys for four ranks; and keys that are values too, which are turned on the way."""
    model = models.model(layer=replace(models.model().layers[0], mixer=models.attention(**changes)))
    entry = design(model, Layout(context=4, batch=2, exchange=Exchange(inner=4)))
    _, heads, _ = priced(entry.model, entry.plan)
    for found in pool.run(exchanged, entry, ranks=4):
        assert found == {"all_to_all": 2 * heads}


def test_what_is_sharded_over_context_is_filed_as_parameters(pool: Pool) -> None:
    """With no shard axis parameters are gathered by the ranks of the context axis: that is no context exchange."""
    entry = design(models.model(), Layout(context=2, sharding=Sharding.PARAMETERS, batch=2))
    keys, _, gradients = priced(entry.model, entry.plan)
    for found in pool.run(exchanged, entry, ranks=2):
        assert found == {"send": keys * (2 + gradients)}
