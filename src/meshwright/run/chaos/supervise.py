"""Supervisor: starts a run, does faults to it at their moments, and starts it again for as long as that helps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten

from meshwright.lab.fabric import Namespace
from meshwright.run.chaos.launches import Launch, log_of, next_number
from meshwright.run.chaos.strike import Done, Scene, Strike, strike
from meshwright.run.chaos.watch import Watch
from meshwright.run.chaos.words import first_named, told_of
from meshwright.spec.chaos import Chaos, LaunchEnd, Struck
from meshwright.spec.errors import ExitCode
from meshwright.spec.faults import At, Fault, FaultKind
from meshwright.spec.goodput import Moment as Marked
from meshwright.train.observe.incidents import incidents_of
from meshwright.train.observe.timekeeper import marks_of, steady_clock
from meshwright.train.observe.whereabouts import Section

LOOK_SECONDS = 2e-3
_MOST_WORDS = 300
MOST_IN_VAIN = 3  # launches in a row to which nothing was done and that gain no step
_WHOLE = (Section.EVALUATE, Section.SAVE, Section.RESTORE)  # where the step that a rank names is done

Command = Callable[[bool], Sequence[str]]  # whether the run goes on
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What became of a run under faults: `missed` never had their moment; `gave_up` says why it was not started again,
    "" where it trained to its end. `undisturbed_steps` were done in `undisturbed_seconds`, with no fault open."""

    struck: tuple[Struck, ...]
    missed: tuple[Fault, ...]
    launches: tuple[LaunchEnd, ...]
    seconds: float
    undisturbed_seconds: float
    undisturbed_steps: int
    gave_up: str


@dataclass(slots=True, kw_only=True)
class _Open:
    """A fault that the run has not recovered from yet; step `done` was the last of the launch that ended by it.

    `before` is what was told of it where chaos was ended before the run had recovered.
    """

    fault: Fault
    strike: Strike
    at: float
    step: int
    launch: int
    process: int
    done: int = 0
    lasts: bool = True
    ended: LaunchEnd | None = None
    found: float | None = None
    told: bool = True
    undone: int = 0
    before: Struck | None = None

    @property
    def ends_rank_0(self) -> bool:
        """Whether only another process of rank 0 trains after the fault, in an elastic run too."""
        kind, killed = self.fault.kind, self.fault.rank in (0, None)
        return kind in (FaultKind.CORRUPT, FaultKind.PREEMPT) or (kind is FaultKind.KILL and killed)


@dataclass(slots=True, kw_only=True)
class _Progress:
    """Rank 0 of this launch: its process, the first step that it was seen in, the one now, the last that it has done;
    and the furthest that any launch has done."""

    process: int = 0
    first: int | None = None
    step: int = 0
    done: int = 0
    furthest: int = 0

    @property
    def trains(self) -> bool:
        return self.first is not None and self.step > self.first


