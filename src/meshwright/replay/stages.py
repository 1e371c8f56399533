"""Which layers each stage of a published run holds, and how the first ones of a stage differ from the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from meshwright.spec.plan import BlockGroup, Offload, Recompute, Stage

_BEFORE, _AROUND = 2, 6  # modules of DeepSpeed's GPT2ModelPipe: embedding and transpose; those, and four at its end


def between(bounds: Sequence[int], layers: int) -> list[int]:
    """Layers of each stage between `bounds`, which count layers alone or all modules of DeepSpeed's GPT2ModelPipe."""
    before = _BEFORE if bounds[-1] == layers + _AROUND else 0
    inside = [min(max(bound - before, 0), layers) for bound in bounds]
    return [stop - start for start, stop in pairwise(inside)]


def even(layers: int, stages: int, *, fewer_at_ends: bool) -> list[int]:
    """Blocks before each stage: the embedding is of the first and the head of the last."""
    total = layers + (2 if fewer_at_ends else 0)
    bounds = [0]
    for stage in range(stages):
        held = total // stages + (stage < total % stages)
        held += 0 if fewer_at_ends else (stage == 0) + (stage == stages - 1)
        bounds.append(bounds[-1] + held)
    return bounds


def filled(layers: int, stages: int) -> list[int]:
    """As many layers in every stage as the fullest has, and what is left in the last (_get_deepseek_v3_pipeline_layout
    of Megatron-Bridge, whose last stage has the module of multi-token prediction, a layer here, and both losses)."""
    each = -(-layers // stages)
    if each * (stages - 1) >= layers:
        return even(layers, stages, fewer_at_ends=False)
    return [0, *(1 + each * stage for stage in range(1, stages)), layers + 2]


def stages(
    edges: Sequence[int],
    settings: BlockGroup,
    *,
    ranks: Sequence[int],
    layers_away: int | None,
    again: int | None,
) -> tuple[Stage, ...]:
    """Stages between `edges` on their `ranks`; what is offloaded is of the first `layers_away` of each, and what is
    computed again of the first `again`, where said."""
    return tuple(
        Stage(rank=rank, groups=in_parts(replace(settings, start=start, stop=stop), layers_away, again))
        for rank, (start, stop) in zip(ranks, pairwise(edges), strict=True)
    )


def in_parts(whole: BlockGroup, layers_away: int | None, again: int | None) -> tuple[BlockGroup, ...]:
    """The blocks of a stage as `stages` parts them."""
    if layers_away is None and again is None:
        return (whole,)
    here, redone = (
        whole.stop if count is None else min(whole.start + count + (whole.start == 0), whole.stop)
        for count in (layers_away, again)
    )
    bounds = sorted({whole.start, here, redone, whole.stop})
    return tuple(
        replace(
            whole,
            start=start,
            stop=stop,
            offload=whole.offload if stop <= here else Offload.NONE,
            recompute=whole.recompute if stop <= redone else Recompute.NONE,
        )
        for start, stop in pairwise(bounds)
    )
