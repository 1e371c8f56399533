"""What a document is, told by its keys, so that one given in place of another is refused in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.spec.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Sort:
    """One sort of document: it has `least` or more of the keys `marks`. `use` is what to do with such a FILE."""

    kind: str
    words: str
    marks: frozenset[str]
    least: int
    why: str = ""
    use: str = "meshwright explain FILE reads it"


SORTS = (
    Sort(
        kind="Decision",
        words="a kept decision",
        marks=frozenset({"design", "report", "ranked", "rejected", "considered", "priced", "fitting"}),
        least=2,
        why="plan --out writes it beside the design",
    ),
    Sort(
        kind="Explained",
        words="a decision with its explanations",
        marks=frozenset({"decision", "waterfall"}),
        least=2,
        why="plan --json prints it",
    ),
    Sort(kind="Design", words="a design", marks=frozenset({"model", "cluster", "job", "plan"}), least=3),
    Sort(
        kind="Plan",
        words="a plan alone",
        marks=frozenset({"axes"}),
        least=1,
        why="it holds a plan without its model, cluster and job",
        use="write it with meshwright plan --out",
    ),
    Sort(
        kind="Report",
        words="a report",
        marks=frozenset({"step", "memory"}),
        least=2,
        why="it holds figures without the plan that they are of",
        use="name the design or the run directory beside it",
    ),
    Sort(
        kind="ClusterSpec", words="a cluster", marks=frozenset({"groups"}), least=1, use="give it with --cluster FILE"
    ),
    Sort(
        kind="ModelSpec",
        words="a model",
        marks=frozenset({"embedding", "layers", "model_type"}),
        least=1,
        use="give it with --model FILE",
    ),
    Sort(
        kind="JobSpec",
        words="a job",
        marks=frozenset({"sequence_length", "batch_tokens", "total_tokens", "precision", "optimizer", "constraints"}),
        least=1,
        use="give it with --job FILE",
    ),
)


def sort_of(values: Mapping[str, Any]) -> Sort | None:
    """The sort of document that `values` look like; None of what looks like none."""
    return next((sort for sort in SORTS if len(sort.marks & values.keys()) >= sort.least), None)


def refuse_another(values: Mapping[str, Any], *, kind: str, name: str) -> None:
    """Raises ConfigError where the document `name` is not of `kind` and looks like one of another sort."""
    wanted = next((sort for sort in SORTS if sort.kind == kind), None)
    found = sort_of(values)
    if wanted is None or found is None or found is wanted or len(wanted.marks & values.keys()) >= wanted.least:
        return
    what, fix = f"is {found.words}, not {wanted.words}", found.use.replace("FILE", name)
    if found.kind == "Decision" and kind == "Design" and (beside := _design_beside(name)):
        fix = f"give {beside}, the design beside it; {fix}"
    raise ConfigError(Problem(where=name, what=what, why=found.why, fix=fix))


def _design_beside(name: str) -> str:
    """`plan.json` of `plan.decision.json`, `RUN/design.json` of `RUN/decision.json`; empty where there is none."""
    path = Path(name)
    beside = path.with_name(path.name.replace(".decision.", ".").replace("decision.json", "design.json"))
    return str(beside) if beside != path and beside.is_file() else ""
