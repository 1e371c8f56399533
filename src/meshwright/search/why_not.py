"""Why not these settings: rules forbid them, no plan with them fits, or the best that fits is slower, and where."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from meshwright.search import vary
from meshwright.search.candidate import TIE, Decision, ordered_by
from meshwright.search.constraints import WORDS, Value, columns_of, limits
from meshwright.search.decide import Best, best
from meshwright.search.explain import ranked_behind
from meshwright.search.probe import broken_rules
from meshwright.search.refine import minimised
from meshwright.search.settings import differing, word, words
from meshwright.search.slowdown import is_held_to_time, slowest_seconds
from meshwright.search.vary import Progress, Question
from meshwright.search.worth import worth
from meshwright.spec.errors import ConfigError, NoPlanFits, Problem
from meshwright.spec.job import Constraints, JobSpec, Objective
from meshwright.spec.plan import Plan
from meshwright.spec.report import Gap, Report, diff
from meshwright.spec.synchronize import SyncKind
from meshwright.spec.units import MANIFOLD, counted, format_bytes, format_percent, format_seconds, format_times

NEIGHBOURS = 6


class Verdict(StrEnum):
    """What becomes of the settings: the best plan has them; how one with them stands to it; none fits; none is legal.

    A plan is UNSURE that is faster and yet ranked behind, or no better: it is likelier not to fit, or its interval is
    wider. It is BETTER where the search, free to choose, had left it out.
    """

    CHOSEN = "chosen"
    BETTER = "better"
    ALIKE = "as good"
    UNSURE = "faster and less sure"
    WORSE = "worse"
    DEARER = "costs more"
    LARGER = "needs more memory"
    TOO_LARGE = "too large"
    ILLEGAL = "illegal"


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """The answer for one set of settings.

    `plan` and `report` are of the best plan with them, or of the leanest where none fits; None where none is
    legal. `gaps` are the lines of the chosen step against that of `report`, the largest first, the step at the head.
    `problems` are the rules that forbid. `nearest` is the plan that fits with one of the settings at the nearest
    other value, where the settings themselves have none.
    """

    settings: dict[str, Value]
    verdict: Verdict
    sentences: tuple[str, ...]
    chosen: Plan
    chosen_report: Report
    plan: Plan | None = None
    report: Report | None = None
    gaps: tuple[Gap, ...] = ()
    changed: dict[str, tuple[Value, Value]] | None = None
    problems: tuple[Problem, ...] = ()
    nearest: Plan | None = None
    nearest_seconds: float | None = None


def why_not(
    asked: Question, decision: Decision, settings: Mapping[str, Value], *, progress: Progress = vary.silent
) -> WhyNot:
    """What `settings` (as `read_settings` gives them) cost against the plan of `decision`, or what forbids them.

    Where the job itself fixes or forbids what is asked for, that constraint is dropped for the question and said.
    """
    constraints, notes = _merged(asked.job.constraints, settings)
    notes += _not_asked(asked.job, settings)
    named = replace(asked, job=replace(asked.job, constraints=constraints))
    answer = WhyNot(
        settings=dict(settings),
        verdict=Verdict.CHOSEN,
        sentences=notes,
        chosen=decision.design.plan,
        chosen_report=decision.report,
    )
    own = columns_of(decision.design.plan)
    if all(own.get(column) == value for column, value in settings.items()):
        return replace(answer, sentences=(*notes, "The chosen plan has these settings: it is the best with them."))
    found, slow = _best(named, asked)
    if found is not None:
        return _compared(replace(answer, sentences=(*notes, *slow)), found)
    progress(0, 1 + len(settings), "the plan that needs least memory")
    lean = _leanest(named)
    nearest = _nearest(named, settings, own, progress=progress)
    if lean is None:
        broken = broken_rules(settings, replace(decision.design, job=named.job))
        return _illegal(answer, broken or _refused(named), nearest)
    return _too_large(answer, decision, lean, nearest)


def _refused(named: Question) -> tuple[Problem, ...]:
    """Why no plan with the settings is legal, which takes longer to find than that none is."""
    found = vary.best(named)
    return () if isinstance(found, Best) else found


def _best(named: Question, asked: Question) -> tuple[Best | None, tuple[str, ...]]:
    """The best plan with the settings that is as fast as the fastest without them lets it be; where none is, the best
    of all, and that it is slower; None where none fits."""
    if not is_held_to_time(asked.job):
        return _fitting(named), ()
    fastest = vary.best(replace(asked, job=replace(asked.job, objective=Objective.TIME)), explained=False)
    if isinstance(fastest, Best):
        within = slowest_seconds((fastest.design, fastest.report), asked.job)
        if (found := _fitting(named, within=within)) is not None:
            return found, ()
    times = f"{asked.job.constraints.slowdown:g} times the fastest plan's (job.constraints.slowdown)"
    slow = f"No plan with them takes less than {times}; what follows is without that."
    return _fitting(named, within=math.inf), (slow,)


def _fitting(named: Question, *, within: float | None = None) -> Best | None:
    found = vary.best(named, explained=False, within=within)
    return found if isinstance(found, Best) else None


def _merged(constraints: Constraints, settings: Mapping[str, Value]) -> tuple[Constraints, tuple[str, ...]]:
    """The job's constraints with `settings` fixed, without those that refuse them, which are named."""
    asked = limits(constraints)
    refused = dict.fromkeys(
        place for column, value in settings.items() if (place := asked.refusal(column, value)) is not None
    )
    forbid = tuple(
        text
        for text in constraints.forbid
        if all(limits(Constraints(forbid=(text,))).allows(column, value) for column, value in settings.items())
    )
    kept = {
        column: value for column, value in constraints.fix.items() if f"job.constraints.fix.{column}" not in refused
    }
    notes = tuple(f"The job itself refuses them ({place}); what follows is without that." for place in refused)
    return replace(constraints, fix={**kept, **settings}, forbid=forbid), notes


