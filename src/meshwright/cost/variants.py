"""What the name of software may say after that of any stack: attention, loss, step, exchanges of tensor
ranks that do not go in pieces, and that its host waits."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from meshwright.cost.software import Software
from meshwright.cost.work import LossKernel
from meshwright.spec.cluster import AttentionKernel
from meshwright.spec.job import Automatic

BLOCKING, WHOLE_EXCHANGES = "-blocking", "-whole-exchanges"
_CHUNKS_MANY = 8  # of FLA (modules/fused_linear_cross_entropy.py), torchtitan (components/loss.py) and torchtune alike
_LINEAR: Mapping[str, Any] = {"fused_loss": True, "loss_kernel": LossKernel(early=True)}
# In the order in which a name says them.
_ATTENTIONS: Mapping[str, Mapping[str, Any]] = {
    "-flash-1": {"attention_kernel": AttentionKernel.FLASH_1, "torch_attention": False},
    "-flash-2": {"attention_kernel": AttentionKernel.FLASH_2, "torch_attention": False},
    "-native": {"attention_kernel": AttentionKernel.NATIVE, "torch_attention": False},
}
# `loss-kernel`: one kernel reads logits, one writes their gradients; `fused-loss`: a compiler's. `linear-loss`:
# gradients are formed with the loss, run by run. `liger`: that in runs of its own, with fused norms, rotations and
# gates, as apply_liger_kernel_to_llama lays them (transformers/monkey_patch.py of Liger-Kernel).
_LOSSES: Mapping[str, Mapping[str, Any]] = {
    "-loss-kernel": {"fused_loss": True, "loss_kernel": LossKernel()},
    "-fused-loss": {"fused_loss": True, "loss_kernel": LossKernel(tops=True)},
    "-linear-loss": {"loss_chunks": _CHUNKS_MANY, **_LINEAR},
    "-liger": {"compiled": True, "plain_norms": False, "loss_chunks": 0, **_LINEAR},
}
_CHUNKS: Mapping[str, Mapping[str, Any]] = {"-chunked": {"loss_chunks": _CHUNKS_MANY}}
_STEPS: Mapping[str, Mapping[str, Any]] = {"-narrow-step": {"steps_narrow": True}}
_EXCHANGES: Mapping[str, Mapping[str, Any]] = {WHOLE_EXCHANGES: {"pieces": False}}
_WAITING: Mapping[str, Mapping[str, Any]] = {
    BLOCKING: {
        "waits_for_kernels": True,
        "waits_for_transfers": True,
        "waits_in_loops": True,
        "overlap": False,
        "hides_gradients": False,
        "pieces": False,
        "hides_experts": False,
    }
}
_GROUPS = (_ATTENTIONS, _LOSSES, _CHUNKS, _STEPS, _EXCHANGES, _WAITING)
VARIANTS: Mapping[str, Mapping[str, Any]] = {name: change for group in _GROUPS for name, change in group.items()}


def plain_names(name: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every way to take `name` apart: a stack's own name, and what comes after it; the longest stack's first."""
    found: list[tuple[str, tuple[str, ...]]] = [(name, ())]
    for group in reversed(_GROUPS):
        found += [
            (plain.removesuffix(each), (each, *said)) for plain, said in found for each in group if plain.endswith(each)
        ]
    yield from found


@cache
def changed(plain: Software, said: tuple[str, ...]) -> Software:
    """`plain` with what is `said` after its name."""
    found = plain
    for each in said:
        found = replace(found, **VARIANTS[each])
    return found


def meant(name: str, known: Iterable[str]) -> str:
    """At most three stacks of `known` that `name` may be meant to be, those whose names hold it first; where none is
    near, all of them but those that say more after the name of another."""
    known, plain = list(known), name.lower()
    holding = sorted((each for each in known if len(plain) > 2 and plain in each), key=len)
    near = (holding or difflib.get_close_matches(plain, known, n=3))[:3]
    if near:
        return f"did you mean {' or '.join(map(repr, near))}"
    first = [each for each in known if not any(each.startswith(f"{other}-") for other in known)]
    return f"one of {', '.join([Automatic.AUTO.value, *first])}"
