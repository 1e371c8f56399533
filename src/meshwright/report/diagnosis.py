"""Diagnosis of a run from its directory, dead or alive: who or what was at fault, since when, how that is known."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.report.run_files import RunFiles, read_run
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.goodput import Mark, Moment
from meshwright.spec.incident import Incident
from meshwright.spec.units import format_percent, format_seconds
from meshwright.train.observe.collective_log import Entry, RankLog, read_logs
from meshwright.train.observe.inquest import inquest
from meshwright.train.observe.timekeeper import marks_of
from meshwright.train.observe.whereabouts import last_seen

if TYPE_CHECKING:
    from meshwright.report.congestion import Congestion

_SILENT_SECONDS = 5.0  # after which a rank is told that is heard of less than the others
_MOST_RANKS = 16
_NAMES = {"default_pg": "all ranks", "undefined": ""}  # of groups, as torch calls them


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUse:
    """What one rank did in its newest `steps`, seconds a step: computing, and held in collectives; of none, and None,
    where not every step has a collective. `longest` is the one that held it most and `where` the rank was last,
    `silent_seconds` before the last word of any rank."""

    rank: int
    steps: int
    own_seconds: float | None
    waited_seconds: float | None
    longest: str
    where: str
    silent_seconds: float


_FAILED = "failed: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """`state` is how the run stands, `found` what its ranks left behind say of the end, `incidents` what was told while
    it ran, `failures` why earlier launches ended, `rounds` that learners meet in others than planned. `healthy` where
    nothing was found, told or failed."""

    run: str
    step: int
    state: str
    found: tuple[str, ...]
    incidents: tuple[Incident, ...]
    failures: tuple[str, ...]
    rounds: str
    ranks: tuple[RankUse, ...]
    traffic: Congestion | None

    @property
    def healthy(self) -> bool:
        return not (self.found or self.incidents or self.failures or self.state.startswith(_FAILED))

    def lines(self) -> list[str]:
        """All of it as text."""
        told = [f"{self.run}: step {self.step:,}, {self.state}"]
        told += [f"  found  {sentence}" for sentence in self.found]
        for incident in self.incidents:
            told += [f"  {line}" for line in incident_lines(incident)]
        told += [f"  failed before  {why}" for why in self.failures]
        if self.healthy:
            told.append("  nothing was wrong: no rank, link or disk was told")
        told += [f"  rounds  {self.rounds}"] if self.rounds else []
        told += [f"  {line}" for line in _table(self.ranks)]
        if self.traffic is not None:
            told += [f"  traffic  {line}" for line in self.traffic.lines()]
        return told


def diagnose(path: Path | str) -> Diagnosis:
    """The diagnosis of the run directory at `path`. Raises ConfigError where it is none."""
    from meshwright.report.congestion import congestion

    files = read_run(path)
    if files.is_plan:
        fix = "name the directory of a run"
        raise ConfigError(Problem(what="a plan has not run yet", where=str(path), fix=fix))
    marks = marks_of(files.path)
    ended = marks[-1] if marks and marks[-1].what is Moment.ENDED else None
    world = files.design.plan.world_size
    logs = {rank: log for rank, log in read_logs(files.path).items() if rank < world}
    well = ended is not None and not ended.why
    traffic = None
    if files.predicted is not None and files.measured is not None:
        traffic = congestion(files.design, predicted=files.predicted, measured=files.measured)
    return Diagnosis(
        run=files.name,
        step=int(files.steps[-1]["step"]) if files.steps else 0,
        state=_state(ended, logs),
        found=() if well else _found(files, ended),
        incidents=files.incidents,
        failures=_failures(marks),
        rounds=files.rounds,
        ranks=_uses(logs, files.path),
        traffic=traffic,
    )


def incident_lines(incident: Incident) -> list[str]:
    """What an incident was, how it is known and what to do, a line each."""
    until = "still so at the end" if incident.ended is None else f"until step {incident.ended:,}"
    if incident.ended == incident.begun:
        until = "once"
    lines = [f"{incident.trouble}  from step {incident.begun:,}, {until}: {incident.what}"]
    lines += [f"  known by  {evidence}" for evidence in incident.evidence]
    return [*lines, *([f"  to do  {incident.fix}"] if incident.fix else [])]


def _state(ended: Mark | None, logs: Mapping[int, RankLog]) -> str:
    if ended is not None:
        return f"{_FAILED}{ended.why}" if ended.why else "ended as it was asked to"
    newest = _last_word(logs)
    if newest is None:
        return "no rank was heard of"
    return f"no end was written; a rank was heard of {format_seconds(max(time.time() - newest, 0.0))} ago"


def _found(files: RunFiles, ended: Mark | None) -> tuple[str, ...]:
    """Of a run that failed, or has not ended, where the one is not said by the other already."""
    told = ended.why if ended is not None else ""
    return tuple(sentence for sentence in inquest(files.path).sentences if sentence not in told)


def _failures(marks: Sequence[Mark]) -> tuple[str, ...]:
    """Why launches before the last one ended, each once; the last word on a launch is its launcher's."""
    whys: list[str] = []
    last = ""
    for mark in marks:
        if mark.what is Moment.LAUNCHED:
            whys, last = [*whys, last], ""
        elif mark.what is Moment.ENDED:
            last = mark.why
    return tuple(dict.fromkeys(why for why in whys if why))


