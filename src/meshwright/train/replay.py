"""Replay: ranks whose parameters differ make one step alike, from the same state and the same tokens, and whoever
comes to something else than the others computes wrong now; what is done again would be wrong again.

A fault that is over, such as a bit that a memory lost once, leaves all of them alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.clip import local_part
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.job import Switch
from meshwright.spec.plan import Design
from meshwright.train.events import Replay, Replayed
from meshwright.train.fingerprints import fingerprint, gathered
from meshwright.train.observe.whereabouts import Section

if TYPE_CHECKING:
    from meshwright.train.run import Run

_MULTIPLIER = 6364136223846793005  # of Knuth's generator modulo 2 ** 64: the order of prints counts


def can_replay(design: Design) -> bool:
    """Whether healthy ranks come to the same bits: by the same arithmetic, on machines of one sort, in layers that can
    be looked into."""
    (group, *others) = design.cluster.groups
    repeats = design.job.deterministic or group.device.kind is DeviceKind.CPU
    return repeats and not others and design.job.compile is Switch.OFF


def replayed(run: Run, action: Replay) -> Replayed:
    """What every rank computed. The state of all ranks of a group is that of its first one, and a step past it."""
    run.marker.mark(step=run.state.step, section=Section.REPLAY)
    _share(run, action.groups)
    batch = _drawn(run)
    first, second = _Print(), _Print()
    with first.looking(run.laid.parts):
        _pass(run, batch)
    with second.looking(run.laid.parts):
        _pass(run, batch)
    run.laid.clip(run.design.job.optimizer.clip_norm)
    run.optimizer.step()
    update = fingerprint(run.laid_state().tensors.values())
    for _, parameter in run.laid.named_parameters():
        parameter.grad = None
    prints = gathered((first.value, second.value, update), device=run.feed.device)
    return Replayed(step=run.state.step, prints=prints)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a replay tells in words, and of which ranks it is known, or likely, that they compute wrong now."""

    words: str
    wrong: tuple[int, ...] = ()


def judged(event: Replayed, groups: Sequence[Sequence[int]]) -> Verdict:
    """Of the ranks of `groups`, each of which should have come to the same, and to that both times."""
    told, wrong = list[str](), list[int]()
    for group in groups:
        restless = [rank for rank in group if event.prints[rank][0] != event.prints[rank][1]]
        if len(restless) == len(group):
            return Verdict(words="replayed, no rank comes to the same twice, so that arithmetic does not tell")
        if restless:
            odd, says = restless, "to something else each time"
        else:
            odd, says = _odd(event, group), f"to something else than ranks {', '.join(map(str, group))} should share"
        if odd:
            wrong += odd
            told.append(f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))} came {says}")
    if not wrong:
        return Verdict(words="replayed, all of them come to the same: nobody computes wrong now")
    within = "; what one computes wrong others that compute with it have too" if len(told) > 1 else ""
    return Verdict(words=f"replayed, {'; '.join(told)}{within}", wrong=tuple(wrong))


def _odd(event: Replayed, group: Sequence[int]) -> list[int]:
    """The ranks in the minority; all of them where there is none; nobody where all came to the same."""
    counts = Counter(event.prints[rank] for rank in group).most_common()
    if len(counts) == 1:
        return []
    sure = counts[0][1] > counts[1][1]
    return [rank for rank in group if not sure or event.prints[rank] != counts[0][0]]


class _Print:
    """A number of 64 bits of all that layers give and of the gradients that come to them, in order."""

    def __init__(self) -> None:
        self.value = 0

    @contextmanager
    def looking(self, parts: Sequence[torch.nn.Module]) -> Iterator[None]:
        blocks = [block for part in parts for block in _blocks(part)]
        hooks = [block.register_forward_hook(self._see) for block in blocks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _see(self, _module: torch.nn.Module, _inputs: Any, output: Tensor) -> None:
        self._add(output)
        if output.requires_grad:
            output.register_hook(self._add)

    def _add(self, x: Tensor) -> None:
        total = self.value * _MULTIPLIER + fingerprint([x])
        self.value = (total + 2**63) % 2**64 - 2**63


def _blocks(part: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The embedding, the layers and the head of a stage, as far as it has them."""
    for name, child in part.named_children():
        if name == "layers":
            yield from child.children()
        else:
            yield child


def _share(run: Run, groups: Sequence[Sequence[int]]) -> None:
    """Parameters and the optimizer's state of every rank of a group are those of its first one, as far as both hold the
    same part of them."""
    state, rank = run.laid_state(), dist.get_rank()
    for source, *others in groups:
        for name in sorted(state.tensors):
            parts = state.held[name].parts
            members = [other for other in others if other in parts and parts[other] == parts.get(source)]
            own = local_part(state.tensors[name].detach())
            if rank == source:
                for member in members:
                    dist.send(own.contiguous().to(run.feed.device), member)
            elif rank in members:
                came = torch.empty(own.shape, dtype=own.dtype, device=run.feed.device)
                dist.recv(came, source)
                own.copy_(came)
    state.own.settle()


def _drawn(run: Run) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Tokens that are the same on every rank: a microbatch of them, or where stages pass several on a step's share."""
    plan, feed = run.design.plan, run.feed
    rows = feed.rows if len(plan.stages) > 1 else min(plan.microbatch, feed.rows)
    draw = torch.Generator().manual_seed(run.state.step)
    text = torch.randint(run.design.model.vocab, (rows, plan.sequence_length + 1), generator=draw).to(feed.device)
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    nothing = torch.zeros(tokens.shape, dtype=torch.int32, device=feed.device)
    return tokens, targets, nothing if feed.document_mask else None, nothing if feed.prefix_mask else None


def _pass(run: Run, batch: tuple[Tensor, Tensor, Tensor | None, Tensor | None]) -> None:
    """Forward and backward, of which only gradients are left."""
    torch.manual_seed(run.state.random_seed)
    run.laid.step(*batch, number=run.state.step + 1, loss_scale=run.loss_scale.value)
    run.laid.undo()
