"""Watch: reads what every rank says of every step, and tells who is slow, which link, and who waits for data."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshwright.spec.incident import Incident, Trouble
from meshwright.spec.rank_words import ranks_in_words
from meshwright.spec.units import format_percent, format_seconds
from meshwright.train.events import (
    Action,
    Event,
    Examine,
    Examined,
    LinksProbed,
    Log,
    ProbeLinks,
    RankTimes,
    Saved,
    Started,
    StepDone,
)
from meshwright.train.observe import incidents
from meshwright.train.observe.described import Described, undescribed
from meshwright.train.observe.health import Health
from meshwright.train.observe.links import SlowLink, least, slow_from_start, slow_links
from meshwright.train.observe.slowness import WINDOW, Communication, DataWaits, Finding, SlowRanks

SETTLING = 5  # steps of a process that say nothing of the next ones
PATIENCE = 25  # steps until links that were not slow are probed again, then twice as many and so on,
GROWN = 1.15  # unless waits are so many times as long as then
_SLOW_SAVE = 3.0  # times the median of the saves before
_SAVES = 3
_LEAST_SECONDS = 1.0
_FIRST_SAVE = 600.0  # seconds, while there are no saves before to hold one against
_FIXES = {
    Trouble.RANK: "see what else runs on its machine, or leave that machine out and --resume with a plan for the rest",
    Trouble.LINK: "see the cable, port and switch between them; meshwright diagnose says which order of axes helps",
    Trouble.DATA: "put the text and its cache on a faster disk, or prepare it before the run",
    Trouble.DISK: "write checkpoints to a faster disk, or less often",
}


@dataclass(slots=True, kw_only=True)
class Watch:
    """Judges on every rank of a learner alike; incidents are kept in `run_dir`, by the one rank that has it.

    `members` are the ranks of the plan that it watches, `peers` a label for each, alike where their work is.
    `instrumented` says which steps were slowed on purpose; those beside which a checkpoint is written are not judged
    either. What begins is examined before it is told: a slow rank says
    how its machine does, and where all wait longer for each other and no rank is slow, links between hosts are probed
    and held against what they gave when the run began. What they give then is held against each other, and against
    what the cluster is described as (`describe`).
    """

    members: Sequence[int]
    peers: Sequence[int]
    health: Health
    instrumented: Callable[[int], bool]
    describe: Callable[[LinksProbed], Described] = undescribed
    run_dir: Path | None = None
    ranks: SlowRanks = field(init=False)
    data: DataWaits = field(default_factory=DataWaits)
    communication: Communication = field(default_factory=Communication)
    links: LinksProbed | None = None
    doubtful: bool = False
    from_start: dict[tuple[str, ...], tuple[int, ...]] = field(default_factory=dict)
    open: dict[tuple[Trouble, tuple[int, ...]], Incident] = field(default_factory=dict)
    pending: dict[int, Finding] = field(default_factory=dict)
    writes: list[float] = field(default_factory=list)
    writing_seconds: float = 0.0
    step: int = 0
    seen: int = 0
    due: int = 0
    patience: int = PATIENCE
    in_vain: float = 0.0
    suspicious: LinksProbed | None = None

    def __post_init__(self) -> None:
        self.ranks = SlowRanks(self.peers)

    def react(self, event: Event) -> Iterable[Action]:
        if isinstance(event, StepDone):
            self.step = event.step
            return self._step(event, event.ranks) if event.ranks is not None else ()
        if isinstance(event, Started):
            self._forget_others(event)
        if isinstance(event, Examined):
            return self._examined(event)
        if isinstance(event, LinksProbed):
            return self._probed(event)
        return self._saved(event) if isinstance(event, Saved) else ()

    def _forget_others(self, event: Started) -> None:
        """Where ranks have changed, what was told of those before is over: the new ones are judged afresh."""
        if event.why and self.run_dir is not None:
            for incident in incidents.incidents_of(self.run_dir):
                if incident.ended is None:
                    self._keep(replace(incident, ended=event.step))

    def _step(self, event: StepDone, times: RankTimes) -> list[Action]:
        self.seen += 1
        late = self._late_save(event.seconds if times.writing else 0.0)
        if late:
            return late
        if self.seen <= SETTLING or self.instrumented(event.step):
            return []
        if self.links is None and self.seen > SETTLING + 1:
            return [ProbeLinks()]
        if times.writing:
            return []
        actions: list[Action] = []
        for found in self.ranks.see(times.own, step_seconds=event.seconds):
            actions += self._rank(found)
        for found in self.data.see(times.input, step_seconds=event.seconds):
            actions += self._data(found)
        for found in self.communication.see(times.waited, step_seconds=event.seconds):
            if not found.begins:
                self.in_vain = 0.0
                actions += self._end_links()
        if self._wants_probe():
            actions.append(ProbeLinks(num_bytes=self.links.num_bytes if self.links else 0))
            self.due = self.seen + self.patience
            self.patience *= 2
        if self.seen % WINDOW == 0 and not self.ranks.suspected:
            self.health.refresh()
        return actions

    def _wants_probe(self) -> bool:
        """All wait longer for each other, no rank is slow, and there are links that could be; or some were slow from
        the start, and may have been mended. Those that were probed in vain are so again soon, then ever later, and at
        once where waits rise anew."""
        several = self.links is not None and len(self.links.hosts) > 1
        wanted = self.communication.risen and not self._told_links()
        due = self.seen >= self.due or (wanted and self.communication.ratio > GROWN * self.in_vain)
        return several and (wanted or bool(self.from_start)) and not self.ranks.slow.any() and due

    def _told_links(self) -> list[tuple[int, ...]]:
        """Ranks of the links that are told to have become slow."""
        first = self.from_start.values()
        return [ranks for trouble, ranks in self.open if trouble is Trouble.LINK and ranks not in first]

    def _rank(self, found: Finding) -> list[Action]:
        (rank,) = found.ranks
        if found.begins:
            self.pending[rank] = found
            return [Examine(rank=rank)]
        return self._end(Trouble.RANK, found.ranks, f"{self._named(rank)} is as fast as its peers again")

    def _examined(self, event: Examined) -> list[Action]:
        found = self.pending.pop(event.rank)
        times = f"{found.ratio:.2f} times its peers' own time in the last {WINDOW} steps"
        what = f"{self._named(event.rank)} is slow: {times}"
        evidence = (event.words,) if event.words else ()
        hosts = () if self.links is None else (self.links.hosts[self.links.host_of[event.rank]],)
        return self._begin(Trouble.RANK, what, ranks=found.ranks, hosts=hosts, ratio=found.ratio, evidence=evidence)

    def _data(self, found: Finding) -> list[Action]:
        named = ranks_in_words([self.members[rank] for rank in found.ranks])
        who = "every rank" if len(found.ranks) == len(self.peers) else named
        if not found.begins:
            ranks = next((ranks for trouble, ranks in self.open if trouble is Trouble.DATA), ())
            return self._end(Trouble.DATA, ranks, "no rank waits for data any more")
        verb = "wait" if len(found.ranks) > 1 and who != "every rank" else "waits"
        what = f"{who} {verb} for data {format_percent(found.ratio)} of the step"
        return self._begin(Trouble.DATA, what, ranks=found.ranks, ratio=found.ratio)

    def _probed(self, event: LinksProbed) -> list[Action]:
        """What links give at first is held against each other, twice where some are slow; later ones against that."""
        if self.links is None:
            self.links = event
            self.doubtful = bool(slow_from_start(event, self.describe(event)))
            return [ProbeLinks(num_bytes=event.num_bytes)] if self.doubtful else []
        if self.doubtful:
            self.links, self.doubtful = least(self.links, event), False
            return self._first_links(self.links)
        actions = self._mended_links(event) if self.from_start else []
        return [*actions, *self._slower_links(self.links, event)] if self.communication.risen else actions

    def _slower_links(self, before: LinksProbed, now: LinksProbed) -> list[Action]:
        """Links that are slower than they were, in two probes in a row."""
        found = slow_links(before, now if self.suspicious is None else least(self.suspicious, now))
        if found and self.suspicious is None:
            self.suspicious = now
            return [ProbeLinks(num_bytes=now.num_bytes)]
        self.suspicious = None
        said = "all ranks wait longer for each other, and none is slow beside its peers"
        told = [link for link in found if (Trouble.LINK, self._ranks_of(link)) not in self.open]
        if told:
            self.in_vain, self.patience = 0.0, PATIENCE
        else:
            self.in_vain = self.communication.ratio
        return [action for link in told for action in self._link(link, evidence=(said,))]

    def _first_links(self, probed: LinksProbed) -> list[Action]:
        actions: list[Action] = []
        for link in slow_from_start(probed, self.describe(probed)):
            self.from_start[link.hosts] = self._ranks_of(link)
            actions += self._link(link)
        self.due = self.seen + self.patience
        return actions

    def _mended_links(self, event: LinksProbed) -> list[Action]:
        """Those that were slow from the start and are not any more are held against what they give now."""
        assert self.links is not None, "links were probed before"
        slow = {link.hosts for link in slow_from_start(event, self.describe(event))}
        mended = [hosts for hosts in self.from_start if hosts not in slow]
        said = "links between {} give what others do".format
        ranks = [self.from_start.pop(hosts) for hosts in mended]
        if mended:
            self.links = least(self.links, event)
        ended = zip(ranks, mended, strict=True)
        return [action for who, hosts in ended for action in self._end(Trouble.LINK, who, said(" and ".join(hosts)))]

    def _ranks_of(self, link: SlowLink) -> tuple[int, ...]:
        assert self.links is not None, "links were probed before"
        hosts = [self.links.hosts.index(host) for host in link.hosts]
        return tuple(rank for rank, host in enumerate(self.links.host_of) if host in hosts)

    def _link(self, link: SlowLink, *, evidence: tuple[str, ...] = ()) -> list[Action]:
        ratio, ranks = link.before / link.now, self._ranks_of(link)
        return self._begin(Trouble.LINK, link.words, ranks=ranks, hosts=link.hosts, ratio=ratio, evidence=evidence)

    def _end_links(self) -> list[Action]:
        said = "ranks wait for each other no longer than at first"
        return [action for ranks in self._told_links() for action in self._end(Trouble.LINK, ranks, said)]

    def _late_save(self, seconds: float) -> list[Action]:
        """A save that goes on beside a step of `seconds` (0: none does), much longer than those before it; told once,
        and over with it."""
        self.writing_seconds = self.writing_seconds + seconds if seconds else 0.0
        told = (Trouble.DISK, ()) in self.open
        if not seconds:
            return self._end(Trouble.DISK, (), "the checkpoint is written") if told else []
        usual = self._usual_save()
        limit = _FIRST_SAVE if usual is None else _longest(usual)
        if told or self.writing_seconds < limit:
            return []
        before = "" if usual is None else f"; those before took {format_seconds(usual)}"
        what = f"a checkpoint has been written for {format_seconds(self.writing_seconds)} and is not whole yet{before}"
        return self._begin(Trouble.DISK, what, ratio=self.writing_seconds / (usual or limit))

    def _usual_save(self) -> float | None:
        return statistics.median(self.writes) if len(self.writes) >= _SAVES else None

    def _saved(self, event: Saved) -> list[Action]:
        """A save that took much longer than those before it; told by itself, for the next may be quick again."""
        took = event.write_seconds
        if took is None:
            return []
        usual = self._usual_save() or took
        self.writes = [*self.writes[-15:], took]
        if took < _longest(usual):
            return []
        what = f"a checkpoint took {format_seconds(took)} to be written, {took / usual:.1f} times those before"
        actions = self._begin(Trouble.DISK, what, ratio=took / usual)
        self._close(Trouble.DISK, ())
        return actions

    def _begin(
        self,
        trouble: Trouble,
        what: str,
        *,
        ranks: tuple[int, ...] = (),
        hosts: tuple[str, ...] = (),
        ratio: float,
        evidence: tuple[str, ...] = (),
    ) -> list[Action]:
        incident = Incident(
            trouble=trouble,
            begun=self.step,
            at=time.time(),
            what=what,
            ranks=tuple(self.members[rank] for rank in ranks),
            hosts=hosts,
            ratio=ratio,
            evidence=evidence,
            fix=_FIXES[trouble],
        )
        self.open[trouble, ranks] = incident
        self._keep(incident)
        return [Log(values={"incidents": float(len(self.open))}, text=incident.line)]

    def _end(self, trouble: Trouble, ranks: tuple[int, ...], said: str) -> list[Action]:
        incident = self._close(trouble, ranks)
        if incident is None:
            return []
        lasted = f"after {self.step - incident.begun:,} steps"
        return [Log(values={"incidents": float(len(self.open))}, text=f"{said}, {lasted}")]

    def _close(self, trouble: Trouble, ranks: tuple[int, ...]) -> Incident | None:
        incident = self.open.pop((trouble, ranks), None)
        if incident is not None:
            self._keep(replace(incident, ended=self.step))
        return incident

    def _keep(self, incident: Incident) -> None:
        if self.run_dir is not None:
            incidents.keep(self.run_dir, incident)

    def _named(self, rank: int) -> str:
        name = f"rank {self.members[rank]}"
        if self.links is None or len(self.links.hosts) < 2:
            return name
        return f"{name} ({self.links.hosts[self.links.host_of[rank]]})"


def _longest(usual: float) -> float:
    """Seconds of a save that are not yet remarkable where others take `usual`."""
    return max(_SLOW_SAVE * usual, usual + _LEAST_SECONDS)
