"""Parts: what of a model learners meet in, dealt to fragments, and all that the mean of them is of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.layout import Laid
from meshwright.parallel.optimizer import block_of
from meshwright.parallel.outer.average import build_average
from meshwright.parallel.outer.flat import Flat
from meshwright.parallel.outer.fragment import Fragment
from meshwright.parallel.outer.pace import Pace
from meshwright.parallel.outer.updates import Total, build_update
from meshwright.spec.plan import Design
from meshwright.spec.synchronize import dealt


def fragments_of(
    design: Design, *, laid: Laid, pace: Pace, across: dist.ProcessGroup, total: Total
) -> tuple[Fragment, ...]:
    """The model's blocks dealt by their parameters, the same on every rank; those of which this rank has a part. What
    travels in two collectives goes on after every forward pass of a stage, too."""
    gradients, model = design.plan.gradients, design.model
    rounds = gradients.rounds
    trained = [(name, x) for name, x in laid.named_parameters() if x.requires_grad]
    parts = dealt([block.parameters for block in model.blocks], parts=rounds.fragments)
    counted, found = set(laid.first_copies()), []
    for index, blocks in enumerate(parts):
        flat = Flat([(name, x) for name, x in trained if block_of(name, model) in blocks])
        if not flat.numel:
            continue
        found.append(
            Fragment(
                flat,
                number=index,
                pace=pace,
                update=build_update(gradients.kind, rounds, total=total, square=partial(flat.square, of=counted)),
                average=partial(build_average, group=across, precision=rounds.precision),
                remembers=design.job.elastic.on and rounds.delay > 0,
            )
        )
    for part in laid.parts if rounds.delay else ():
        part.register_forward_hook(partial(_go_on, found))
    return tuple(found)


def _go_on(fragments: Sequence[Fragment], *_: object) -> None:
    """A forward hook."""
    for fragment in fragments:
        fragment.go_on()


def everything(laid: Laid) -> list[tuple[str, Tensor]]:
    """All that a model is by name: what is trained, and buffers of numbers."""
    named = [(name, x.detach()) for name, x in laid.named_parameters() if x.requires_grad]
    buffers = [pair for part in laid.parts for pair in part.named_buffers() if pair[1].is_floating_point()]
    return [*named, *buffers]
