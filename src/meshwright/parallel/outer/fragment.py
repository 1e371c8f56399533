"""A fragment of the model that learners meet in: when it sets out and lands, and what is kept of it between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from meshwright.cost.learner_holdings import ANCHOR, AWAY, MOMENTUM, SENT
from meshwright.parallel.clip import local_part
from meshwright.parallel.outer.average import Average
from meshwright.parallel.outer.flat import Flat
from meshwright.parallel.outer.pace import Pace
from meshwright.parallel.outer.updates import Held, Update

CatchUp = Callable[[Held], None]

_INTEGERS = {4: torch.int32, 8: torch.int64}


class Fragment:
    """Parameters `flat`, fragment `number` of those that set out and land as `pace` says.

    `travelled` steps went by until the last one was there, but for the `waited` seconds that it was waited for. What
    `remembers` keeps what it sent until that has landed, so that it can be sent again among others.
    """

    def __init__(
        self,
        flat: Flat,
        *,
        number: int,
        pace: Pace,
        update: Update,
        average: Callable[[Tensor], Average],
        remembers: bool = False,
    ) -> None:
        self.flat, self.number = flat, number
        self._pace, self._update = pace, update
        self._away = flat.zeros() if remembers else None
        self.held = Held(
            anchor=flat.read(),
            momentum=flat.zeros() if update.keeps_momentum else None,
            sent=flat.zeros() if update.keeps_sent else None,
        )
        self.average = average(self.held.anchor)
        self.landings = self.travelled = 0
        self.waited = 0.0
        self._lands_at: int | None = None
        self._arrived: Tensor | None = None

    def begin(self, momentum: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Every learner goes on from what it has, which is the same on all of them, and nothing travels. The outer
        optimizer begins, but for the `momentum` of the parameters that there is one of."""
        self.held.anchor.copy_(self.flat.read())
        for kept in (self.held.sent, *self.average.left):
            if kept is not None:
                kept.zero_()
        for name, view in () if self.held.momentum is None else self.flat.views(self.held.momentum):
            if name in momentum:
                local_part(view).copy_(local_part(momentum[name]))
            else:
                local_part(view).zero_()
        self._lands_at = self._arrived = None

    @property
    def is_away(self) -> bool:
        """What set out has not landed."""
        return self._lands_at is not None

    def departs(self, step: int) -> bool:
        return self._pace.departs(self.number, step)

    def lands(self, step: int) -> bool:
        """What set out `delay` steps before is due now."""
        return self._lands_at is not None and step >= self._lands_at

    def go_on(self) -> bool:
        """What is on its way goes on without waiting. Whether it is all there, or nothing is on its way."""
        return not self.is_away or self._arrived is not None or self.average.advance()

    def watch(self) -> None:
        """A step has gone by while it may have travelled."""
        if not self.go_on():
            self.travelled += 1

    def meet(
        self, step: int, *, lands: bool, departs: bool, scale: float = 1.0, catch_up: CatchUp | None = None
    ) -> None:
        """What is due after step `step` lands, and what is due sets out, times `scale`; waits for what lands. What is
        held is brought up to date by `catch_up` before it sets out."""
        own, out = self.flat.read(), None
        if departs and self._update.sets_out_first:
            out = torch.sub(self.held.anchor, own, out=own)
        if lands:
            own = self._land(own)
        if not departs:
            return
        if self.held.sent is not None:
            self.held.sent.copy_(own)
        if out is None:
            read_again = self._update.mixes and not self._pace.rounds.delay
            spare = own is not self.held.anchor and not read_again
            out = torch.sub(self.held.anchor, own, out=own if spare else None)
        if self._away is not None:
            self._away.copy_(out)
        if catch_up is not None:
            catch_up(self.held)
        self.average.start(out if scale == 1.0 else out.mul_(scale))
        self._lands_at, self.travelled = step + self._pace.rounds.delay, 0
        if not self._pace.rounds.delay:
            self._land(own)

    def land(self) -> None:
        """What is away lands at once."""
        if self._lands_at is not None:
            self.meet(self._lands_at, lands=True, departs=False)

    def drain(self) -> None:
        """Nothing is on the network; what was lands when it is due."""
        if self.is_away and self._arrived is None:
            self._arrived = self.average.finish()

    def fingerprint(self) -> int:
        """A number that is the same where every bit of the anchor is."""
        anchor = self.held.anchor
        return int(anchor.view(_INTEGERS[anchor.element_size()]).sum(dtype=torch.int64))

    def expect(self, step: int) -> None:
        """It stands as after step `step` of a run that kept its pace, but for what is in its tensors."""
        self._lands_at = self._lands_after(step)
        self._arrived = None if self._lands_at is None else self.flat.zeros()

    def remembered(self) -> Iterator[tuple[str, str, Tensor]]:
        """As `tensors`, of what is there while something travels: what was sent in place of what arrived."""
        kept = {ANCHOR: self.held.anchor, MOMENTUM: self.held.momentum, SENT: self.held.sent, AWAY: self._away}
        for what, flat in kept.items():
            if flat is not None:
                yield from ((what, name, view) for name, view in self.flat.views(flat))

    def set_out_again(self, step: int, *, scale: float) -> None:
        """What was on its way after `step`, as `remembered`, is on its way again."""
        self._lands_at, self._arrived = self._lands_after(step), None
        if self._lands_at is not None:
            assert self._away is not None, "what may have to be sent again is kept"
            self.average.start(self._away * scale)

    def come_in(self) -> None:
        """This learner goes from the anchor, and has sent nothing."""
        self.flat.write(self.held.anchor)
        if self.held.sent is not None:
            self.held.sent.copy_(self.held.anchor)
        if self._away is not None:
            self._away.zero_()

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """(what it is, of which parameter, tensor) of all that is kept between steps, in live tensors. After `drain`
        or `expect`."""
        kept = {ANCHOR: self.held.anchor, MOMENTUM: self.held.momentum, SENT: self.held.sent}
        for what, flat in {**kept, "arrived": self._arrived}.items():
            if flat is not None:
                yield from ((what, name, view) for name, view in self.flat.views(flat))

    def settle(self) -> None:
        """Call after loading into `tensors` or `remembered`: of a parameter that is held twice, both are what the first
        one is."""
        for flat in (self.held.anchor, self.held.momentum, self.held.sent, self._away, self._arrived):
            first: dict[str, Tensor] = {}
            for name, view in () if flat is None else self.flat.views(flat):
                view.copy_(first.setdefault(name, view))

    def _lands_after(self, step: int) -> int | None:
        left = self._pace.away_since(self.number, step)
        return None if left is None else left + self._pace.rounds.delay

    def _land(self, own: Tensor) -> Tensor:
        start = time.perf_counter()
        change = self.average.finish() if self._arrived is None else self._arrived
        self.waited = time.perf_counter() - start
        own = self._update.land(self.held, own, change, learning_rate=self._pace.rounds.learning_rate)
        self.flat.write(own)
        self._lands_at = self._arrived = None
        self.landings += 1
        return own
