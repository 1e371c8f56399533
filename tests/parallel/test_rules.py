"""Layouts that are derived from an unannotated module are those that people write by hand."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.nn import Decoder
from meshwright.parallel.rules import Layout, derive
from meshwright.parallel.tensor import divided_dim
from meshwright.spec.errors import ConfigError
from tests.parallel.foreign_models import HEADS, VOCAB, WIDTH, Gpt2, case
from tests.support import models
from tests.support.sampled import sampled

LLAMA = {
    "embed_tokens.weight": "vocabulary",
    "layers.*.self_attn.q_proj.weight": "column",
    "layers.*.self_attn.k_proj.weight": "column",
    "layers.*.self_attn.v_proj.weight": "column",
    "layers.*.self_attn.o_proj.weight": "row",
    "layers.*.mlp.gate_proj.weight": "column",
    "layers.*.mlp.up_proj.weight": "column",
    "layers.*.mlp.down_proj.weight": "row",
    "lm_head.weight": "vocabulary",
}
ATTENTION = {name: layout for name, layout in LLAMA.items() if "mlp" not in name}
BY_HAND = {
    "llama": LLAMA,
    "qwen": {
        **{name: layout for name, layout in LLAMA.items() if name != "lm_head.weight"},  # tied
        "layers.*.self_attn.q_proj.bias": "column",
        "layers.*.self_attn.k_proj.bias": "column",
        "layers.*.self_attn.v_proj.bias": "column",
    },
    "mixtral": {
        **ATTENTION,
        "layers.*.mlp.experts.*.w1.weight": "column",
        "layers.*.mlp.experts.*.w3.weight": "column",
        "layers.*.mlp.experts.*.w2.weight": "row",
    },
    "gpt2": {
        "wte.weight": "vocabulary",
        "h.*.attn.c_attn.weight": "column",
        "h.*.attn.c_attn.bias": "column",
        "h.*.attn.c_proj.weight": "row",
        "h.*.mlp.c_fc.weight": "column",
        "h.*.mlp.c_fc.bias": "column",
        "h.*.mlp.c_proj.weight": "row",
    },
    "t5": {
        "shared.weight": "vocabulary",
        **{
            f"{stack}.block.*.{attention}.{matrix}.weight": "row" if matrix == "o" else "column"
            for stack, attention in (("encoder", "Self"), ("decoder", "Self"), ("decoder", "EncDec"))
            for attention in (f"{attention}Attention",)
            for matrix in "qkvo"
        },
        "encoder.block.*.SelfAttention.relative_attention_bias.weight": "column",
        "decoder.block.*.SelfAttention.relative_attention_bias.weight": "column",
        **{f"{stack}.block.*.wi.weight": "column" for stack in ("encoder", "decoder")},
        **{f"{stack}.block.*.wo.weight": "row" for stack in ("encoder", "decoder")},
    },
    "encoder": {
        "encoder.layers.*.self_attn.in_proj_weight": "column",
        "encoder.layers.*.self_attn.in_proj_bias": "column",
        "encoder.layers.*.self_attn.out_proj.weight": "row",
        "encoder.layers.*.linear1.weight": "column",
        "encoder.layers.*.linear1.bias": "column",
        "encoder.layers.*.linear2.weight": "row",
    },
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_what_is_derived_is_what_people_write(kind: str) -> None:
    entry = case(kind)
    found = derive(entry.module, entry.inputs, tensor=2)
    layouts = {name: part.layout.value for name, part in found.parts.items() if part.layout is not Layout.WHOLE}
    assert {re.sub(r"\.\d+\.", ".*.", name): layout for name, layout in layouts.items()} == {
        re.sub(r"\.\d+\.", ".*.", name): layout for name, layout in BY_HAND[kind].items()
    }


def test_packed_matrices_are_divided_within_each_of_their_parts() -> None:
    found = derive(Gpt2(), (torch.zeros(1, 4, dtype=torch.int64),), tensor=2)
    division = found.parts["h.0.attn.c_attn.weight"].division
    assert division is not None
    assert (division.dim, division.pieces) == (1, (WIDTH, WIDTH, WIDTH))


# What the table divides by hand where the rules leave it whole and slice it: a norm over all heads, sinks; and
# stacked experts, which are no matrices of one product.
BY_HAND_ALONE = {"full_norm", "sinks", "mixture", "mixture_full", "mixture_plain", "mixture_weighed_inputs"} | {
    "mixture_beside"
}


@pytest.mark.parametrize("kind", sampled(sorted(models.all_models().keys() - BY_HAND_ALONE), quick=8))
def test_our_own_decoder_is_divided_as_its_table_says(kind: str) -> None:
    model = models.all_models()[kind]
    with torch.device("meta"):
        decoder = Decoder(model)
    found = derive(decoder, (torch.zeros(1, 8, dtype=torch.int64),), tensor=2)
    for name, part in found.parts.items():
        place = name.split(".")
        index = int(place[1]) + 1 if place[0] == "layers" else 0 if place[0] == "embedding" else -1
        by_hand = divided_dim(name, block=model.blocks[index])
        assert (part.division.dim if part.division else None) == by_hand, name


class Three(nn.Module):
    """Three matrices in a row: the third has nothing to pair with."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.steps(x)


