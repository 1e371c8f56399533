"""Slices of a microbatch give what whole sequences give, for every kind of attention and in every layout."""

from __future__ import annotations

import pytest
import torch

from meshwright.nn import Decoder, initialize
from meshwright.parallel.recompute import apply_recompute
from meshwright.parallel.slices import SliceStore, cut, repeat
from meshwright.spec.exchange import Exchange, ExchangeKind, TokenLayout
from meshwright.spec.plan import Recompute, ScheduleKind, Sharding
from tests.parallel.parity_cases import Documents
from tests.parallel.test_parity import check
from tests.support import models
from tests.support.designs import Layout, design
from tests.support.pool import Pool

LENGTH = 12
ATTENTIONS = ("tiny", "window", "chunk", "sinks", "softcap", "latent", "gpt", "shared_key_value")


def sliced(part: Decoder, tokens: torch.Tensor, documents: torch.Tensor | None, number: int) -> torch.Tensor:
    """The sum of squared logits, forward and backward by slices; gradients are in place."""
    store = SliceStore(number=number, length=LENGTH // number, returns=True)
    outputs = []
    for index, run in enumerate(tokens.chunk(number, dim=1)):
        store.begin(index)
        outputs.append(part(run, context=store.context(documents=documents, known_angles=part.known_angles)))
    for index in reversed(range(number)):
        made, above = store.gradients(index)
        assert len(made) == (0 if index == number - 1 else 2 * len(part.layers))
        output = outputs[index]
        torch.autograd.backward([output, *made], [2 * output.detach(), *above])
    assert not store._open
    return torch.cat(outputs, dim=1).detach().square().sum()


@pytest.mark.parametrize("documents", [False, True], ids=["one", "documents"])
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_slices_attend_to_each_other_as_tokens_of_one_sequence(kind: str, documents: bool) -> None:
    tokens = torch.randint(0, models.VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    owners = (torch.arange(LENGTH) >= torch.tensor([[5], [7]])).int() if documents else None
    plain, part = (Decoder(models.all_models()[kind]).double() for _ in range(2))
    for one in (plain, part):
        initialize(one, seed=2)
    for layer, recompute in zip(part.layers.values(), (*Recompute, Recompute.FULL), strict=True):
        apply_recompute(layer, recompute)
    expected = plain(tokens, documents=owners).square().sum()
    expected.backward()
    found = sliced(part, tokens, owners, number=3)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0)
    for name, parameter in plain.named_parameters():
        gradient = part.get_parameter(name).grad
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("kind", models.COUNTED)
def test_slices_choose_experts_as_tokens_of_one_sequence(kind: str) -> None:
    """The first ones too, whose balance loss knows of later choices."""
    spec = models.routed(models.all_models()["mixture"], models.ROUTINGS[kind])
    tokens = torch.randint(0, models.VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    plain, part = (Decoder(spec).double() for _ in range(2))
    for one in (plain, part):
        initialize(one, seed=2)
    for layer, recompute in zip(part.layers.values(), (*Recompute, Recompute.FULL), strict=True):
        apply_recompute(layer, recompute)
    expected = plain(tokens).square().sum()
    expected.backward()
    torch.testing.assert_close(sliced(part, tokens, None, number=3), expected.detach(), rtol=1e-12, atol=0)
    for name, parameter in plain.named_parameters():
        gradient = part.get_parameter(name).grad
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("returns", [True, False], ids=["evaluated", "still"])
def test_where_nothing_goes_backward_nothing_of_a_microbatch_is_left(returns: bool) -> None:
    part, store = Decoder(models.model()).double(), SliceStore(number=3, length=4, returns=returns)
    part.requires_grad_(returns)
    initialize(part, seed=2)
    tokens = torch.arange(LENGTH)[None] % models.VOCAB
    outputs = []
    with torch.set_grad_enabled(not returns):
        for index, run in enumerate(tokens.chunk(3, dim=1)):
            store.begin(index)
            outputs.append(part(run, context=store.context(documents=None, known_angles=part.known_angles)))
    torch.testing.assert_close(torch.cat(outputs, dim=1), part(tokens))
    assert not store._open


def test_a_batch_is_cut_microbatch_by_microbatch() -> None:
    x = torch.arange(16).view(4, 4)  # two microbatches of two sequences
    assert cut(x, microbatch=2, number=2).tolist() == [
        [0, 1], [4, 5], [2, 3], [6, 7], [8, 9], [12, 13], [10, 11], [14, 15],
    ]  # fmt: skip
    assert repeat(x, microbatch=2, number=2).tolist() == [*x[:2].tolist() * 2, *x[2:].tolist() * 2]
    assert cut(x, microbatch=2, number=1) is x
    assert repeat(x, microbatch=2, number=1) is x


SLICED = ScheduleKind.SEQUENCE_1F1B
LAYOUTS = (
    ("tiny", Layout(pipeline=2, kind=SLICED, slices=4, batch=4, microbatch=2)),
    ("tied", Layout(pipeline=2, kind=SLICED, slices=2, batch=2, recompute=Recompute.FULL)),
    ("mixture_full", Layout(pipeline=2, kind=SLICED, slices=4, batch=1)),
    ("tiny", Layout(pipeline=4, kind=SLICED, slices=4, batch=1)),
    ("tied", Layout(pipeline=2, tensor=2, kind=SLICED, slices=4, batch=2, sequence_parallel=True)),
    ("tied", Layout(pipeline=2, shard=2, sharding=Sharding.PARAMETERS, kind=SLICED, slices=2, batch=4)),
    ("latent", Layout(pipeline=2, shard=2, sharding=Sharding.GRADIENTS, kind=SLICED, slices=2, batch=4)),
    ("sinks", Layout(pipeline=2, replicate=2, kind=SLICED, slices=2, batch=4)),
)
# Every slice is dealt over the context ranks on its own, and meets the keys that each kept of those before.
GATHER = ExchangeKind.GATHER
DIVIDED = (
    ("tiny", Layout(pipeline=2, context=2, kind=SLICED, slices=4, batch=2, microbatch=2)),
    (
        "latent",
        Layout(
            pipeline=2,
            context=2,
            kind=SLICED,
            slices=2,
            batch=2,
            recompute=Recompute.SELECTIVE,
            exchange=Exchange(kind=GATHER, layout=TokenLayout.BALANCED),
        ),
    ),
    (
        "sinks",
        Layout(
            pipeline=2,
            context=2,
            kind=SLICED,
            slices=4,
            batch=2,
            recompute=Recompute.FULL,
            exchange=Exchange(inner=2, layout=TokenLayout.BALANCED),
        ),
    ),
    (
        "gpt",
        Layout(pipeline=2, context=2, kind=SLICED, slices=2, batch=1, exchange=Exchange(layout=TokenLayout.STRIPED)),
    ),
)
TWO_LEVEL = Layout(
    pipeline=2,
    context=4,
    kind=SLICED,
    slices=2,
    batch=2,
    sharding=Sharding.PARAMETERS,
    exchange=Exchange(kind=GATHER, inner=2, layout=TokenLayout.BALANCED),
)


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS, ids=str)
def test_a_pipeline_of_slices_gives_what_one_device_gives(pool: Pool, kind: str, layout: Layout) -> None:
    check(pool, design(models.all_models()[kind], layout, z_loss=1e-3), packed=Documents.TWO)


@pytest.mark.parametrize(("kind", "layout"), DIVIDED, ids=str)
def test_slices_that_context_ranks_share_do_too(pool: Pool, kind: str, layout: Layout) -> None:
    packed = Documents.ONE if layout.slices == 2 and kind == "gpt" else Documents.TWO
    check(pool, design(models.all_models()[kind], layout, z_loss=1e-3), packed=packed)


@pytest.mark.slow
def test_slices_that_trade_heads_inside_and_meet_outside_do_too(pool: Pool) -> None:
    for kind in ("tiny", "window", "chunk", "latent"):
        check(pool, design(models.all_models()[kind], TWO_LEVEL), packed=Documents.TWO)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [layout for _, layout in LAYOUTS], ids=str)
@pytest.mark.parametrize("kind", list(models.all_models()))
def test_every_kind_of_block_does_in_every_one_of_them(pool: Pool, kind: str, layout: Layout) -> None:
    check(pool, design(models.all_models()[kind], layout, z_loss=1e-3))
