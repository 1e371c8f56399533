"""What the ranks of a learner tell each other at the end of a step, in one small all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.train.events import RankTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What one rank tells. Of the `whole_seconds` of a step it was held for `waited_seconds` in collectives and for
    `input_seconds` by its data; None where the host cannot tell, as on an accelerator. `seconds` run from the end of
    the step before. `writing` says that a checkpoint is written beside it, `change` that the ranks are to change."""

    stop: bool
    memory_bytes: float
    seconds: float
    input_seconds: float
    whole_seconds: float | None
    waited_seconds: float
    writing: bool = False
    change: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all ranks know then: the largest of each, and with `ranks` each one's times."""

    stop: bool
    change: bool
    memory_bytes: float
    seconds: float
    input_seconds: float
    load: float | None
    ranks: RankTimes | None


def agree(mine: Told, load: torch.Tensor | None, *, group: dist.ProcessGroup | None, device: torch.device) -> Agreed:
    """The same on every rank of `group`; read from the device in one transfer. Collective.

    Each rank has three places of its own, zero on all others, so that the largest of all is its own word.
    """
    ranks = 1 if group is None else group.size()
    numbers = [float(mine.stop), float(mine.change), mine.memory_bytes, mine.seconds, mine.input_seconds]
    told = mine.whole_seconds is not None and ranks > 1
    if told:
        own = (mine.whole_seconds or 0.0) - mine.waited_seconds - mine.input_seconds
        places = [0.0] * (3 * ranks)
        at = 3 * dist.get_rank(group)
        places[at : at + 3] = [max(own, 0.0), mine.waited_seconds, mine.input_seconds]
        numbers += [float(mine.writing), *places]
    shared = torch.tensor(numbers, dtype=torch.float64, device=device)
    if group is not None:
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    loads = [] if load is None else [load.detach().to(torch.float64).reshape(1)]
    found = torch.cat([*loads, shared]).tolist()
    most = found.pop(0) if loads else None
    stop, change, memory_bytes, seconds, input_seconds, *each = found
    times = None
    if told:
        writing, *each = each
        worked, waited, read = (tuple(each[place::3]) for place in range(3))
        times = RankTimes(own=worked, waited=waited, input=read, writing=writing > 0.0)
    return Agreed(
        stop=stop > 0.0,
        change=change > 0.0,
        memory_bytes=memory_bytes,
        seconds=seconds,
        input_seconds=input_seconds,
        load=most,
        ranks=times,
    )
