"""What a mixture does beside its experts' products, against figures counted by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from meshwright.cost.expert_handling import ExpertHandling
from meshwright.cost.mixture_work import MIXTURE
from meshwright.cost.operators import block_work
from meshwright.cost.stacks import SOFTWARE
from meshwright.cost.work import PartWork, Product, Sizes
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.model import Activation, Layer, Mixture, Norm
from meshwright.spec.routing import Routing

TOKENS, WIDTH, HIDDEN, CHOSEN = 4096, 2048, 1024, 8
PLAIN = Mixture(width=WIDTH, hidden=HIDDEN, experts=64, top_k=CHOSEN, norm=Norm(width=WIDTH))
CLAMPED = replace(PLAIN, activation=Activation.CLAMPED_SWIGLU)
ONE = np.ones(1)


def work(part: Mixture = PLAIN, **settings: object) -> PartWork:
    """Of two bytes an element on one of eight ranks that hold different experts."""
    laid = Sizes(
        batch=ONE,
        sequence=float(TOKENS),
        tensor=ONE,
        split=ONE,
        itemsize=2.0 * ONE,
        expert=8.0 * ONE,
        expert_tensor=ONE,
        **settings,
    )
    return next(each for each in block_work(Layer(mixer=None, transform=part), laid) if each.name == MIXTURE)


def more(part: Mixture = PLAIN, **settings: object) -> tuple[float, float]:
    """Bytes of a row that an expert multiplies, forward and backward, that `settings` add."""
    plain, changed = work(part), work(part, **settings)
    rows = TOKENS * CHOSEN
    return (
        float((changed.traffic - plain.traffic)[0]) / rows,
        float((changed.backward_traffic - plain.backward_traffic)[0]) / rows,
    )


def test_a_clamp_of_its_own_reads_and_writes_both_halves_and_joins_them() -> None:
    """Forward 2 (1 + 1) + (2 + 2) elements a hidden feature; backward 2 (2 + 1) + (2 + 2)."""
    assert more(CLAMPED, experts=ExpertHandling(clamps_apart=True)) == (8 * 2 * HIDDEN, 10 * 2 * HIDDEN)
    assert more(experts=ExpertHandling(clamps_apart=True)) == (0, 0)


def test_fused_kernels_read_again_only_what_was_activated() -> None:
    """5 and 10 elements a hidden feature are 0 and 2."""
    assert more(experts=ExpertHandling(fused=True)) == (-5 * 2 * HIDDEN, -8 * 2 * HIDDEN)


@pytest.mark.parametrize(("itemsize", "elements"), [(1.0, 4), (2.0, 0)])
def test_rows_are_copied_to_be_padded_and_back_where_products_are_narrow(itemsize: float, elements: int) -> None:
    """Read and written before the first product and after the last: gradients go the same ways."""
    each = elements * 2 * WIDTH
    assert more(experts=ExpertHandling(pads=True), product_itemsize=itemsize * ONE) == (each, each)


def test_places_at_experts_are_filled_by_products_with_masks() -> None:
    """4,096 tokens to 64 experts of 640 places: a mask of 4,096 by 40,960, there without a gradient of the mask."""
    part, masks = replace(PLAIN, routing=Routing(capacity=1.25)), ExpertHandling(masks=True)
    there, back = [product for product in work(part, experts=masks).products if float(np.max(product.k)) > WIDTH]
    places = 1.25 * TOKENS * CHOSEN
    assert float(there.flops[0]) == float(back.flops[0]) == 2 * TOKENS * places * WIDTH
    assert (there.given, back.given) == (True, False)
    multiplied = [float(np.sum(each.m * each.together)) for each in work(part, experts=masks).products[1:3]]
    assert multiplied == [places, places]
    assert len(work(part).products) == len(work(experts=masks).products) == 3


@pytest.mark.parametrize("rows", [512, 1024, 2048, 5120])
@pytest.mark.parametrize("experts", [1, 2, 8])
def test_a_block_that_two_experts_share_is_multiplied_for_both(rows: int, experts: int) -> None:
    """The blocks of 512 rows that experts touch whose rows lie one behind the other in whole blocks, in the mean over
    all places where they meet; an expert alone has nobody to share one with."""
    touched = 0
    for moved in range(512):
        met = [0, *(expert * rows + moved for expert in range(1, experts)), experts * rows]
        touched += sum(-(-stop // 512) - start // 512 for start, stop in pairwise(met))
    product = Product(m=float(rows) * ONE, n=ONE, k=ONE, together=float(experts), block=512)
    assert experts * float(product.multiplied_rows(1)[0]) == pytest.approx(512 * touched / 512)
    whole = replace(product, m=2.0 * rows * ONE)
    assert experts * float(whole.multiplied_rows(2)[0]) == pytest.approx(2 * 512 * touched / 512)


def test_the_host_of_a_mixture_does_what_is_not_captured() -> None:
    """A dense layer is 1 ms, of which attention is 20 / 26 and 1.79 ms of the profile; a mixture is 4.77 there."""
    scale = 20 / 26 / 1.79
    found = {
        graphs: SOFTWARE[f"megatron-bridge{graphs}"].host_seconds(DeviceKind.CUDA, mixed=True) * 1e3
        for graphs in ("", "-router-graphs", "-layer-graphs", "-step-graph")
    }
    assert found == pytest.approx(
        {
            "": 20 / 26 + 4.77 * scale,
            "-router-graphs": 20 / 26 + 3.05 * scale,
            "-layer-graphs": 3.05 * scale,
            "-step-graph": 0.0,
        }
    )
    assert SOFTWARE["megatron-bridge"].host_seconds(DeviceKind.CUDA, mixed=False) == 1e-3
