"""The cost model says byte for byte what our modules keep for backward, and exactly the FLOPs that torch counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.spec.model import Attention, Layer, visible_keys
from meshwright.spec.plan import Recompute
from tests.cost.block_cases import BLOCKS, priced, works
from tests.cost.saved_tensors import Setting, count_flops, count_step_flops, kept, saved_once
from tests.support.sampled import sampled

_WHOLE = (Recompute.NONE, Recompute.FULL)
LAYERS = [name for name, block in BLOCKS.items() if isinstance(block, Layer)]
BF16 = Setting(compute=torch.bfloat16)
MANY = (Setting(), BF16, replace(BF16, sequence=512), replace(BF16, accelerator=True))
WIDE = Setting(compute=torch.float64, sequence=256, batch=3)


def first_of_each(names: list[str]) -> list[str]:
    """The first layer of every pair of parts, of whole and of thin matrices, and of each way to end."""
    found = {}
    for name in names:
        block = BLOCKS[name]
        ends = works(block, MANY[-1])[-1].closes
        found.setdefault((type(block.mixer), type(block.transform), bool(block.ranks), ends), name)
    return list(found.values())


FIRST = first_of_each(LAYERS)


def slow_but(quick: Callable[[str], bool]) -> list[Any]:
    """All layers, those that are not `quick` marked slow."""
    return [name if quick(name) else pytest.param(name, marks=pytest.mark.slow) for name in LAYERS]


def hold(name: str, settings: Iterable[Setting]) -> None:
    for setting in settings:
        told = priced(BLOCKS[name], setting)
        assert kept(BLOCKS[name], setting) == told.kept[0] + told.logits[0], setting


@pytest.mark.parametrize("name", BLOCKS)
def test_what_a_block_keeps_is_told_byte_for_byte(name):
    hold(name, (BF16,))


@pytest.mark.parametrize("name", [*slow_but(FIRST.__contains__), *(name for name in BLOCKS if name not in LAYERS)])
def test_so_it_is_in_every_precision_at_every_length_and_on_every_device(name):
    """Of sequences that processors attend in fp32 and of longer ones, on both devices."""
    hold(name, (*MANY, WIDE))


@pytest.mark.parametrize("name", slow_but(lambda name: name in FIRST or BLOCKS[name].mixer is not None))
def test_so_it_is_where_scores_are_computed_again(name):
    """A layer without scores keeps as much as before."""
    hold(name, (replace(setting, recompute=Recompute.SELECTIVE) for setting in MANY))


@pytest.mark.parametrize("name", slow_but(FIRST.__contains__))
def test_a_layer_that_is_computed_again_keeps_what_is_told(name):
    hold(name, (Setting(recompute=Recompute.FULL),))


@pytest.mark.parametrize("name", ["window", "grouped", "soft cap", "latent, equal widths"])
def test_masks_of_documents_on_accelerators(name):
    block = BLOCKS[name]
    if isinstance(block.mixer, Attention) and name == "grouped":
        block = replace(block, mixer=replace(block.mixer, kv_heads=4))  # the kernel that takes masks repeats no keys
    setting = Setting(compute=torch.bfloat16, accelerator=True, documents=True, batch=3)
    told = priced(block, setting)
    assert kept(block, setting) == told.kept[0]


@pytest.mark.parametrize("name", sampled(BLOCKS, quick=20))
def test_autograd_holds_what_it_saved_and_nothing_else(name):
    setting = Setting(compute=torch.bfloat16)
    assert kept(BLOCKS[name], setting) == saved_once(BLOCKS[name], setting)


@pytest.mark.parametrize("name", slow_but(FIRST.__contains__))
def test_what_is_computed_again_ends_before_the_last_product_that_nothing_needs(name):
    setting = Setting(compute=torch.bfloat16, accelerator=True)
    once, again = (count_step_flops(BLOCKS[name], replace(setting, recompute=kind)) for kind in _WHOLE)
    parts = works(BLOCKS[name], setting)
    left_out = parts[-1].products[-1].flops[0] if parts[-1].closes else 0.0
    assert again - once == count_flops(BLOCKS[name], setting) - left_out


@pytest.mark.parametrize("name", BLOCKS)
def test_traced_and_described_operators_agree_in_flops(name):
    """torch counts every score of a causal kernel; the described ones are those that are seen."""
    block, setting = BLOCKS[name], Setting(compute=torch.bfloat16, accelerator=True)
    parts = works(block, setting)
    mixer = block.mixer if isinstance(block, Layer) else None
    seen = setting.sequence
    narrow = mixer is not None and (mixer.window or getattr(mixer, "chunk", None) or mixer.prefix)
    if mixer is not None and not narrow:
        seen = visible_keys(setting.sequence, None, None)
    products = sum(product.flops[0] for part in parts for product in part.products)
    scores = sum(float(np.sum(part.score_flops)) for part in parts) * setting.sequence / seen
    assert count_flops(block, setting) == products + scores