def _not_asked(job: JobSpec, settings: Mapping[str, Value]) -> tuple[str, ...]:
    """That the job allows no such learners, with which what is learnt changes."""
    kind = next((each for each in SyncKind if settings.get("sync") == each.value), None)
    if kind is None or not kind.has_learners or kind in job.synchronize.kinds:
        return ()
    allow = f"--set 'synchronize.kinds=[\"{kind.value}\"]'"
    return (f"The job allows no learners that meet as {kind.value}, with which what is learnt changes ({allow} does).",)


def _compared(answer: WhyNot, found: Best) -> WhyNot:
    ours, theirs = answer.chosen_report, found.report
    gaps = diff(ours, theirs)
    change = theirs.step_seconds / ours.step_seconds - 1.0
    sentences = [*answer.sentences, *_headline(answer, found), *_where(gaps)]
    verdict = _verdict(answer, found, change=change)
    cheaper = verdict is Verdict.DEARER and _device_seconds(found.design.plan, theirs) < _device_seconds(
        answer.chosen, ours
    )
    if cheaper or verdict in (Verdict.UNSURE, Verdict.BETTER):
        sentences.append(_ranked(answer, found, verdict))
    if verdict is Verdict.WORSE:
        plans = [replace(found.design, plan=answer.chosen), found.design]
        sentences.append(f"Plans are ranked by {ordered_by(plans)}: a faster one may be less sure to fit.")
    return replace(
        answer,
        verdict=verdict,
        sentences=tuple(sentences),
        plan=found.design.plan,
        report=theirs,
        gaps=gaps,
        changed=differing(answer.chosen, found.design.plan),
    )


def _verdict(answer: WhyNot, found: Best, *, change: float) -> Verdict:
    """By what the job minimises; `change` is that of the step."""
    least = found.design.job.objective
    ours = minimised(replace(found.design, plan=answer.chosen), answer.chosen_report, least)
    theirs = minimised(found.design, found.report, least)
    faster = least is Objective.TIME and change <= -TIE
    if abs(theirs / ours - 1.0) < TIE:
        return Verdict.UNSURE if faster else Verdict.ALIKE
    if theirs < ours:
        return Verdict.BETTER
    if least is not Objective.TIME:
        return Verdict.DEARER if least is Objective.COST else Verdict.LARGER
    return Verdict.UNSURE if faster else Verdict.WORSE