@dataclass(slots=True)
class Supervisor:
    """Trains the run in `run_dir`, of `ranks` ranks, with what `command` says, and does `faults` to it.

    Output of launches is kept under `logs`, beside that of launches before. With a `network` of its own the run is
    inside it. It goes on from what became of `earlier` faults to the same run.
    """

    run_dir: Path
    command: Command
    faults: Sequence[Fault]
    ranks: int
    logs: Path
    say: Say
    network: Namespace | None = None
    earlier: Chaos | None = None
    _struck: list[Struck] = field(default_factory=list)
    _ended: list[LaunchEnd] = field(default_factory=list)
    _open: list[_Open] = field(default_factory=list)
    _pending: list[Fault] = field(default_factory=list)
    _progress: _Progress = field(default_factory=_Progress)
    _undisturbed: float = 0.0
    _undisturbed_steps: int = 0
    _looked: float = 0.0
    _began: float = 0.0
    _gave_up: str = ""
    _clock: Callable[[], float] = field(default_factory=steady_clock)

    def __post_init__(self) -> None:
        self._pending, self._began = list(self.faults), self._clock()
        if (earlier := self.earlier) is None:
            return
        self._began -= earlier.wall_seconds
        self._struck = [each for each in earlier.struck if each.recovered]
        self._ended = list(earlier.launches)
        self._undisturbed, self._undisturbed_steps = earlier.undisturbed_seconds, earlier.undisturbed_steps
        self._open = [self._again(each) for each in earlier.struck if not each.recovered]

    def run(self) -> Trial:
        """The run has ended: well, or as no start would mend, or in vain `MOST_IN_VAIN` times in a row."""
        watch, in_vain = Watch(self.run_dir, ranks=self.ranks), 0
        while not self._gave_up:
            struck, before = len(self._struck) + len(self._open), self._progress.furthest
            ended = self._launch(watch)
            if ended.exit_code == ExitCode.OK:
                break
            gained = self._progress.furthest > before or len(self._struck) + len(self._open) > struck
            in_vain = 0 if gained else in_vain + 1
            self._gave_up = _why_not_again(ended, in_vain=in_vain)
        return self.settle()

    def settle(self) -> Trial:
        """The run has ended, and with it every fault that is open."""
        for each in list(self._open):
            self._close(each, recovered=not self._gave_up)
        return self.so_far()

    def so_far(self) -> Trial:
        """What became of the run until now; faults that are open are not recovered from."""
        struck = [*self._struck, *(self._told(each, recovered=False) for each in self._open)]
        return Trial(
            struck=tuple(sorted(struck, key=lambda one: one.at_seconds)),
            missed=tuple(self._pending),
            launches=tuple(self._ended),
            seconds=self._clock() - self._began,
            undisturbed_seconds=self._undisturbed,
            undisturbed_steps=self._undisturbed_steps,
            gave_up=self._gave_up,
        )

    def _again(self, each: Struck) -> _Open:
        """A fault that the run had not recovered from when chaos was ended; another process trains now."""
        ended = next((end for end in self._ended if end.number == each.launch), None)
        return _Open(
            fault=each.fault,
            strike=Done(),
            at=self._began + each.at_seconds,
            step=each.step,
            launch=each.launch,
            process=0,
            done=each.step,
            lasts=False,
            ended=None if each.found_seconds is None else ended,
            undone=each.undone_steps,
            before=each,
        )

    def _launch(self, watch: Watch) -> LaunchEnd:
        number = next_number(self.logs)
        enter = () if self.network is None else self.network.enter
        words = [*enter, *self.command((self.run_dir / "design.json").is_file())]
        self._progress = _Progress(furthest=self._progress.furthest)
        launch = Launch(words, number=number, log=log_of(self.logs, number))
        try:
            with launch:
                at = self._watched(launch, watch)
        except KeyboardInterrupt:
            if not launch.runs:
                self._ended.append(launch.ended())
            raise
        ended = launch.ended()
        watch.wait_for_the_end()
        self._ended.append(ended)
        self._end_open(ended, at=at)
        if ended.exit_code != ExitCode.OK:
            told = shorten(ended.words, width=_MOST_WORDS, placeholder=" ...")
            self.say(f"launch {number} ended: {told}")
        return ended

    def _watched(self, launch: Launch, watch: Watch) -> float:
        """Faults are done to the launch until it has ended, and when it had."""
        watch.begin(at=launch.began)
        scene = Scene(watch=watch, launcher=launch.process, network=self.network)
        try:
            while launch.runs:
                self._look(watch)
                self._strike(scene, launch.number)
                time.sleep(LOOK_SECONDS)
            return self._clock()
        finally:
            for each in self._open:
                each.strike.lift()

    def _end_open(self, ended: LaunchEnd, *, at: float) -> None:
        """The launch has ended by faults that are open; what it said is of those that it fits."""
        fresh = [each for each in self._open if each.ended is None]
        for each, told in zip(fresh, told_of([each.fault for each in fresh], ended.words), strict=True):
            each.ended, each.found, each.told, each.done = ended, at - each.at, told, self._progress.done
        for each in self._open:
            each.lasts = False

    def _look(self, watch: Watch) -> None:
        """What rank 0 is at; faults that are over, and recovered from, are closed."""
        now, progress, seen = self._clock(), self._progress, watch.seen(0)
        before = progress.step
        if seen is not None and seen.process != progress.process:
            progress.process, progress.first, progress.step = seen.process, None, 0
        if seen is not None and seen.section is not Section.BUILD:
            if seen.step < progress.step:
                for each in self._open:
                    each.undone += progress.step - seen.step
            progress.step = seen.step
            progress.first = progress.step if progress.first is None else progress.first
            progress.done = seen.step - (seen.section not in _WHOLE)
            progress.furthest = max(progress.furthest, progress.done)
        if progress.trains and not self._open:
            self._undisturbed += now - self._looked
            self._undisturbed_steps += max(0, progress.step - before)
        self._looked = now
        for each in list(self._open):
            each.lasts = each.lasts and each.strike.lasts(now=now, step=progress.step)
            if not each.lasts and self._is_back(each):
                self._close(each, recovered=True)

    def _is_back(self, each: _Open) -> bool:
        """A whole step of all ranks was done since the fault."""
        progress = self._progress
        if progress.first is None:
            return False
        if progress.process != each.process:
            return progress.step > progress.first
        if each.ends_rank_0:
            return False  # what it wrote last may be steps after what was seen of it
        return progress.step >= max(each.step, progress.first) + 2

    def _close(self, each: _Open, *, recovered: bool) -> None:
        self._open.remove(each)
        struck = self._told(each, recovered=recovered)
        self._struck.append(struck)
        if struck.back_seconds is not None:
            undone = f"{struck.undone_steps} steps done again"
            self.say(f"{each.fault}: trains again after {struck.back_seconds:.1f} s, {undone}")

    def _told(self, each: _Open, *, recovered: bool) -> Struck:
        again = each.ended is not None and each.ended.exit_code != ExitCode.OK
        undone = each.undone + (max(0, each.done - self._started_at()) if again and recovered else 0)
        back = self._clock() - each.at if recovered else None
        if each.before is not None:
            return replace(each.before, recovered=recovered, back_seconds=back, undone_steps=undone)
        named = first_named(each.fault, incidents_of(self.run_dir), at=each.at)
        words = each.ended.words if again and each.told and each.ended is not None else ""
        return Struck(
            fault=each.fault,
            at_seconds=each.at - self._began,
            step=each.step,
            launch=each.launch,
            recovered=recovered,
            back_seconds=back,
            found_seconds=each.found if again else None,
            words=words or (named.what if named is not None and not again else ""),
            undone_steps=undone,
            named_seconds=None if named is None else max(0.0, named.at - each.at),
        )

    def _started_at(self) -> int:
        """The step that the newest launch went on from."""
        return next((mark.step for mark in reversed(marks_of(self.run_dir)) if mark.what is Marked.STARTED), 0)

    def _strike(self, scene: Scene, number: int) -> None:
        """Faults whose moment has come are done."""
        for fault in list(self._pending):
            if not self._is_due(fault, scene.watch):
                continue
            now, progress = self._clock(), self._progress
            begun = strike(fault, scene, now=now, step=progress.step)
            if begun is None:
                continue
            self._pending.remove(fault)
            opened = _Open(
                fault=fault, strike=begun, at=now, step=progress.step, launch=number, process=progress.process
            )
            self._open.append(opened)
            self.say(f"step {progress.step}: {fault}")

    def _is_due(self, fault: Fault, watch: Watch) -> bool:
        moment, progress = fault.moment, self._progress
        reached = max(progress.step, progress.furthest) >= moment.step and self._undisturbed >= moment.seconds
        if not reached:
            return False
        if moment.at is At.START:
            seen = watch.seen(fault.rank or 0)
            return seen is not None and seen.section is Section.BUILD
        if progress.first is None:
            return False
        return moment.at is At.ANY or watch.is_saving()


def _why_not_again(ended: LaunchEnd, *, in_vain: int) -> str:
    if not ended.is_mendable:
        return f"no start would mend it: {ended.words}"
    if in_vain >= MOST_IN_VAIN:
        return f"{in_vain} launches in a row gained no step: {ended.words}"
    return ""
