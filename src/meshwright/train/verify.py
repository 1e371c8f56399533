"""Ranks that hold the same parameters are held to the same bits, and one that went wrong in silence is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.clip import local_part
from meshwright.spec.errors import Problem, WorkerFailed
from meshwright.spec.job import Unlike, VerifySpec
from meshwright.train.events import Action, Event, Log, RollBack, Saved, Started, StepDone, Stopping, Verified, Verify

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """A number of 64 bits that changes with every single bit of what this rank keeps of `tensors`."""
    total = 0
    for x in tensors:
        local = local_part(x.detach()).contiguous()
        total += int(local.view(-1).view(_INTEGERS[local.element_size()]).sum(dtype=torch.int64))
    return (total + 2**63) % 2**64 - 2**63


def fingerprints(tensors: Iterable[Tensor], *, device: torch.device) -> tuple[int, ...]:
    """That of every rank, in order. Collective over all of them."""
    own = torch.tensor([fingerprint(tensors)], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return tuple(int(each) for each in torch.cat(everyone).tolist())


@dataclass(slots=True, kw_only=True)
class VerifyEvery:
    """Asks for fingerprints as `spec` says, and answers those of ranks `alike` that differ. `good` is the newest
    checkpoint whose ranks held the same.

    A run that rolls back makes the same steps again from the same batches: at the step where ranks differed the ones
    whose fingerprint is another one now had been wrong. Where they differ again the run stops: what is broken does not
    mend itself; and where they differ once its last step is done.
    """

    spec: VerifySpec
    alike: Sequence[Sequence[int]]
    good: int | None = None
    verified: int = -1
    saved: int = -1
    before: Verified | None = None
    ends: bool = False

    def react(self, event: Event) -> Iterable[Action]:
        if not self.alike:
            text = "no two ranks hold the same parameters, so that none can be verified"
            return (Log(text=text),) if isinstance(event, Started) else ()
        self.ends = isinstance(event, Stopping) or self.ends
        if isinstance(event, StepDone):
            return (Verify(),) if event.step % self.spec.every_steps == 0 else ()
        if isinstance(event, Saved):
            self.saved = event.step
            if self.verified != event.step:
                return (Verify(),)
            self.good = event.step
        return self._judged(event) if isinstance(event, Verified) else ()

    def _judged(self, event: Verified) -> Iterable[Action]:
        unlike = [group for group in self.alike if len({event.prints[rank] for rank in group}) > 1]
        if unlike:
            return self._answer(event, unlike)
        self.verified = event.step
        if self.saved == event.step:
            self.good = event.step
        if self.before is None or event.step < self.before.step:
            return ()
        before, self.before = self.before, None
        return (Log(text=_named(before, event)),)

    def _answer(self, event: Verified, unlike: Sequence[Sequence[int]]) -> Iterable[Action]:
        what = f"after step {event.step} {_differing(event, unlike)}"
        if self.spec.policy is Unlike.STOP or self.good is None or self.before is not None or self.ends:
            raise WorkerFailed(self._failure(event, what))
        self.before, self.saved, self.verified = event, self.good, self.good
        return RollBack(to=self.good), Log(values={"unlike_ranks": 1.0}, text=f"{what}; back to step {self.good}")

    def _failure(self, event: Verified, what: str) -> Problem:
        why = "a bit was lost in a memory, on a link or in a processor, or arithmetic there is not what it is elsewhere"
        if self.before is not None:
            why = f"they had differed after step {self.before.step}, and the run went back since: {why}"
        good = "begin again" if self.good is None else f"--resume goes on from step {self.good}"
        if self.saved > (self.good or 0):
            good = f"remove the checkpoint of step {self.saved}, whose ranks may have differed; {good}"
        fix = f"{good}, without the machine of the rank that is named, or once it is tested"
        return Problem(what=what, where=f"step {event.step}", why=why, fix=fix)


def _differing(event: Verified, unlike: Sequence[Sequence[int]]) -> str:
    """Of every group the ranks that are in the minority; all of it where there is none."""
    told = []
    for group in unlike:
        counts = Counter(event.prints[rank] for rank in group).most_common()
        sure = counts[0][1] > counts[1][1]
        odd = [rank for rank in group if event.prints[rank] != counts[0][0]] if sure else list(group)
        many = len(odd) > 1
        names = f"rank{'s' * many} {', '.join(map(str, odd))}"
        among = f"{'hold' if many else 'holds'} other parameters than ranks {', '.join(map(str, group))} should share"
        told.append(f"{names} {among}" if sure else f"{names} hold unlike parameters, which should be the same")
    return "; ".join(told)


def _named(before: Verified, again: Verified) -> str:
    """Who had been wrong, now that the step is done again."""
    if again.step != before.step:
        return f"ranks hold the same again; step {before.step} was not verified again, so that nobody is named"
    wrong = [rank for rank, (old, new) in enumerate(zip(before.prints, again.prints, strict=True)) if old != new]
    if len(wrong) == len(before.prints):
        return f"step {before.step} again: no rank has what it had, so that its arithmetic does not tell who was wrong"
    if not wrong:
        return f"step {before.step} again: ranks hold what they held"
    names = f"rank{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong))}"
    return f"step {before.step} again: {names} had been wrong in silence; test that machine"