def _ranked(answer: WhyNot, found: Best, verdict: Verdict) -> str:
    """The figures that rank the two, and what follows."""
    model, plans = found.design.model, (answer.chosen, found.design.plan)
    ours, theirs = (worth(plan, parameters=model.parameters) for plan in plans)
    said = ranked_behind(
        answer.chosen_report, found.report, objective=found.design.job.objective, counts=(ours, theirs)
    )
    if verdict is Verdict.BETTER and answer.sentences:
        return f"{said[0].upper()}{said[1:]}: it is the better plan, if the job may have it."
    if verdict is Verdict.BETTER:
        return f"{said[0].upper()}{said[1:]}: it is the better plan, which the search had left out; fix these settings."
    return f"It is ranked behind all the same: {said}."


def _device_seconds(plan: Plan, report: Report) -> float:
    return report.step_seconds * plan.world_size


def _headline(answer: WhyNot, found: Best) -> Iterator[str]:
    """What the job minimises of the best plan with the settings against the chosen one, and the step where that is
    another figure."""
    ours, theirs = answer.chosen_report, found.report
    steps = f"{format_seconds(theirs.step_seconds)} a step, not {format_seconds(ours.step_seconds)}"
    least = found.design.job.objective
    if least is Objective.MEMORY:
        change = theirs.peak_bytes / ours.peak_bytes - 1.0
        figures = f"{format_bytes(theirs.peak_bytes)} at the peak, not {format_bytes(ours.peak_bytes)}"
        yield _said(answer, change, ("needs as much memory", "needs", "more memory", "less memory"), figures)
        yield f"It takes {steps}."
    elif least is Objective.COST:
        change = _device_seconds(found.design.plan, theirs) / _device_seconds(answer.chosen, ours) - 1.0
        figures = (
            f"{counted(theirs.devices, 'device')} for {format_seconds(theirs.step_seconds)} a step, "
            f"not {ours.devices:,} for {format_seconds(ours.step_seconds)}"
        )
        yield _said(answer, change, ("costs as much", "costs", "more", "less"), figures)
    else:
        change = theirs.step_seconds / ours.step_seconds - 1.0
        yield _said(answer, change, ("takes as long", "is", "slower", "faster"), steps)


def _said(answer: WhyNot, change: float, told: tuple[str, str, str, str], figures: str) -> str:
    """That the best ranked plan with the settings has as much of a figure, or so much more or less, as `told`."""
    alike, verb, more, less = told
    if abs(change) < TIE:
        return f"A plan with {words(answer.settings)} fits and {alike} ({figures})."
    much = f"{verb} {format_percent(abs(change))} {more if change > 0 else less}"
    if change > MANIFOLD:
        verb, rest = alike.split(" ", 1)
        much = f"{verb} {format_times(1.0 + change)} {rest}"
    return f"The best ranked plan with {words(answer.settings)} fits and {much}: {figures}."


def _where(gaps: tuple[Gap, ...]) -> Iterator[str]:
    """What it loses and what it gains, the largest line of each that is seen in the step, which comes first."""
    lines = [gap for gap in gaps[1:] if abs(gap.seconds) >= TIE * gaps[0].predicted]
    loss = max(lines, key=lambda gap: gap.seconds, default=None)
    gain = min(lines, key=lambda gap: gap.seconds, default=None)
    if loss is not None and loss.seconds > 0:
        yield f"It loses most in {loss.name}: {_from_to(loss)}."
    if gain is not None and gain.seconds < 0:
        yield f"It gains most in {gain.name}: {_from_to(gain)}."


def _from_to(gap: Gap) -> str:
    return f"{format_seconds(gap.predicted)} to {format_seconds(gap.measured)}"


def _leanest(named: Question) -> Best | None:
    """The plan with the settings that needs least memory, on machines that have enough; None where none is legal."""
    roomy = vary.memory_bytes(named.cluster, vary.BOUNDLESS)
    try:
        job = replace(named.job, objective=Objective.MEMORY)
        return best(named.model, roomy, job, trainer=named.trainer, within=math.inf)
    except (NoPlanFits, ConfigError):
        return None


