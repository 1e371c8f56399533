"""Quorum: learners that meet without those that have not come (decoupled DiLoCo, 2604.21428), and who they were.

Each learner looks between two steps whether the open round is called, which it is once `quorum` learners have done all
of its steps; it comes then with what it has done. Who does not come in time goes on by itself, and comes to a later
round with what it has learnt since; there it is given what all go from.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from meshwright.parallel.outer.learners import Learners
from meshwright.parallel.outer.pace import Pace
from meshwright.parallel.outer.roll import Arrival, Roll, Round, Terms
from meshwright.parallel.outer.updates import Held, Total
from meshwright.parallel.torch_compat import store_of_ranks
from meshwright.spec.errors import Problem, WorkerFailed

_NAME = "rounds of learners"


class Quorum:
    """One learner's part in rounds that some may miss; `total` sums over its ranks.

    `with_all` says whether all learners do something together after one of the steps from the first to the last that it
    is given: a round that ends at such a step, or is the last to end before it, ends with all of them. This rank itself
    has waited so many `waited_seconds` for others to come to the last round, in no collective.
    """

    def __init__(
        self, learners: Learners, *, pace: Pace, patience_seconds: float, device: torch.device, total: Total
    ) -> None:
        assert learners.across is not None
        self._learners, self._across, self._pace = learners, learners.across, pace
        self._device, self._total = device, total
        self._terms = Terms(
            learners=learners.count,
            quorum=pace.rounds.quorum,
            grace_seconds=pace.rounds.grace_seconds,
            patience_seconds=patience_seconds,
        )
        self.with_all: Callable[[int, int], bool] = lambda _first, _last: False
        self._base = 0
        self.waited_seconds = 0.0
        self.roll: Roll | None = None

    def begin(self) -> None:
        """All learners stand after one step, and go from the same."""
        self.roll = None

    def last_step(self, number: int) -> int:
        """The step after which round `number` ends."""
        return self._pace.origin + number * self._pace.rounds.every

    def met(self, step: int, *, fingerprint: int, stop: bool, spoilt: bool) -> Round | None:
        """The round in which this learner met after its step `step`; None where it goes on by itself. `fingerprint` is
        of what this rank has of all go from. Every rank of a learner calls it and is told the same.

        Raises WorkerFailed where learners do not go from the same, RuntimeError where others do not come.
        """
        roll = self._opened(step)
        if not self._agreed(self._comes(roll, step)):
            return None
        own = torch.tensor(fingerprint, dtype=torch.int64, device=self._device)
        arrival = Arrival(
            steps=step - self.last_step(self._base),
            base=self._base,
            fingerprint=int(self._total(own)),
            stop=stop,
            spoilt=spoilt,
        )
        start = time.perf_counter()
        if self._speaks:
            roll.come(self._learners.index, arrival, with_all=self._is_for_all)
        self.waited_seconds = time.perf_counter() - start
        self._agreed(True)
        found = roll.closed()
        self._base = found.number
        _check_alike(found, learner=self._learners.index)
        return found

    def catch_up(self, found: Round, held: Held) -> None:
        """Who is late has what all go from, given by the first of those that had it. Collective over those that
        came."""
        kept = [flat for flat in (held.anchor, held.momentum) if flat is not None]
        donor, own = found.donor, self._learners.index
        for learner in (each for each in found.members if found.late(each)):
            for flat in kept:
                if own == donor:
                    dist.send(flat, dist.get_global_rank(self._across, learner), group=self._across)
                elif own == learner:
                    dist.recv(flat, dist.get_global_rank(self._across, donor), group=self._across)

    @property
    def _speaks(self) -> bool:
        """This rank talks to other learners for all of its own."""
        return self._learners.mesh.rank == 0

    def _opened(self, step: int) -> Roll:
        """The roll since all learners stood after the same step, of which this is the next."""
        if self.roll is None:
            self._base = (step - 1 - self._pace.origin) // self._pace.rounds.every
            store, ranks = store_of_ranks(), dist.get_world_size(self._learners.everyone)
            # Every rank counts itself once each time that all of them stand together: no roll has the name of another.
            times = (store.add(_NAME, 1) - 1) // ranks
            name = f"{_NAME} {times}"
            self.roll = Roll(store, name=name, terms=self._terms, first=self._base + 1)
        return self.roll

    def _comes(self, roll: Roll, step: int) -> bool:
        """This learner has done all steps of the open round, or is called to it."""
        if not self._speaks:
            return False
        open_ = roll.open()
        return step >= self.last_step(open_.number) or self._terms.is_called(open_)

    def _agreed(self, comes: bool) -> bool:
        """What the rank that speaks for this learner says. Collective over its ranks."""
        everyone = self._learners.mesh.everyone
        if everyone is None:
            return comes
        told = torch.tensor(int(comes), device=self._device)
        dist.broadcast(told, dist.get_global_rank(everyone, 0), group=everyone)
        return bool(told)

    def _is_for_all(self, number: int) -> bool:
        return self.with_all(self.last_step(number), self.last_step(number + 1) - 1)


def _check_alike(found: Round, *, learner: int) -> None:
    """Raises WorkerFailed where those that are not late do not go from the same."""
    prints = {each: entry.fingerprint for each, entry in found.arrivals.items() if not found.late(each)}
    if len(set(prints.values())) < 2:
        return
    usual = prints[found.donor]
    other = ", ".join(str(each) for each in sorted(prints) if prints[each] != usual)
    what = f"learners {found.donor} and {other} came to round {found.number} from unlike parameters"
    why, fix = "a byte changed on its way or in memory", "--resume goes on from the last checkpoint"
    raise WorkerFailed(Problem(what=what, where=f"learner {learner}", why=why, fix=fix))
