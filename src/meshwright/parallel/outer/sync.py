"""OuterSync: what learners do after each of their steps so that they stay one model. Read this file first.

Nothing here runs beside training: collectives travel, and every change of a parameter is between two steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.cost.learner_holdings import Origins
from meshwright.cost.traffic_rounds import most_every
from meshwright.parallel.layout import Laid
from meshwright.parallel.outer.flat import Flat
from meshwright.parallel.outer.fragment import Fragment
from meshwright.parallel.outer.learners import Learners
from meshwright.parallel.outer.pace import Pace
from meshwright.parallel.outer.parts import everything, fragments_of
from meshwright.parallel.outer.quorum import Quorum
from meshwright.parallel.outer.roll import Round
from meshwright.parallel.outer.shares import Shares
from meshwright.parallel.outer.telling import Said, Telling
from meshwright.spec import codec
from meshwright.spec.plan import Design
from meshwright.spec.report import LineName
from meshwright.spec.span import Recorder
from meshwright.spec.synchronize import TOLD_EVERY, GradientSync, Rounds, as_usual

_BITS = 2**62
_NOTHING, _CHANGE, _STOP = range(3)  # what a learner is asked for; who stops does not change


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """What some learner told when they met: that it was asked to stop, that it had a step that was spoilt; at the end
    of a round that ranks are to change. `changed` are the rounds from here on where they are others. `round` is that
    which some may have missed, after which all that met stand at the step that ends it."""

    stop: bool = False
    change: bool = False
    spoilt: bool = False
    changed: Rounds | None = None
    round: Round | None = None


class OuterSync:
    """Learners of `design` that meet as its plan says; `laid` is what this rank's learner trains."""

    def __init__(self, design: Design, *, laid: Laid, learners: Learners, recorder: Recorder) -> None:
        assert learners.across is not None
        assert learners.meeting is not None
        self.learners = learners
        self.gradients: GradientSync = design.plan.gradients
        self._laid, self._recorder = laid, recorder
        self._across, self._meeting = learners.across, learners.meeting
        self.pace = Pace(
            kind=self.gradients.kind,
            rounds=self.gradients.rounds,
            learners=learners.count,
            most_every=most_every(design),
        )
        self._fragments = self._parts(design, laid)
        self._rows = design.plan.batch // learners.count
        self.shares = self._even()
        self._needed = self._told_needed = self.told_at = 0
        self._step_seconds, self._clock = math.inf, time.perf_counter()
        self._whole = Flat(everything(laid))
        self._asked, self._spoilt, self._changes = _NOTHING, False, False
        self._telling = Telling(self._meeting, learner=learners.index, device=laid.device)
        self.quorum = self._quorum(design) if self.gradients.rounds.quorum else None

    def begin(self, step: int) -> None:
        """All learners have the same parameters after `step`, and nothing that they sent before counts. Collective."""
        self.drain()
        self._telling.forget()
        self.pace.rounds, self.pace.origin = self.gradients.rounds, 0
        self._begin(step, momentum={})

    def _begin(self, step: int, *, momentum: Mapping[str, Tensor]) -> None:
        self.pace.begun, self.shares = step, self._even()
        for fragment in self._fragments:
            fragment.begin(momentum)
        if self.quorum is not None:
            self.quorum.begin()

    def come_together(self) -> None:
        """What travels has landed, and every learner holds the mean of all of them. Collective."""
        for fragment in self._fragments:
            fragment.land()
        self._whole.write(self._averaged(self._whole.read()))

    def follow(self, design: Design, *, laid: Laid) -> None:
        """These learners train `laid` from here on, of the plan that they had and of a model of other ranks; they have
        to be told what to go on from. Collective."""
        self.drain()
        self._laid, self._whole = laid, Flat(everything(laid))
        self._fragments = self._parts(design, laid)

    def go_on_as_one(self, step: int, *, momentum: Mapping[str, Tensor]) -> None:
        """All learners have the same parameters after `step`, with which a round ends, and go on in the rounds that
        they had; of the outer optimizer `momentum` stays, by parameter. Collective. Raises WorkerFailed where a bit of
        what they go from is another."""
        self._begin(step, momentum=momentum)
        self._needed = self._told_needed = 0
        why = "they made unlike factors, or a byte changed on its way or in memory"
        self._telling.compare(self._fingerprint(), step=step, why=why)

    def check(self, step: int) -> None:
        """Collective, after step `step` of all learners. Raises WorkerFailed where they do not have one anchor."""
        self._telling.compare(self._fingerprint(), step=step)

    def after_step(self, step: int, *, stop: bool, spoilt: bool, change: bool = False) -> Met | None:
        """Step `step` of this learner is done: what is due lands and sets out. What learners told where they met.

        Every rank of a learner gives the same. Raises WorkerFailed where learners do not have one anchor.
        """
        self._spoilt = self._spoilt or spoilt
        self._asked = max(self._asked, _STOP if stop else _CHANGE if change else _NOTHING)
        start = time.perf_counter()
        if self.quorum is not None:
            met = self._meet_who_came(step, quorum=self.quorum)
            self._recorder.record(LineName.OUTER, start, time.perf_counter() - start)
            return met
        self._step_seconds = min(self._step_seconds, start - self._clock)
        due = [(fragment, fragment.lands(step), fragment.departs(step)) for fragment in self._fragments]
        ended = self.pace.ends_round(step)
        self._count(step)
        changed = self._change(step) if ended else None
        for fragment, lands, departs in sorted(due, key=lambda entry: not entry[1]):
            fragment.watch()
            if lands or departs:
                scale = self.shares.scale(fragment.number, self.learners.index) if departs else 1.0
                fragment.meet(step, lands=lands, departs=departs, scale=scale)
        for number in range(self.pace.rounds.fragments):
            if self.pace.away_since(number, step) is None:
                self.shares.arrive(number)
        apart = min(self.pace.rounds.every, TOLD_EVERY)
        met = self._meet(step) if (step - self.pace.origin) % apart == 0 else None
        if ended and self._changes:
            met = replace(met or Met(), change=True)
        self._clock = time.perf_counter()
        self._recorder.record(LineName.OUTER, start, self._clock - start)
        return met if changed is None else replace(met or Met(), changed=changed)

    def _parts(self, design: Design, laid: Laid) -> tuple[Fragment, ...]:
        return fragments_of(design, laid=laid, pace=self.pace, across=self._across, total=self._over_learner)

    def _quorum(self, design: Design) -> Quorum:
        patience = design.job.peer_timeout_seconds
        device, total = self._laid.device, self._over_learner
        return Quorum(self.learners, pace=self.pace, patience_seconds=patience, device=device, total=total)

    def _meet_who_came(self, step: int, *, quorum: Quorum) -> Met | None:
        """What this learner brings and takes where it meets after step `step`, be others there or not."""
        self.shares.step()
        print_, stop = self._fingerprint(), self._asked == _STOP
        found = quorum.met(step, fingerprint=print_, stop=stop, spoilt=self._spoilt)
        if found is None:
            return None
        for fragment in self._fragments:
            fragment.average.among(found.members)
            scale, catch_up = found.scale(self.learners.index), partial(quorum.catch_up, found)
            fragment.meet(step, lands=False, departs=True, scale=scale, catch_up=catch_up)
        self.shares, self.told_at = self._even(), quorum.last_step(found.number)
        self._asked, self._spoilt = _NOTHING, False
        entries = found.arrivals.values()
        return Met(
            stop=any(entry.stop for entry in entries), spoilt=any(entry.spoilt for entry in entries), round=found
        )

    def _fingerprint(self) -> int:
        """Of what this rank has of all go from."""
        return sum(fragment.fingerprint() for fragment in self._fragments) % _BITS

    def _even(self) -> Shares:
        return Shares.even(fragments=self.gradients.rounds.fragments, learners=self.learners.count, rows=self._rows)

    def _count(self, step: int) -> None:
        """What each learner has read is counted, also of fragments of which this rank has no part."""
        self.shares.step()
        for number in range(self.pace.rounds.fragments):
            if self.pace.departs(number, step):
                self.shares.set_out(number)

    def _change(self, step: int) -> Rounds | None:
        """The rounds that begin after `step` where they are others, by what all learners told of those before.

        The learner that comes last waits for the network alone and the others for it as well: what travels is hidden by
        the fewest steps that one of them needs, and the rest is not by any.
        """
        needs = [
            self.pace.needed(travelled=fragment.travelled, waited=fragment.waited, step_seconds=self._step_seconds)
            for fragment in self._fragments
            if fragment.landings
        ]
        self._needed, self._step_seconds = self._most_of_learner(max(needs, default=0)), math.inf
        told, self._told_needed = self._told_needed, 0
        changed = self.pace.changed(told, step=step)
        if changed is not None:
            self._needed = 0
        return changed

    def told(self) -> dict[str, Any]:
        """What has to be known to go on as these learners, as JSON has it."""
        asked = {"count": self.learners.count, "gradients": codec.encode(self.gradients)}
        rounds = {"rounds": codec.encode(self.pace.rounds), "origin": self.pace.origin, "begun": self.pace.begun}
        return {**asked, **rounds, "shares": self.shares.told()}

    def goes_on_from(self, told: Mapping[str, Any] | None) -> bool:
        """Whether learners that `told` so were as many and met as these; these have their rounds then."""
        if not told or told.get("count") != self.learners.count:
            return False
        if codec.decode(GradientSync, told.get("gradients")) != self.gradients:
            return False
        self._stand(told, range(self.learners.count))
        return True

    def take_over(self, told: Mapping[str, Any], *, origins: Origins, step: int) -> int:
        """Call after loading into `remembered`: these learners go on after `step` from where those stood that `told`
        so, learner i as learner `origins[i]`, or where that is None from what all of them go from, with nothing of its
        own. What was on its way is on its way again among them. Sequences of lost learners that count for nothing.
        """
        before = replace(self.shares)
        before.inherit(told["shares"], range(told["count"]))
        self._stand(told, origins)
        self.pace.rounds = as_usual(
            self.pace.rounds, self.pace.rounds, kind=self.pace.kind, learners=self.learners.count, were=told["count"]
        )
        for fragment in self._fragments:
            fragment.settle()
            if origins[self.learners.index] is None:
                fragment.come_in()
            self._send_again(fragment, step)
        return sum(before.unmet(learner) for learner in range(told["count"]) if learner not in origins)

    def _send_again(self, fragment: Fragment, step: int) -> None:
        known = any(self.shares.away[fragment.number])
        scale = self.shares.scale(fragment.number, self.learners.index) if known else 1.0
        fragment.set_out_again(step, scale=scale)

    def _stand(self, told: Mapping[str, Any], origins: Origins) -> None:
        self.pace.rounds, self.pace.origin = codec.decode(Rounds, told["rounds"]), int(told["origin"])
        self.pace.begun = int(told.get("begun", 0))
        if "shares" in told:
            self.shares.inherit(told["shares"], origins)

    def meet_once(self) -> None:
        """Every fragment sets out and lands once, as in a round, and learners tell each other how they are; the largest
        is away afterwards where it comes late. Collective."""
        ranked = sorted(self._fragments, key=lambda fragment: fragment.flat.numel)
        before, last = ranked[:-1], ranked[-1:]
        for fragment in last if before else ():
            fragment.land()
        for fragment in before:
            fragment.meet(0, lands=False, departs=True)
            fragment.land()
        for fragment in last:
            fragment.meet(0, lands=fragment.is_away, departs=True)
        if self.quorum is None:
            self._most_of_learner(0)
            self._telling.tell(self._said())
            self._telling.wait()
            self._telling.forget()

    def drain(self) -> None:
        """Nothing of this rank is on the network. Collective."""
        for fragment in self._fragments:
            fragment.drain()
        self._telling.wait()

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Inside, this learner holds the mean of all of them, which is what they have learnt together. Collective."""
        own = self._whole.read()
        self._whole.write(self._averaged(own.clone()))
        try:
            yield
        finally:
            self._whole.write(own)

    def evaluate(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None, ahead: Tensor | None = None
    ) -> Tensor:
        """Mean cross entropy of these targets over all data ranks of all learners, the same on every rank."""
        mean = self._laid.evaluate(tokens, targets, documents, ahead)
        count = torch.as_tensor(self._laid.num_targets, device=mean.device).to(mean.dtype)
        total, targets_everywhere = self.over_learners(torch.stack([mean * count, count]))
        return total / targets_everywhere.clamp(min=1.0)

    def is_finite(self) -> bool:
        """Every parameter of every learner is a finite number. Collective."""
        spoilt = torch.tensor(float(not self._laid.is_finite()), device=self._laid.device)
        return float(self.over_learners(spoilt)) == 0.0

    def mean(self) -> dict[str, Tensor]:
        """The mean of all learners by the names of their parameters and buffers, laid out as they are. Collective."""
        found: dict[str, Tensor] = {}
        for name, view in self._whole.views(self._averaged(self._whole.read())):
            found.setdefault(name, view)
        return found

    def over_learners(self, values: Tensor, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """The sum of `values` over all learners, or what `op` says, without waiting for what travels. Collective."""
        self._telling.wait()
        total = values.clone()
        dist.all_reduce(total, op=op, group=self._meeting)
        return total

    def of_all(self, what: str) -> dict[str, Tensor]:
        """By parameter the anchor or the momentum, as `what` says, which all learners have alike; live tensors laid out
        as the parameters are."""
        return {name: x for kept, name, x in self.remembered() if kept == what}

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """(what it is, of which parameter, tensor) of all that this keeps between steps. Collective."""
        self.drain()
        for fragment in self._fragments:
            yield from fragment.tensors()

    def expected(self, step: int) -> Iterator[tuple[str, str, Tensor]]:
        """As `tensors`, of a run that stands after `step`, to be loaded into."""
        self.drain()
        self._telling.forget()
        if self.quorum is not None:
            self.quorum.begin()
        for fragment in self._fragments:
            fragment.expect(step)
            yield from fragment.tensors()

    def remembered(self) -> Iterator[tuple[str, str, Tensor]]:
        """As `tensors`, live and without waiting for what travels."""
        for fragment in self._fragments:
            yield from fragment.remembered()

    def settle(self) -> None:
        """Call after loading into `expected`."""
        for fragment in self._fragments:
            fragment.settle()

    def left(self) -> list[Tensor]:
        """What rounding has left to be sent by this rank; live tensors."""
        return [left for fragment in self._fragments for left in fragment.average.left]

    def _averaged(self, flat: Tensor) -> Tensor:
        """`flat` itself, which holds the mean of what each learner gave."""
        self.drain()
        dist.all_reduce(flat, group=self._across)
        return flat.div_(self.learners.count)

    def _over_learner(self, values: Tensor) -> Tensor:
        if self._laid.mesh.everyone is not None:
            dist.all_reduce(values, group=self._laid.mesh.everyone)
        return values

    def _most_of_learner(self, needed: int) -> int:
        """The most steps that a rank of this learner needs a round to have, so that all of them have the same rounds.
        Nothing is asked where rounds stay."""
        if self.pace.most_every is None or self._laid.mesh.everyone is None:
            return needed
        most = torch.tensor(needed, device=self._laid.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._laid.mesh.everyone)
        return int(most)

    def _meet(self, step: int) -> Met | None:
        """What was told the last time, and this learner's own on its way to the others."""
        heard = self._telling.hear(step=step)
        if heard is not None:
            if self.told_at > self.pace.origin:
                self._told_needed = heard.needed
            self._changes = self._changes or heard.asked == _CHANGE
        self._telling.tell(self._said())
        self._asked, self._spoilt, self.told_at = _NOTHING, False, step
        return None if heard is None else Met(stop=heard.asked == _STOP, spoilt=heard.spoilt)

    def _said(self) -> Said:
        return Said(
            asked=self._asked,
            spoilt=self._spoilt,
            needed=self._needed,
            fingerprint=self._fingerprint(),
            landings=sum(fragment.landings for fragment in self._fragments),
        )


def build_outer_sync(design: Design, *, laid: Laid, learners: Learners, recorder: Recorder) -> OuterSync | None:
    """None where all ranks meet in every step."""
    if learners.across is None:
        return None
    return OuterSync(design, laid=laid, learners=learners, recorder=recorder)
