"""What holds the best plan back: the job designed again with one limit lifted, so that a limit's worth is a number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.search import vary
from meshwright.search.candidate import Decision
from meshwright.search.constraints import Value
from meshwright.search.decide import Best
from meshwright.search.settings import differing
from meshwright.search.vary import Progress, Question
from meshwright.spec.plan import Plan
from meshwright.spec.units import format_percent

TWICE = 2.0
MATTERS = 0.005


def _without_constraints(asked: Question) -> Question | None:
    constraints = asked.job.constraints
    if not constraints.fix and not constraints.forbid:
        return None
    return replace(asked, job=replace(asked.job, constraints=replace(constraints, fix={}, forbid=())))


def _on(alter: vary.Alter, factor: float) -> Callable[[Question], Question]:
    return lambda asked: replace(asked, cluster=alter(asked.cluster, factor))


def _larger_batch(asked: Question) -> Question:
    tokens = int(TWICE * asked.job.batch_tokens)
    return replace(asked, job=replace(asked.job, batch_tokens=tokens, total_tokens=max(tokens, asked.job.total_tokens)))


LIMITS: tuple[tuple[str, str, Callable[[Question], Question | None]], ...] = (
    ("memory", "if memory were no limit", _on(vary.memory_bytes, vary.BOUNDLESS)),
    ("bandwidth between nodes", "with twice the bandwidth between nodes", _on(vary.between_nodes, TWICE)),
    ("bandwidth inside a node", "with twice the bandwidth inside a node", _on(vary.inside_nodes, TWICE)),
    ("speed of the devices", "with devices of twice the peak", _on(vary.peak, TWICE)),
    ("memory bandwidth", "with twice the bandwidth of memory", _on(vary.memory_bandwidth, TWICE)),
    ("batch", "with twice the batch", _larger_batch),
    ("constraints", "without what the job fixes and forbids", _without_constraints),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit and what lifting it would give: `gain` is the share of tokens/s that the best plan there adds."""

    name: str
    words: str
    gain: float
    plan: Plan
    step_seconds: float
    tokens_per_second: float
    changed: dict[str, tuple[Value, Value]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """The limits of a decision, the one that binds most first, and the same in a sentence."""

    sentence: str
    limits: tuple[Limit, ...]

    @property
    def binding(self) -> Limit | None:
        """The limit that is worth most to lift; None where none is worth MATTERS."""
        return self.limits[0] if self.limits and self.limits[0].gain >= MATTERS else None


def headroom(asked: Question, decision: Decision, *, progress: Progress = vary.silent) -> Headroom:
    """Every one of LIMITS lifted in turn and the job designed again; lifting one that does not bind gives nothing."""
    found = []
    for done, (name, words, lift) in enumerate(LIMITS):
        progress(done, len(LIMITS), words)
        lifted = lift(asked)
        other = vary.best(lifted, explained=False) if lifted is not None else ()
        if not isinstance(other, Best):
            continue
        gain = other.report.tokens_per_second / decision.report.tokens_per_second - 1.0
        limit = Limit(
            name=name,
            words=words,
            gain=gain,
            plan=other.design.plan,
            step_seconds=other.report.step_seconds,
            tokens_per_second=other.report.tokens_per_second,
            changed=differing(decision.design.plan, other.design.plan),
        )
        found.append(limit)
    progress(len(LIMITS), len(LIMITS))
    found.sort(key=lambda limit: -limit.gain)
    limits = tuple(found)
    return Headroom(sentence=_sentence(limits), limits=limits)


def _sentence(limits: tuple[Limit, ...]) -> str:
    worth = [limit for limit in limits if limit.gain >= MATTERS]
    if not worth:
        return "Nothing that could be lifted binds: " + ", ".join(limit.name for limit in limits) + "."
    first = worth[0]
    rest = ", ".join(f"{limit.name} {format_percent(limit.gain)}" for limit in worth[1:3])
    after = f" Next: {rest}." if rest else ""
    return f"What binds most is {first.name}: {first.words} the best plan trains {_more(first.gain)} tokens/s.{after}"


def _more(gain: float) -> str:
    return f"{1.0 + gain:.2f} times the" if gain >= 1.0 else f"{format_percent(gain)} more"
