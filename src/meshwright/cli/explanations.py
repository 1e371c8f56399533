"""What `meshwright plan` says beside the decision when it is asked: why not, headroom, sensitivity, sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshwright.search import Decision
    from meshwright.search.vary import Question
    from meshwright.spec.errors import Gathering

Answers = Mapping[str, Any]
_TRIED = "searches for plans near these settings done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a person wants explained: sets of settings, what holds the plan back, sensitivity, paths to sweep."""

    why: Sequence[str] = ()
    headroom: bool = False
    sensitivity: bool = False
    sweep: Sequence[str] = ()

    @property
    def anything(self) -> bool:
        return bool(self.why or self.headroom or self.sensitivity or self.sweep)


def check(asked: Asked, question: Question | None, gathered: Gathering) -> None:
    """Gathers, before anything is priced, what is wrong with settings, and with paths where there is a question."""
    from meshwright.search.settings import read_settings
    from meshwright.search.sweep import read_axes

    for text in asked.why:
        gathered.attempt(partial(read_settings, text))
    if asked.sweep and question is not None:
        gathered.attempt(lambda: read_axes(question, asked.sweep))


def answers(asked: Asked, question: Question, decision: Decision) -> Answers:
    """The answers by name, in the order in which they are shown; long ones tell their progress."""
    from meshwright import search
    from meshwright.cli.output import note
    from meshwright.cli.waiting import told_while
    from meshwright.report.terminal_validation import Progress
    from meshwright.report.waterfall import waterfall
    from meshwright.search.settings import read_settings, words

    def progress(noun: str) -> Progress:
        return Progress(note, noun=noun)

    found: dict[str, Any] = {"waterfall": waterfall(decision.report)}
    if asked.why:
        found["why_not"] = []
        for settings in [read_settings(text) for text in asked.why]:
            with told_while(f"plans with {words(settings)} searched"):
                found["why_not"].append(search.why_not(question, decision, settings, progress=progress(_TRIED)))
    if asked.headroom:
        found["headroom"] = search.headroom(
            question, decision, progress=progress("limits lifted, each time designing the job again")
        )
    if asked.sensitivity:
        found["sensitivity"] = search.sensitivity(
            question, decision, progress=progress("figures of the machines changed, each time designing the job again")
        )
    if asked.sweep:
        found["sweep"] = search.sweep(question, asked.sweep, progress=progress("points of the sweep designed"))
    return found


def views(found: Answers, decision: Decision) -> list[RenderableType]:
    """The answers for a console, under the decision's heading and its step."""
    from meshwright.report import terminal, terminal_step, terminal_why

    shown: list[RenderableType] = [
        terminal.heading(decision),
        terminal_step.WaterfallView(found["waterfall"]),
        *(terminal_why.why_not(answer) for answer in found.get("why_not", ())),
    ]
    for name, view in (
        ("headroom", terminal_why.headroom),
        ("sensitivity", terminal_why.sensitivity),
        ("sweep", terminal_why.sweep),
    ):
        if name in found:
            shown.append(view(found[name]))
    return shown