def test_what_nothing_pairs_with_is_whole_and_says_why() -> None:
    found = derive(Three(), (torch.zeros(2, 8),), tensor=2)
    assert [found.layout(f"steps.{place}.weight").value for place in (0, 2, 4)] == ["column", "row", "whole"]
    assert "returns it" in found.parts["steps.4.weight"].why
    first, second, third = (line for line in found.describe().splitlines() if "weight" in line)
    assert (first, second) == ("steps.0.weight: column", "steps.2.weight: row")
    assert third.startswith("steps.4.weight: whole (")


class Normed(nn.Module):
    """Queries normalised over all their features, which no rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.query(x)))


def test_a_function_of_whole_features_takes_the_division_back() -> None:
    found = derive(Normed(), (torch.zeros(2, 4, WIDTH),), tensor=2)
    assert found.divided == ()
    assert "in norm: layer_norm over divided features" in found.parts["query.weight"].why
    assert "query.weight: whole (in norm" in found.describe()


class Behind(nn.Module):
    """A pair of matrices behind a stream that another pair, which nothing divides, is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.two(self.one(x).sort(-1)[0])
        return x + self.down(functional.gelu(self.up(x)))


def test_a_matrix_that_cannot_be_divided_leaves_the_pairs_behind_it_alone() -> None:
    found = derive(Behind(), (torch.zeros(1, 3, 8),), tensor=2)
    layouts = {name: found.layout(f"{name}.weight").value for name in ("one", "two", "up", "down")}
    assert layouts == {"one": "whole", "two": "whole", "up": "column", "down": "row"}


class Kept(torch.autograd.Function):
    """Its gradient is of the length one, which no part of it knows."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / gradients[0].norm()


kept = Kept.apply  # as users name it: once, when their file is read


def hooked(x: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    x.register_hook(hook)
    return x


# What a forward does between two matrices, and the words of why they are whole; none where they are divided.
BETWEEN: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
    ("numbers", lambda x: x * len(x.tolist()), "tolist reads numbers of divided features"),
    ("an array", lambda x: x * float(x.detach().numpy()[0, 0, 0]), "numpy reads numbers"),
    ("a comparison", lambda x: x * 2 if torch.equal(x, x + 1) else x, "equal reads numbers"),
    ("a membership", lambda x: x * 2 if 0.5 in x else x, "__contains__ reads numbers"),
    ("a backward of its own", kept, "Kept has a backward of its own"),
    ("a hook of all", lambda x: hooked(x, lambda gradient: gradient / gradient.norm()), "norm over divided features"),
    ("a hook of each", lambda x: hooked(x, lambda gradient: gradient * 2), ""),
    ("on the host", lambda x: x.cpu(), ""),
    ("a mask like it", lambda x: x * torch.ones(1, 3, 1, device=x.device).expand_as(x), ""),
    ("new ones", lambda x: x + x.new_ones(x.shape), ""),
)


class Between(nn.Module):
    """A function between two matrices."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function, self.up, self.down = function, nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x)))


