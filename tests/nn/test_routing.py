"""Routing alone: who is chosen, what it weighs, who is dropped, and what evens the load."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from meshwright.catalog.model_ranges import model_problems
from meshwright.nn.context import Context
from meshwright.nn.grouped import grouped_product
from meshwright.nn.mixture import MixtureOfExperts
from meshwright.nn.routing import counts_by_sequence, route
from meshwright.spec.model import Choice, Layer, Mixture, Routing, Score, Weighing
from tests.support import models

TOKENS = 64


def outputs(experts: int = 8) -> Tensor:
    return torch.randn(TOKENS, experts, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def spec(routing: Routing, **changes: object) -> Mixture:
    return models.mixture(experts=8, routing=routing, **changes)


def mixture(part: Mixture) -> MixtureOfExperts:
    module = MixtureOfExperts(part).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return module


def hidden(sequences: int = 4, length: int = 16) -> Tensor:
    return torch.randn(sequences, length, models.WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def test_sigmoid_scores_are_weighed_by_their_share_and_scaled() -> None:
    routing = Routing(score=Score.SIGMOID, scale=2.5)
    found = route(outputs(), spec(routing), bias=None, dtype=torch.float64)
    scores = outputs().sigmoid().gather(1, found.chosen)
    torch.testing.assert_close(found.weights, 2.5 * scores / scores.sum(1, keepdim=True))
    torch.testing.assert_close(found.chosen, outputs().topk(2).indices)


def test_scores_themselves_weigh_where_asked() -> None:
    found = route(outputs(), spec(Routing(weighing=Weighing.SCORE)), bias=None, dtype=torch.float64)
    torch.testing.assert_close(found.weights, outputs().softmax(1).gather(1, found.chosen))


def test_a_bias_chooses_and_does_not_weigh() -> None:
    bias = torch.zeros(8, dtype=torch.float64)
    bias[5] = 10.0
    found = route(outputs(), spec(Routing(bias_rate=0.1)), bias=bias, dtype=torch.float64)
    assert (found.chosen == 5).any(dim=1).all()
    scores = outputs().softmax(1).gather(1, found.chosen)
    torch.testing.assert_close(found.weights, scores / scores.sum(1, keepdim=True))


def test_tokens_stay_in_the_groups_that_score_most() -> None:
    routing = Routing(score=Score.SIGMOID, groups=4, chosen_groups=2)
    found = route(outputs(), spec(routing, top_k=3), bias=None, dtype=torch.float64)
    best = outputs().sigmoid().view(TOKENS, 4, 2).sum(dim=2).topk(2).indices
    assert all(set((row // 2).tolist()) <= set(some.tolist()) for row, some in zip(found.chosen, best, strict=True))
    assert all(len(set(row.tolist())) == 3 for row in found.chosen)


def test_every_prototype_chooses_its_best_by_a_softmax_of_its_own() -> None:
    found = route(outputs(), spec(Routing(choice=Choice.PROTOTYPES)), bias=None, dtype=torch.float64)
    halves = outputs().view(TOKENS, 2, 4).softmax(dim=2)
    torch.testing.assert_close(found.weights, halves.amax(dim=2))
    torch.testing.assert_close(found.chosen, halves.argmax(dim=2) + torch.tensor([0, 4]))


def test_capacity_keeps_the_first_of_each_sequence() -> None:
    part = spec(Routing(capacity=0.5))
    module, x = mixture(part), hidden()
    routed = module._route(x, Context())
    assert routed.kept is not None
    room = math.ceil(0.5 * 16 * 2 / 8)
    seen: dict[tuple[int, int], int] = {}
    for place, (row, kept) in enumerate(zip(routed.chosen.tolist(), routed.kept.tolist(), strict=True)):
        for expert, is_kept in zip(row, kept, strict=True):
            key = (place // 16, expert)
            seen[key] = seen.get(key, 0) + 1
            assert is_kept == (seen[key] <= room)
    assert not routed.kept.all()


def test_what_is_dropped_adds_nothing_and_earlier_tokens_do_not_see_later_ones() -> None:
    part = spec(Routing(capacity=0.5))
    module, x = mixture(part), hidden()
    whole = module(x, Context())
    torch.testing.assert_close(module(x[:, :16], Context()), whole)
    changed = x.clone()
    changed[:, 10:] = 1.0
    torch.testing.assert_close(module(changed, Context())[:, :10], whole[:, :10])
    routed = module._route(x, Context())
    assert routed.kept is not None
    lost = ~routed.kept.any(dim=1)
    assert lost.any()
    assert whole.flatten(0, 1)[lost].abs().max() == 0.0


def test_capacity_for_all_drops_nothing() -> None:
    module, x = mixture(spec(Routing(capacity=4.0))), hidden()
    plain = mixture(spec(Routing()))
    torch.testing.assert_close(module(x, Context()), plain(x, Context()))


def test_the_balance_loss_is_what_its_formula_says() -> None:
    part = spec(Routing(balance_loss=0.3))
    module, x = mixture(part), hidden()
    module.each = 0.25
    module(x, Context()).sum().backward()
    found = module.router.weight.grad
    assert found is not None
    plain = mixture(spec(Routing()))
    plain(x, Context()).sum().backward()
    scores = plain.router(x).softmax(dim=2)
    share = counts_by_sequence(scores.topk(2).indices, experts=8) / (16 * 2)
    loss = 0.3 * 8 * (share * scores.mean(dim=1)).sum() / 4
    loss.backward()
    torch.testing.assert_close(found, plain.router.weight.grad)


def test_biases_even_the_load_of_a_skewed_router() -> None:
    """Weights of the router are far from even; nothing but biases moves."""
    rate, module = 0.02, mixture(spec(Routing(score=Score.SIGMOID, bias_rate=0.02)))
    assert module.balance is not None
    x = hidden(16, 64) + 1.0
    loads = []
    for _ in range(100):
        module.chosen = None
        module(x, Context())
        module.tally()
        counts = module.chosen.double()
        loads.append(float(counts.max() / counts.mean()))
        module.balance += rate * torch.sign(counts.mean() - counts)
    assert loads[0] > 2.0
    assert sum(loads[-10:]) / 10 < 1.25


def test_a_pass_without_gradients_is_not_counted() -> None:
    module, x = mixture(spec(Routing())), hidden()
    with torch.no_grad():
        module(x, Context())
        module.tally()
    assert module.chosen is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("full", [False, True])
def test_products_of_all_experts_together_are_those_of_each(dtype: torch.dtype, full: bool) -> None:
    part = spec(Routing(), gated=full, expert_bias=full)
    experts = mixture(part).experts.to(dtype)
    counts = torch.tensor([5, 0, 17, 3, 0, 1, 9, 0])
    rows = torch.randn(35, models.WIDTH, generator=torch.Generator().manual_seed(3)).to(dtype)
    results = []
    for product in (
        lambda x: experts.together(grouped_product, x, counts),
        lambda x: experts.one_by_one(x, counts.tolist()),
    ):
        x = rows.clone().requires_grad_()
        experts.zero_grad()
        out = product(x)
        out.sum().backward()
        results.append([out, x.grad, *(parameter.grad.clone() for parameter in experts.parameters())])
    bound = 1e-5 if dtype is torch.float32 else 3e-2
    for one, other in zip(*results, strict=True):
        scale = float(other.detach().abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=bound * max(scale, 1.0))


WRONG = {
    "groups": Routing(groups=3),
    "chosen_groups": Routing(groups=2, chosen_groups=3),
    "fewer": Routing(groups=8, chosen_groups=1),
    "choice": Routing(choice=Choice.PROTOTYPES, score=Score.SIGMOID),
    "capacity": Routing(capacity=0.0),
    "bias_rate": Routing(bias_rate=-1.0),
}


@pytest.mark.parametrize("name", WRONG)
def test_routings_that_cannot_be_are_refused_by_their_place(name: str) -> None:
    layer = Layer(mixer=models.attention(), transform=spec(WRONG[name]))
    found = [str(problem) for problem in model_problems(models.model(layer=layer, layers=1))]
    assert len(found) == 1
    assert "transform.routing." in found[0]


def test_usual_routings_are_not_refused() -> None:
    for routing in (Routing(), Routing(groups=4, chosen_groups=2, score=Score.SIGMOID, bias_rate=1e-3)):
        layer = Layer(mixer=models.attention(), transform=spec(routing))
        assert not list(model_problems(models.model(layer=layer, layers=1)))
