"""Lookout: who of the workers of one launch failed, said as soon as that is known; what is left of them is ended.

The agent tells when all have ended, which a worker that is stopped, or held in a call of torch's, does not by itself:
it would be waited for half a minute.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from meshwright.run import failure
from meshwright.run.failure import Failure, Nearness
from meshwright.run.signals import send
from meshwright.run.vigil import STACK_SECONDS, Stood, Vigil, stood_still
from meshwright.run.waiting import never_came
from meshwright.run.workers import Asked, Worker, Workers
from meshwright.spec.errors import Problem
from meshwright.spec.incident import Incident, Trouble
from meshwright.train.observe import incidents
from meshwright.train.observe.inquest import Inquest, inquest
from meshwright.train.observe.stacks import path_of as stack_of
from meshwright.train.observe.whereabouts import last_seen

_DOUBT_SECONDS = 0.25  # others may say more of it
_GRACE_SECONDS = 0.6  # for which a rank that has lost another one may do nothing before it is ended
_ENDING_SECONDS = 3.0  # for it to end in, whatever it does
_LOOKS = 2  # at one that is stopped: what stands still for a moment may end by itself


@dataclass(slots=True, kw_only=True)
class Lookout:
    """Of the workers of `module`, which have `ranks` in the order of this host, `alone` where there is only one in all.

    They may keep others waiting for `patience_seconds`. `asked` is what signals asked of them. In the end
    `ended` are ranks that this process had to end, `missing` those that did not come to where others waited, and
    `stood` those that stood still where nobody waited for them.
    """

    run_dir: Path
    ranks: Sequence[int]
    alone: bool
    module: str
    patience_seconds: float
    say: Callable[[str], None]
    asked: Asked
    ended: set[int] = field(default_factory=set)
    missing: tuple[int, ...] = ()
    stood: tuple[Stood, ...] = ()
    _workers: Workers = field(init=False)
    _vigil: Vigil = field(init=False)
    _looks: Counter[int] = field(default_factory=Counter)
    _first: Failure | None = None
    _since: float = 0.0

    def __post_init__(self) -> None:
        self._workers = Workers(len(self.ranks), module=self.module)
        self._vigil = Vigil(self.run_dir, patience_seconds=self.patience_seconds, alone=self.alone)

    def look(self) -> None:
        """Asked again and again until all have ended."""
        workers = {self.ranks[worker.local]: worker for worker in self._workers.look()}
        failed = {rank: found for rank, worker in workers.items() if (found := worker.failure) is not None}
        running = {rank: worker for rank, worker in workers.items() if worker.ended is None}
        if self.stood:
            self._end_those_that_stood(running)
        elif failed:
            self._hear(failed, workers, running)
            self._end_others(running)
        else:
            self._watch(running)

    def _watch(self, running: Mapping[int, Worker]) -> None:
        """Ranks that nobody waits for are named where they stand still, and asked for their stacks."""
        self.stood = self._vigil.look({rank: worker.process for rank, worker in running.items()})
        if self.stood:
            self._since = time.time()
            ranks = tuple(each.rank for each in self.stood)
            self._tell(stood_still(self.stood), ranks=ranks, step=max(each.seen.step for each in self.stood))
            for rank in ranks:
                send(running[rank].process, signal.SIGUSR2)

    def _end_those_that_stood(self, running: Mapping[int, Worker]) -> None:
        late = time.time() - self._since > STACK_SECONDS
        for each in self.stood:
            if each.rank in running and (late or _has_stack(self.run_dir, each.rank)):
                self._kill(each.rank, running[each.rank])
        if time.time() - self._since > STACK_SECONDS + _GRACE_SECONDS:
            for rank, worker in running.items():
                self._kill(rank, worker)

    def _hear(
        self, failed: Mapping[int, ProcessFailure], workers: Mapping[int, Worker], running: Mapping[int, Worker]
    ) -> None:
        """Who failed first is judged once it is known: at once where that is sure, and not before the agent has ended
        where it alone knows how one of them ended."""
        if self._first is not None:
            return
        found = failure.read(failed, ended=self.ended)
        untold = [worker for worker in workers.values() if worker.is_untold]
        since = min(worker.ended or time.time() for worker in [*untold, *(workers[rank] for rank in failed)])
        if found[0].nearness in (Nearness.OWN, Nearness.KILLED):
            self._judge(found)
        elif untold or len(workers) < len(self.ranks):
            self._since = since
        elif not running or time.time() - since >= _DOUBT_SECONDS:
            self._judge(found, running=running)

    def conclude(self, failed: Mapping[int, ProcessFailure]) -> None:
        """The agent has ended, and this is all that it says."""
        if failed and self._first is None and not self.stood:
            self._judge(failure.read(failed, ended=self.ended), running=self.ended)

    def _judge(self, found: Sequence[Failure], *, running: Collection[int] = ()) -> None:
        """Who failed first is told, unless by itself it says it better."""
        first = found[0]
        self._first, self._since = first, time.time()
        if first.nearness is Nearness.OWN or self.asked.at_once:
            return
        if self.asked.once and failure.are_asked(found):
            return
        known = inquest(self.run_dir)
        waited = [(each.rank, each.waiting) for each in found if each.waiting is not None]
        if first.nearness is Nearness.LOST_PEER and any(waiting.timed_out for _, waiting in waited):
            self.missing = known.suspects or tuple(sorted(running))
            seen = {rank: at for rank in self.missing if (at := last_seen(self.run_dir, rank)) is not None}
            self._tell(never_came(self.missing, waited=waited, last_seen=seen), ranks=self.missing, known=known)
        elif first.nearness is Nearness.LOST_PEER:
            self._tell(Problem(what=f"rank {first.rank} lost contact with another rank"), known=known)
        else:
            self._tell(Problem(what=failure.ended_how(first)), ranks=(first.rank,), known=known)

    def _tell(
        self, problem: Problem, *, ranks: tuple[int, ...] = (), step: int | None = None, known: Inquest | None = None
    ) -> None:
        """It is on the screen and in the run's records."""
        if step is None:
            marks = [seen.step for rank in self.ranks if (seen := last_seen(self.run_dir, rank)) is not None]
            step = max(marks, default=0)
        evidence = (*((problem.why,) if problem.why else ()), *(known.sentences if known is not None else ()))
        incidents.keep(
            self.run_dir,
            Incident(
                trouble=Trouble.LOST,
                begun=step,
                at=time.time(),
                what=problem.what,
                ranks=ranks,
                evidence=evidence,
                fix=problem.fix,
                ended=step,
            ),
        )
        with suppress(OSError):
            self.say(f"{problem.what}; what is left of the run ends")

    def _end_others(self, running: Mapping[int, Worker]) -> None:
        """Those that are stopped, which the agent asks to end and which do not hear it, and those that have had time
        enough since another one was lost: they may be held where no signal is heard."""
        if not self._since:
            return
        lost = self._first is None or self._first.nearness is not Nearness.OWN
        for rank, worker in running.items():
            self._looks[rank] = self._looks[rank] + 1 if worker.is_stopped else 0
            idle = worker.idle_seconds(since=self._since) > _GRACE_SECONDS
            late = lost and (idle or time.time() - self._since > _ENDING_SECONDS)
            if late or self._looks[rank] == _LOOKS:
                self._kill(rank, worker)

    def _kill(self, rank: int, worker: Worker) -> None:
        self.ended.add(rank)
        send(worker.process, signal.SIGKILL)


def _has_stack(run_dir: Path, rank: int) -> bool:
    with suppress(OSError):
        return stack_of(run_dir, rank).stat().st_size > 0
    return False
