"""job.compile = "auto": a few steps with and without torch.compile, all of them training steps; the faster stays."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from meshwright.spec.errors import EnvironmentUnfit
from meshwright.spec.units import format_seconds
from meshwright.train.events import Action, Event, Log, Started, StepDone

# Compiling costs tens of seconds, and gains at most a third: shorter runs do not win it back.
WORTHWHILE_SECONDS = 300.0
GAIN = 0.98


class Compiles(Protocol):
    """What is laid: it compiles at its next pass, unless it raises EnvironmentUnfit, and runs again as written."""

    def compile(self) -> None: ...

    def uncompile(self) -> None: ...


class Compiler(Protocol):
    """What is switched: compiled layers and back."""

    def compile(self) -> str:
        """Layers compile at their next pass; a reason why they cannot, or nothing."""

    def undo(self) -> None:
        """Layers run as they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCompiler:
    """What this rank has laid; `refusal` says why its layers do not compile, where they do not."""

    laid: Compiles
    refusal: str = ""

    def compile(self) -> str:
        if self.refusal:
            return self.refusal
        try:
            self.laid.compile()
        except EnvironmentUnfit as error:
            return error.problems[0].what
        return ""

    def undo(self) -> None:
        self.laid.uncompile()


class CompileTold:
    """job.compile = "on": why the first steps take longer."""

    def react(self, event: Event) -> Iterable[Action]:
        said = "compile: on; layers and the loss compile at their first pass, and the first steps wait for that"
        return (Log(text=said),) if isinstance(event, Started) else ()


@dataclass(slots=True, kw_only=True)
class CompileTrial:
    """Steps 5 to 8 of a process are timed as they are, 11 to 14 compiled; on every rank the same, as seconds agree.

    Steps 3 and 4 run under instruments and steps 9 and 10 compile, so they are left out.
    """

    compiler: Compiler
    total_steps: int
    seen: int = 0
    plain: list[float] = field(default_factory=list)
    compiled: list[float] = field(default_factory=list)
    decided: bool = False

    def react(self, event: Event) -> Iterable[Action]:
        if self.decided or not isinstance(event, StepDone):
            return ()
        self.seen += 1
        if 5 <= self.seen <= 8:
            self.plain.append(event.seconds)
        if self.seen == 8:
            return self._begin(event)
        if 11 <= self.seen <= 14:
            self.compiled.append(event.seconds)
        return self._decide() if self.seen == 14 else ()

    def _begin(self, event: StepDone) -> Iterable[Action]:
        left = statistics.median(self.plain) * (self.total_steps - event.step)
        if left < WORTHWHILE_SECONDS:
            self.decided = True
            return (Log(text=f"compile: off; {format_seconds(left)} of training would not win it back"),)
        reason = self.compiler.compile()
        self.decided = bool(reason)
        return (Log(text=f"compile: off; {reason}" if reason else "compile: trying six steps compiled"),)

    def _decide(self) -> Iterable[Action]:
        self.decided = True
        plain, compiled = statistics.median(self.plain), statistics.median(self.compiled)
        faster = compiled < GAIN * plain
        if not faster:
            self.compiler.undo()
        figures = f"{format_seconds(compiled)} a step compiled, {format_seconds(plain)} as it is"
        return (Log(text=f"compile: {'on' if faster else 'off'}; {figures}", values={"compiled": float(faster)}),)
