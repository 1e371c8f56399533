"""What torchtitan's selective recompute keeps of a layer: what attention and every second product give."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cost.again import flops_again
from meshwright.cost.second_products import second_products
from meshwright.cost.stacks import SOFTWARE
from meshwright.cost.work import PartWork, Product
from meshwright.spec.model import FeedForward, Mixture
from meshwright.spec.plan import Recompute
from meshwright.spec.report import LineName
from tests.cost.cost_examples import llama
from tests.cost.test_repeated import DENSE, LAYERS, costs, kept

ATTENTION = 2 * (1024 + 1024 + 1024 + 512) + 4 * 8  # input, output, queries and values; 8 heads' log-sum-exp


# Most is there at the loss, when every layer has what it keeps.
LARGE = llama(width=1024, hidden=4096, layers=LAYERS, vocab=65536, heads=8)
SHARED = FeedForward(width=1024, hidden=512, norm=None)


def of_experts(shared=None):
    mixture = Mixture(width=1024, hidden=512, experts=8, top_k=2, norm=LARGE.layers[0].transform.norm, shared=shared)
    return replace(LARGE, layers=tuple(replace(layer, transform=mixture) for layer in LARGE.layers))


@pytest.mark.parametrize("name", ["torch-2024", "torch-2025", "torch-2025-compiled"])
def test_a_dense_layer_keeps_every_second_product(name: str) -> None:
    """Of a gated feed-forward one branch and what the last product gives."""
    assert kept(DENSE, name, Recompute.SELECTIVE) == pytest.approx(ATTENTION + 2 * (4096 + 1024), rel=0.06)


@pytest.mark.parametrize("name", ["torch-2025", "torch-2025-compiled"])
def test_products_of_experts_run_again(name: str) -> None:
    """torch's list of costly operators has no grouped product, and the router's runs again: a mixture keeps nothing."""
    bare, beside = (kept(of_experts(shared), name, Recompute.SELECTIVE) for shared in (None, SHARED))
    dense = kept(LARGE, name, Recompute.SELECTIVE)
    assert dense - bare == pytest.approx(2 * (4096 + 1024))
    assert beside - bare == pytest.approx(2 * (512 + 1024))


def test_experts_take_longer_to_run_again_than_the_products_of_attention() -> None:
    again = {}
    for told, model in (("dense", DENSE), ("experts", of_experts())):
        again[told] = float(costs(model, "torch-2025", Recompute.SELECTIVE).parts[LineName.RECOMPUTE][0])
    assert again["experts"] > 0.5 * again["dense"] > 0.0


def test_products_are_counted_from_the_first_of_the_layer() -> None:
    """Even ones of a layer are kept: with key and value in one entry, one of both; the router's is not counted."""
    names = [("query",), ("key", "value"), ("output",)]
    products = tuple(_product(of) for of in names)
    attention = PartWork(name="attention", parameters=0.0, products=products, score_flops=100.0)
    router, shared = _product(()), _product(("shared.gate", "shared.up"))
    mixture = PartWork(name="mixture", parameters=0.0, products=(router, shared, _product(("shared.down",))))
    chosen, again = second_products((attention, mixture))
    assert [one.of for one in chosen] == [("query",), ("key", "value"), ("shared.gate", "shared.up"), ("shared.down",)]
    assert [one.count for one in chosen] == [1.0, 1.0, 1.0, 1.0]
    assert [[one.of for one in part] for _, part in again] == [[names[1], names[2]], [(), ("shared.gate", "shared.up")]]
    assert sum(flops_again((attention, mixture), SOFTWARE["torch-2025"])[2]) == 4 * 2.0  # no scores among them


def _product(of: tuple[str, ...]) -> Product:
    return Product(m=1.0, n=1.0, k=1.0, count=float(max(len(of), 1)), of=of)