def _uses(logs: Mapping[int, RankLog], run_dir: Path) -> tuple[RankUse, ...]:
    newest = _last_word(logs)
    return tuple(_use(log, run_dir, newest=newest or 0.0) for _, log in sorted(logs.items()) if log.entries)


def _use(log: RankLog, run_dir: Path, *, newest: float) -> RankUse:
    """Whole steps alone: the ring may begin within one; and those that follow each other, since a collective tells of
    the time since the one before."""
    first = log.entries[0].step + 1
    entries = [entry for entry in log.entries if entry.step >= first]
    steps = len({entry.step for entry in entries})
    if not entries or entries[-1].step - first + 1 != steps:
        steps, entries = 0, list(log.entries)
    longest = max(entries, key=lambda entry: entry.inside_seconds)
    seen = last_seen(run_dir, log.rank)
    return RankUse(
        rank=log.rank,
        steps=steps,
        own_seconds=sum(entry.before_seconds for entry in entries) / steps if steps else None,
        waited_seconds=sum(entry.inside_seconds for entry in entries) / steps if steps else None,
        longest=_named(longest),
        where=str(seen) if seen is not None else "",
        silent_seconds=max(newest - _word(log), 0.0),
    )


def _named(entry: Entry) -> str:
    what = _NAMES.get(entry.group.described, entry.group.described)
    return f"{entry.operation} {entry.sequence:,}{f' ({what})' if what else ''} in step {entry.step}"


def _word(log: RankLog) -> float:
    return max((max(entry.entered, entry.left or 0.0) for entry in log.entries[-8:]), default=0.0)


def _last_word(logs: Mapping[int, RankLog]) -> float | None:
    return max((_word(log) for log in logs.values() if log.entries), default=None)


def _table(ranks: Sequence[RankUse]) -> list[str]:
    """A line a rank; of many the ones that computed longest and those that were silent."""
    shown = sorted(ranks, key=lambda use: (-use.silent_seconds, -(use.own_seconds or 0.0)))[:_MOST_RANKS]
    lines = []
    for use in sorted(shown, key=lambda use: use.rank):
        silent = f", silent for {format_seconds(use.silent_seconds)}" if use.silent_seconds > _SILENT_SECONDS else ""
        lines.append(
            f"rank {use.rank}  {_shares(use)}longest in {use.longest}; last in {use.where or 'no place'}{silent}"
        )
    if len(ranks) > len(shown):
        lines.append(f"{len(ranks) - len(shown):,} more ranks")
    return lines


def _shares(use: RankUse) -> str:
    if use.own_seconds is None or use.waited_seconds is None:
        return ""
    whole = max(use.own_seconds + use.waited_seconds, 1e-12)
    own, waited = format_percent(use.own_seconds / whole), format_percent(use.waited_seconds / whole)
    return f"computed {own} and waited {waited} of {format_seconds(whole)} a step; "
