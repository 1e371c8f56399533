"""A fragment of the model that learners meet in: when it sets out and lands, and what is kept of it between."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from meshwright.parallel.outer.average import Average
from meshwright.parallel.outer.flat import Flat
from meshwright.parallel.outer.updates import Held, Update
from meshwright.spec.synchronize import Rounds

_INTEGERS = {4: torch.int32, 8: torch.int64}


class Fragment:
    """Parameters `flat` that set out `starts` steps into every round and land `rounds.delay` steps later."""

    def __init__(
        self, flat: Flat, *, rounds: Rounds, starts: int, update: Update, average: Callable[[Tensor], Average]
    ) -> None:
        self.flat = flat
        self._rounds, self._starts, self._update = rounds, starts, update
        self.held = Held(
            anchor=flat.read(),
            momentum=flat.zeros() if update.keeps_momentum else None,
            sent=flat.zeros() if update.keeps_sent else None,
        )
        self.average = average(self.held.anchor)
        self.landings = 0
        self._is_away = False
        self._arrived: Tensor | None = None

    def begin(self) -> None:
        """Every learner goes on from what it has, which is the same on all of them, and nothing travels."""
        self.held.anchor.copy_(self.flat.read())
        for kept in (self.held.momentum, self.held.sent, *self.average.left):
            if kept is not None:
                kept.zero_()
        self._is_away, self._arrived = False, None

    def departs(self, step: int) -> bool:
        return step % self._rounds.every == self._starts % self._rounds.every

    def lands(self, step: int) -> bool:
        """What set out `delay` steps before is due now."""
        return self._is_away and self.departs(step - self._rounds.delay)

    def meet(self, *, lands: bool, departs: bool) -> None:
        """What is due lands, and what is due sets out; waits for what lands."""
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
            spare = not self._update.mixes and own is not self.held.anchor
            out = torch.sub(self.held.anchor, own, out=own if spare else None)
        self.average.start(out)
        self._is_away = True
        if not self._rounds.delay:
            self._land(own)

    def land(self) -> None:
        """What is away lands at once."""
        if self._is_away:
            self.meet(lands=True, departs=False)

    def drain(self) -> None:
        """Nothing is on the network; what was lands when it is due."""
        if self._is_away and self._arrived is None:
            self._arrived = self.average.finish()

    def fingerprint(self) -> int:
        """A number that is the same where every bit of the anchor is."""
        anchor = self.held.anchor
        return int(anchor.view(_INTEGERS[anchor.element_size()]).sum(dtype=torch.int64))

    def tensors(self, *, arriving: bool | None = None) -> Iterator[tuple[str, str, Tensor]]:
        """(what it is, of which parameter, tensor) of all that is kept between steps, in live tensors.

        After `drain`. Of what is to be loaded, `arriving` says whether something is to land.
        """
        if arriving is not None:
            self._is_away, self._arrived = arriving, self.flat.zeros() if arriving else None
        kept = {"anchor": self.held.anchor, "momentum": self.held.momentum, "sent": self.held.sent}
        for what, flat in {**kept, "arrived": self._arrived}.items():
            if flat is not None:
                yield from ((what, name, view) for name, view in self.flat.views(flat))

    def settle(self) -> None:
        """Call after loading into `tensors`: of a parameter that is held twice, both are what the first one is."""
        for flat in (self.held.anchor, self.held.momentum, self.held.sent, self._arrived):
            first: dict[str, Tensor] = {}
            for name, view in () if flat is None else self.flat.views(flat):
                view.copy_(first.setdefault(name, view))

    def is_away(self, step: int) -> bool:
        """Whether it travels after step `step` of a run that has kept its rounds."""
        since = (step - self._starts) % self._rounds.every
        return step - since >= self._starts and since < self._rounds.delay

    def _land(self, own: Tensor) -> Tensor:
        change = self.average.finish() if self._arrived is None else self._arrived
        own = self._update.land(self.held, own, change)
        self.flat.write(own)
        self._is_away, self._arrived = False, None
        self.landings += 1
        return own