@pytest.mark.parametrize(("function", "words"), [entry[1:] for entry in BETWEEN], ids=[entry[0] for entry in BETWEEN])
def test_matrices_are_divided_only_around_what_works_on_parts(function: Callable[[Any], Any], words: str) -> None:
    found = derive(Between(function), (torch.zeros(1, 3, 8),), tensor=2)
    assert found.layout("up.weight") is (Layout.WHOLE if words else Layout.COLUMN)
    assert words in found.parts["up.weight"].why


class Product(torch.autograd.Function):
    """x W^T, and its gradients by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].flatten(0, 1).t() @ x.flatten(0, 1)


class ByHand(nn.Module):
    """A matrix that a function of the user's takes, before two that torch's do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(8, 8, bias=False), Between(torch.relu)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.rest(Product.apply(x, self.first.weight))
        return made


def test_a_matrix_that_a_backward_of_its_own_takes_is_whole() -> None:
    found = derive(ByHand(), (torch.zeros(1, 3, 8),), tensor=2)
    assert found.divided == ("rest.up.weight", "rest.up.bias", "rest.down.weight")


def test_heads_that_do_not_divide_are_whole() -> None:
    found = derive(case("encoder").module, case("encoder").inputs, tensor=3)
    assert found.layout("encoder.layers.0.self_attn.in_proj_weight") is Layout.WHOLE
    assert f"{HEADS} heads do not divide by 3" in found.parts["encoder.layers.0.self_attn.in_proj_weight"].why
    assert found.layout("encoder.layers.0.linear1.weight") is Layout.COLUMN


class Packed(nn.Module):
    """Queries, keys and values in one matrix of 96 columns."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.out = nn.Linear(8, 96), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.packed(x).chunk(3, dim=-1)
        return self.out(query * key + value)


def test_parts_that_do_not_divide_are_told_and_not_their_sum() -> None:
    found = derive(Packed(), (torch.zeros(2, 8),), tensor=3)
    assert found.parts["packed.weight"].why == "its parts of 32 do not divide by 3"


def test_a_forward_that_does_not_run_is_told_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"steps.0.forward: does not run on tensors without memory.*use tensor 1"):
        derive(Three(), (torch.zeros(2, 9),), tensor=2)


def test_the_module_is_left_as_it_was() -> None:
    entry = case("gpt2")
    before = {name: (id(x), x.clone()) for name, x in entry.module.named_parameters()}
    derive(entry.module, entry.inputs, tensor=2)
    for name, x in entry.module.named_parameters():
        assert (id(x), x.grad) == (before[name][0], None)
        assert torch.equal(x, before[name][1])
    assert entry.module(*entry.inputs).shape == (8, 8, VOCAB)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5", "qwen3", "mixtral"])
def test_models_of_transformers_are_divided_so_too(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    sizes = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 4}
    config = AutoConfig.for_model(kind, **sizes, num_key_value_heads=2, intermediate_size=24, use_cache=False, d_kv=4)
    if kind == "mixtral":
        config._experts_implementation = "eager"
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with torch.device("meta"):
        module = (AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM).from_config(config)
    example = {"input_ids": tokens, **({"decoder_input_ids": tokens} if kind == "t5" else {})}
    found = derive(module, example, tensor=2)
    whole = {name for name, part in found.parts.items() if part.layout is Layout.WHOLE}
    matrices = {name for name, x in module.named_parameters() if x.ndim > 1}
    assert {re.sub(r"\d+", "*", name) for name in matrices & whole} <= {
        "transformer.wpe.weight",
        "model.layers.*.mlp.gate.weight",
    }
