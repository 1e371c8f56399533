"""Alternatives looked for together: as good as a whole search with each of their values held, and told as such."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import catalog, search
from meshwright.search import Question, why_not
from meshwright.search.alternatives import Alternatives, settle
from meshwright.search.decide import best, legal_space
from meshwright.search.explain import DIMENSIONS, compared, held
from meshwright.search.explore import Explorer
from meshwright.search.laid_out import best_of, best_refined
from meshwright.search.refine import entry_value
from meshwright.spec.errors import NoPlanFits
from meshwright.spec.job import Constraints, JobSpec, Objective
from meshwright.spec.model import ModelSpec
from meshwright.spec.units import format_bytes, format_change
from tests.search.test_explore import CLUSTERS, MODELS, asked, tight

BOX = CLUSTERS["one box"]
ANY = Constraints(devices="any")


def known(model: ModelSpec, job: JobSpec, *, roomy: bool = True) -> Explorer:
    """A search that stopped where the best is known."""
    cluster = BOX if roomy else tight(model, job)
    space = legal_space(model, cluster, job)
    found = Explorer(space, model=model, cluster=cluster, job=job, exhaustive=0)
    found.best(3)
    return found


def values_of(found: Explorer, name: str) -> list[int]:
    frames = found.space.frames
    return sorted(set(frames[name].tolist())) if name in frames else found.space.values(name)


def lines(found: Explorer) -> list[Alternatives]:
    """Of every dimension the values that the best plan has not, but for grids of experts, which no setting names."""
    (row,) = best_refined(found, 1)[0][:1]
    at = int(found.scores()[found.prices.fits].argmin())
    table = found.table.take(found.prices.fits).take([at])
    assert row[1].fits
    made = []
    for name in DIMENSIONS:
        others = tuple(value for value in values_of(found, name) if value != int(getattr(table, name)[0]))
        if others and name not in ("precision", "expert"):
            made.append(Alternatives(found, name=name, values=others))
    return made


def searched(found: Explorer, line: Alternatives) -> float:
    """What the objective minimises at the best of whole searches, each with one of the values of `line` held."""
    reached = [float("inf")]
    for value in line.values:
        fix = {**found.job.constraints.fix, **held(line.name, value)}
        job = replace(found.job, constraints=replace(found.job.constraints, fix=fix))
        try:
            entry = best(found.model, found.cluster, job, within=found.within)
        except NoPlanFits:
            continue
        reached.append(entry_value((entry.design, entry.report), found.job.objective))
    return min(reached)


@pytest.mark.parametrize(
    ("name", "objective", "roomy"),
    [
        pytest.param("mixture", Objective.TIME, True, marks=pytest.mark.slow),
        pytest.param("dense", Objective.COST, False, marks=pytest.mark.slow),
        pytest.param("dense", Objective.TIME, False, marks=pytest.mark.slow),
        pytest.param("dense", Objective.MEMORY, False, marks=pytest.mark.slow),
    ],
)
def test_no_whole_search_finds_better_alternatives(name: str, objective: Objective, roomy: bool) -> None:
    found = known(MODELS[name], asked(objective=objective), roomy=roomy)
    every = lines(found)
    assert all(settle(found, every))
    some = [line for line in every if len(line.rows)]
    assert len(some) >= 6
    assert found.priced < found.space.count
    for line, entry in zip(some, best_of(found, some), strict=True):
        assert entry is not None
        assert entry_value(entry, objective) <= searched(found, line) * (1.0 + 1e-9), line.name
    for line in every:
        if not len(line.rows):
            assert searched(found, line) == float("inf"), line.name


def test_what_was_not_weighed_whole_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.search.alternatives.MOST", 0)
    monkeypatch.setattr("meshwright.search.explore.NEAR", 1)
    found = known(MODELS["dense"], asked())
    every = lines(found)
    assert not all(settle(found, every))
    monkeypatch.undo()
    assert all(settle(found, every))


def test_a_plan_on_other_devices_is_compared_by_its_cost_and_says_on_how_many() -> None:
    job = asked(objective=Objective.COST)
    chosen = best(MODELS["dense"], BOX, job)
    used = chosen.design.plan.world_size
    other = next(size for size in (4, 2, 1) if size != used)
    fixed = replace(job, constraints=replace(ANY, fix={"devices": other}))
    made = best(MODELS["dense"], BOX, fixed)
    told = compared(chosen.design, chosen.report, made.design, made.report, head="another number")
    devices = f"{other} device{'s' * (other > 1)}"
    assert f" money on {devices}, not {used}" in told or f"cost as much on {devices}, not {used}" in told
    assert used == 1
    back = compared(made.design, made.report, chosen.design, chosen.report, head="one")
    assert f" on 1 device, not {other}" in back
    asking = Question(model=MODELS["dense"], cluster=BOX, job=job)
    answer = why_not(asking, search.design(MODELS["dense"], BOX, job), {"devices": other})
    assert " costs " in answer.sentences[0]
    assert f"{other} devices for " in answer.sentences[0]
    assert f", not {used} for " in answer.sentences[0]


@pytest.mark.slow
def test_least_memory_is_told_in_bytes_alike_by_a_reason_and_by_the_answer_behind_it() -> None:
    sets = ["sequence_length=4096", "batch_tokens=256Ki", "objective=memory"]
    asking = Question(
        model=catalog.load_model("llama-3.2-1b"),
        cluster=catalog.load_cluster("4xA100-40GB"),
        job=catalog.load_job(None, sets=sets),
    )
    decision = search.design(asking.model, asking.cluster, asking.job)
    told = 0
    for name in ("tensor", "pipeline", "context", "shard", "microbatch"):
        line = next((line for line in decision.why if line.startswith(f"{name} ")), "")
        if " instead of " not in line:
            continue
        answer = why_not(asking, decision, {name: int(line.split()[1])})
        assert answer.report is not None
        ours = format_bytes(decision.report.peak_bytes)
        assert f"would need {format_bytes(answer.report.peak_bytes)}, not {ours}" in line
        assert "memory" in answer.sentences[0]
        assert f"{format_bytes(answer.report.peak_bytes)} at the peak, not {ours}" in answer.sentences[0]
        told += 1
    assert told >= 2


@pytest.mark.slow
def test_an_alternative_that_is_better_with_the_machines_in_another_order_is_told_as_the_answer_behind_it() -> None:
    held = ["tensor=1", "offload=none", "recompute=none", "zero=zero2"]
    sets = ["sequence_length=8192", *(f"constraints.fix.{each}" for each in held)]
    asking = Question(
        model=catalog.load_model("llama-3.1-8b"),
        cluster=catalog.load_cluster("mixed"),
        job=catalog.load_job(None, sets=sets),
    )
    decision = search.design(asking.model, asking.cluster, asking.job)
    (line,) = (line for line in decision.why if line.startswith("pipeline 4 instead of 2 would take "))
    answer = why_not(asking, decision, {"pipeline": 4})
    assert answer.report is not None
    assert decision.design.plan.is_placed
    assert "the machines in another order" in line
    assert format_change(answer.report.step_seconds / decision.report.step_seconds - 1.0, noun="time") in line