def _too_large(answer: WhyNot, decision: Decision, lean: Best, nearest: Best | None) -> WhyNot:
    made = replace(decision.design, plan=lean.design.plan)
    report = vary.repriced(made, made.cluster)
    worst = report.tightest
    part, size = max(worst.parts.items(), key=lambda entry: entry[1])
    said = (
        f"Plans with {words(answer.settings)} are legal and none fits: the leanest ({made.plan.describe()}) "
        f"{worst.need} on pipeline rank {worst.rank}, {format_bytes(worst.over)} too much; most of what the device "
        f"holds is {part!s}, {format_bytes(size)}."
    )
    return replace(
        answer,
        verdict=Verdict.TOO_LARGE,
        sentences=(*answer.sentences, said, *_nearest_words(answer, nearest)),
        plan=made.plan,
        report=report,
        changed=differing(answer.chosen, made.plan),
        nearest=nearest.design.plan if nearest else None,
        nearest_seconds=nearest.report.step_seconds if nearest else None,
    )


def _illegal(answer: WhyNot, broken: tuple[Problem, ...], nearest: Best | None) -> WhyNot:
    said = f"No plan with {words(answer.settings)} is legal:"
    return replace(
        answer,
        verdict=Verdict.ILLEGAL,
        sentences=(*answer.sentences, said, *(str(problem) for problem in broken), *_nearest_words(answer, nearest)),
        problems=broken,
        nearest=nearest.design.plan if nearest else None,
        nearest_seconds=nearest.report.step_seconds if nearest else None,
    )


def _nearest_words(answer: WhyNot, nearest: Best | None) -> Iterator[str]:
    if nearest is None:
        yield "No change of one of them helps."
        return
    if nearest.design.plan == answer.chosen:
        yield "The nearest that fits is the chosen plan."
        return
    theirs = columns_of(nearest.design.plan)
    moved = {column: theirs[column] for column, value in answer.settings.items() if theirs[column] != value}
    change = nearest.report.step_seconds / answer.chosen_report.step_seconds - 1.0
    speed = "as fast as the chosen plan"
    if abs(change) >= TIE:
        speed = f"{format_percent(abs(change))} {'slower' if change > 0 else 'faster'} than the chosen plan"
    if change > MANIFOLD:
        speed = f"{format_times(1.0 + change)} the time of the chosen plan"
    asked = words({column: answer.settings[column] for column in moved})
    yield f"The nearest that fits has {words(moved)} instead of {asked}: {speed} ({nearest.design.plan.describe()})."


def _nearest(
    named: Question, settings: Mapping[str, Value], own: Mapping[str, Value], *, progress: Progress
) -> Best | None:
    """The best of the designs that fit with one of the settings at the nearest other value that has one.

    `own` are the columns of the chosen plan: of words its own is tried first, of numbers the one of nearest ratio.
    """
    found = []
    constraints = named.job.constraints
    for done, (column, value) in enumerate(settings.items()):
        progress(1 + done, 1 + len(settings), word(column, value))
        for other in _neighbours(named, column, value, own=own.get(column, value)):
            changed = replace(constraints, fix={**constraints.fix, column: other})
            made = vary.best(replace(named, job=replace(named.job, constraints=changed)), explained=False)
            if isinstance(made, Best):
                found.append(made)
                break
    return min(found, key=lambda made: made.report.step_seconds, default=None)


def _neighbours(named: Question, column: str, value: Value, *, own: Value) -> tuple[Value, ...]:
    """Other values of a column: the word `own` and the others, or the nearest numbers by their ratio."""
    if column in WORDS:
        return tuple(other for other in dict.fromkeys((own, *WORDS[column])) if other != value)
    number = int(value)
    most = max(named.cluster.num_devices, named.job.batch_sequences, number)
    doubles = {2**power for power in range(most.bit_length())}
    near = {number * factor for factor in (2, 3)} | {number // factor for factor in (2, 3, 4)}
    values = sorted((doubles | near) - {number, 0}, key=lambda other: abs(math.log(other / number)))
    return tuple(other for other in values if other <= most)[:NEIGHBOURS]


def headline(answer: WhyNot) -> str:
    """`why not tensor 4, pipeline 2: worse`."""
    asked = ", ".join(word(column, value) for column, value in answer.settings.items())
    return f"why not {asked}: {answer.verdict.value}"
