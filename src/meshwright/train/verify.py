"""Ranks that hold the same parameters are held to the same bits, and one that went wrong in silence is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.spec.errors import Problem, WorkerFailed
from meshwright.spec.job import Unlike, VerifySpec
from meshwright.train.events import (
    Action,
    Event,
    Log,
    Replay,
    Replayed,
    RollBack,
    Saved,
    Started,
    StepDone,
    Stopping,
    Verified,
    Verify,
)
from meshwright.train.replay import Verdict, judged


@dataclass(slots=True, kw_only=True)
class VerifyEvery:
    """Asks for fingerprints as `spec` says, and answers those of ranks `alike` that differ. `good` is the newest
    checkpoint whose ranks held the same.

    Where it `replays`, those ranks first make a step alike. Who computes wrong now would do so again: the run stops.
    A run that rolls back makes the same steps again from the same batches: at the step where ranks differed the ones
    whose fingerprint is another one now had been wrong. Where they differ again the run stops: what is broken does not
    mend itself; and where they differ once its last step is done.
    """

    spec: VerifySpec
    alike: Sequence[Sequence[int]]
    replays: bool = False
    good: int | None = None
    verified: int = -1
    saved: int = -1
    before: Verified | None = None
    ends: bool = False
    suspected: Verified | None = None

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
        if isinstance(event, Replayed) and self.suspected is not None:
            before, self.suspected = self.suspected, None
            unlike = self._unlike(before)
            return self._answer(before, unlike, judged(event, unlike))
        return self._judged(event) if isinstance(event, Verified) else ()

    def _unlike(self, event: Verified) -> list[Sequence[int]]:
        return [group for group in self.alike if len({event.prints[rank] for rank in group}) > 1]

    def _judged(self, event: Verified) -> Iterable[Action]:
        unlike = self._unlike(event)
        if unlike and self.replays:
            self.suspected = event
            return (Replay(groups=tuple(map(tuple, unlike))),)
        if unlike:
            return self._answer(event, unlike, Verdict(words=""))
        self.verified = event.step
        if self.saved == event.step:
            self.good = event.step
        if self.before is None or event.step < self.before.step:
            return ()
        before, self.before = self.before, None
        return (Log(text=_named(before, event)),)

    def _answer(self, event: Verified, unlike: Sequence[Sequence[int]], verdict: Verdict) -> Iterable[Action]:
        what = "; ".join(filter(None, (f"after step {event.step} {_differing(event, unlike)}", verdict.words)))
        stops = self.spec.policy is Unlike.STOP or self.before is not None or self.ends or verdict.wrong
        if stops or self.good is None:
            raise WorkerFailed(self._failure(event, what, verdict))
        self.before, self.saved, self.verified = event, self.good, self.good
        return RollBack(to=self.good), Log(values={"unlike_ranks": 1.0}, text=f"{what}; back to step {self.good}")

    def _failure(self, event: Verified, what: str, verdict: Verdict) -> Problem:
        why = "a bit was lost in a memory, on a link or in a processor, or arithmetic there is not what it is elsewhere"
        if verdict.wrong:
            why = "it computes wrong now, and steps that are done again would be wrong too"
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
