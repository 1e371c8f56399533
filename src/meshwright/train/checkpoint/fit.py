"""Whether what a checkpoint holds is what a model and its optimizer hold, over all ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.spec.errors import Problem
from meshwright.train.checkpoint.peers import Peers

_MODEL, _OPTIMIZER = "model.", "optimizer."
_MOST_NAMED = 5


def wanted(targets: Mapping[str, Tensor], saved: Collection[str]) -> dict[str, Tensor]:
    """`targets` without the optimizer's of parameters for which nothing is saved: it never stepped those, and starts
    them afresh.
    """
    stepped = {name.rpartition(".")[0] for name in saved if name.startswith(_OPTIMIZER)}
    return {
        name: x for name, x in targets.items() if not name.startswith(_OPTIMIZER) or name.rpartition(".")[0] in stepped
    }


def misfits(targets: Mapping[str, Tensor], saved: Mapping[str, Any], *, where: str, peers: Peers) -> list[Problem]:
    """Tensors that the checkpoint `saved` lacks, has in another shape, or has and no rank's model has. Collective."""
    missing = [name for name in targets if name not in saved]
    shapes = {name: (tuple(saved[name].size), tuple(x.shape)) for name, x in targets.items() if name in saved}
    reshaped = [f"{name} is {theirs} and not {ours}" for name, (theirs, ours) in shapes.items() if theirs != ours]
    found = peers.gather((missing, reshaped))
    kinds = {
        "missing": [name for names, _ in found for name in names],
        "of another shape": [line for _, lines in found for line in lines],
        "not of the model": _unclaimed(targets, saved, peers=peers),
    }
    return [_told(list(dict.fromkeys(names)), kind=kind, where=where) for kind, names in kinds.items() if names]


def _unclaimed(targets: Mapping[str, Tensor], saved: Mapping[str, Any], *, peers: Peers) -> list[str]:
    """Saved tensors of the model that no rank loads. A byte for each travels between ranks."""
    names = sorted(name for name in saved if name.startswith(_MODEL))
    claimed = torch.tensor([name in targets for name in names], dtype=torch.uint8)
    if peers.group is not None and names:
        dist.all_reduce(claimed, op=dist.ReduceOp.MAX, group=peers.group)
    return [name for name, is_claimed in zip(names, claimed.tolist(), strict=True) if not is_claimed]


def _told(names: Sequence[str], *, kind: str, where: str) -> Problem:
    count = len(names)
    rest = f" and {count - _MOST_NAMED:,} more" if count > _MOST_NAMED else ""
    return Problem(
        what=f"{count:,} tensor{'' if count == 1 else 's'} {'is' if count == 1 else 'are'} {kind}",
        where=where,
        why=f"{', '.join(names[:_MOST_NAMED])}{rest}",
        fix="resume from another checkpoint; nothing of this one was loaded",
    )
