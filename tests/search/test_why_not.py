"""Why not: what is asked is read strictly, and the answer is what the search and the rules themselves say."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from meshwright import catalog, cost, search
from meshwright.search import Question, why_not
from meshwright.search.candidate import TIE
from meshwright.search.check import check
from meshwright.search.constraints import COLUMNS, columns_of
from meshwright.search.settings import differing, read_settings
from meshwright.search.why_not import Verdict
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import OTHER_NAMES, Constraints, Objective
from meshwright.spec.model import ModelSpec
from meshwright.spec.report import LineName
from meshwright.spec.units import format_percent
from tests.search import search_samples as samples

pytestmark = pytest.mark.usefixtures("searched_once")

LARGE = samples.model(layers=10, layer=samples.dense_layer(hidden=2048), vocab=2048)
FEW_HEADS = samples.model(layers=10, layer=samples.dense_layer(heads=4, hidden=2048), vocab=2048)


def question(
    *, memory_bytes: float = 16 * 2**30, constraints: Constraints | None = None, of: ModelSpec = LARGE
) -> Question:
    cluster = samples.cluster(samples.nodes(of=samples.device(memory_bytes=memory_bytes)))
    return Question(model=of, cluster=cluster, job=samples.job(constraints=constraints))


def decide(asked: Question) -> search.Decision:
    return search.design(asked.model, asked.cluster, asked.job, top=1)


def ask(text: str, asked: Question | None = None) -> search.WhyNot:
    asked = asked or question()
    return why_not(asked, decide(asked), read_settings(text))


def test_short_names_and_those_that_people_use_are_the_columns() -> None:
    assert read_settings("tp=4, PP=2,mbs=1") == {"tensor": 4, "pipeline": 2, "microbatch": 1}
    assert read_settings("zero=3,sp=true,recompute=full") == {
        "zero": "zero3",
        "sequence_parallel": "on",
        "recompute": "full",
    }
    assert read_settings("sharding=zero1,checkpointing=none") == {"zero": "zero1", "recompute": "none"}
    assert read_settings({"zero_stage": 2}) == {"zero": "zero2"}
    assert read_settings({"tensor": 4}) == {"tensor": 4}
    assert read_settings(",".join(f"{column}=1" for column in ("tensor", "data"))) == {"tensor": 1, "data": 1}
    assert set(OTHER_NAMES.values()) <= set(COLUMNS)
    for short, column in OTHER_NAMES.items():
        if column not in ("sequence_parallel", "recompute", "zero"):
            assert read_settings(f"{short}=2") == {column: 2}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tenser=2", "'tenser' is not a setting of a plan; did you mean 'tensor'?"),
        ("tp=0", "--why tensor: expected a whole number of 1 or more"),
        ("recompute=ful", "--why recompute: 'ful' is not a recompute; did you mean 'full'?"),
        (
            "exchange=all-to-all",
            "'all-to-all' is not an exchange; how many context ranks trade heads, all to all, is inner",
        ),
        ("tp=2,tensor=4", "tensor is named twice"),
        ("tp", "'tp' is not name=value"),
        ("replicate=2,shard=2,data=8", "replicate 2 x shard 2 is not data 8"),
    ],
)
def test_settings_that_are_wrong_are_told(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_settings(text)
    assert told in str(raised.value)


def test_all_problems_of_settings_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        read_settings("tenser=2,foo=1,tp")
    assert len(raised.value.problems) == 3


def test_the_chosen_settings_are_said_to_be_chosen() -> None:
    decision = decide(question())
    own = columns_of(decision.design.plan)
    answer = why_not(question(), decision, {"tensor": own["tensor"], "zero": own["zero"]})
    assert answer.verdict is Verdict.CHOSEN


def test_settings_that_fit_are_compared_line_by_line() -> None:
    asked = question()
    decision = decide(asked)
    assert decision.design.plan.tensor != 4
    other = 4
    answer = why_not(asked, decision, {"tensor": other})
    assert answer.verdict is Verdict.WORSE
    assert answer.plan is not None
    assert answer.plan.tensor == other
    fixed = replace(asked.job, constraints=Constraints(fix={"tensor": other}))
    best = search.design(asked.model, asked.cluster, fixed, top=1)
    assert answer.plan == best.design.plan
    assert answer.gaps[0].name == LineName.STEP
    assert sum(gap.seconds for gap in answer.gaps[1:]) == pytest.approx(answer.gaps[0].seconds)
    worst = max(answer.gaps[1:], key=lambda gap: gap.seconds)
    assert any(f"loses most in {worst.name}" in line for line in answer.sentences)
    assert answer.changed == differing(decision.design.plan, best.design.plan)
    assert "tensor" in answer.changed


@pytest.mark.parametrize(
    ("longer", "upper", "verdict", "told"),
    [
        (2.0, 0.4, Verdict.UNSURE, "ranked behind all the same: 19 of 20 of its steps stay under"),
        (2.0, 1.2, Verdict.BETTER, "which the search had left out"),
        (0.9, 1.2, Verdict.WORSE, "slower"),
        (0.2, 1.2, Verdict.WORSE, "fits and takes 5.00 times as long: "),
    ],
)
def test_a_faster_plan_is_not_called_worse(longer: float, upper: float, verdict: Verdict, told: str) -> None:
    """The step of the chosen plan made `longer` than that of the other, with its interval up to `upper`."""
    asked = question()
    decision = decide(asked)
    settings = {"tensor": 2 if decision.design.plan.tensor != 2 else 4}
    other = why_not(asked, decision, settings).report
    assert other is not None
    step = replace(decision.report.step, seconds=longer * other.step_seconds)
    ours = replace(decision.report, step=step, error_band=(upper, upper), fit_probability=1.0)
    answer = why_not(asked, replace(decision, report=ours), settings)
    assert answer.verdict is verdict
    assert told in " ".join(answer.sentences)
    assert ("faster" in answer.verdict.value) == (verdict is Verdict.UNSURE)


def test_what_costs_more_or_needs_more_is_called_so() -> None:
    for objective, verdict in ((Objective.COST, Verdict.DEARER), (Objective.MEMORY, Verdict.LARGER)):
        asked = question(constraints=Constraints(fix={"context": 1, "pipeline": 1}))
        asked = replace(asked, job=replace(asked.job, objective=objective))
        decision = decide(asked)
        settings = {"tensor": 2 if decision.design.plan.tensor != 2 else 4}
        assert why_not(asked, decision, settings).verdict is verdict


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("tp=8", "tensor-divides-heads"),
        ("pp=4,mbs=16,schedule=1f1b", "microbatches-fill"),
        ("mbs=3", "batch-is-asked"),
        ("devices=4", "world-is-whole"),
        ("vpp=2,pp=1,schedule=interleaved", "chunks-are-interleaved"),
        ("zero=1,shard=1,cp=1", "sharding-has-ranks"),
        ("tp=1,sp=on", "sequence-parallel-divides"),
    ],
)
def test_illegal_settings_name_the_rule(text: str, rule: str) -> None:
    answer = ask(text, question(of=FEW_HEADS))
    assert answer.verdict is Verdict.ILLEGAL
    assert any(f"rule {rule}" in problem.why for problem in answer.problems), answer.problems
    assert any(rule in line for line in answer.sentences)


def test_a_precision_that_no_device_has_is_illegal() -> None:
    answer = ask("precision=nvfp4")
    assert answer.verdict is Verdict.ILLEGAL
    assert any("rule precision-known" in problem.why for problem in answer.problems), answer.problems


def test_the_nearest_change_of_illegal_settings_is_legal_and_fits() -> None:
    asked = question(of=FEW_HEADS)
    answer = ask("tp=8", asked)
    assert answer.nearest is not None
    assert answer.nearest.tensor == 4
    made = replace(decide(asked).design, plan=answer.nearest)
    assert check(made, scopes=frozenset({search.Scope.PLAN, search.Scope.MEMORY})) == ()
    assert answer.nearest_seconds == pytest.approx(cost.predict(made).step_seconds)
    assert any("tensor 4 instead of tensor 8" in line for line in answer.sentences)


def test_settings_that_do_not_fit_say_by_how_much_where_and_what_would() -> None:
    roomy, settings = question(), {"tensor": 1, "pipeline": 1, "zero": "none"}
    alone = replace(roomy.job, constraints=Constraints(fix=settings, slowdown=1e9), objective=Objective.MEMORY)
    need = search.design(roomy.model, roomy.cluster, alone, top=1).report.peak_bytes
    tight = question(memory_bytes=need * 0.9)
    decision = decide(tight)
    answer = why_not(tight, decision, settings)
    assert answer.verdict is Verdict.TOO_LARGE
    assert answer.report is not None
    assert not answer.report.fits
    assert answer.report.peak_bytes == pytest.approx(need)
    text = " ".join(answer.sentences)
    assert "pipeline rank 0" in text
    assert "too much; most of what the device holds is" in text
    assert answer.nearest is not None
    moved = [name for name, value in settings.items() if columns_of(answer.nearest)[name] != value]
    assert len(moved) == 1
    assert cost.predict(replace(decision.design, plan=answer.nearest)).fits


def test_a_constraint_that_refuses_the_settings_is_dropped_and_said() -> None:
    for constraints in (Constraints(fix={"tensor": 2}), Constraints(forbid=("tensor=4",))):
        answer = ask("tp=4", question(constraints=constraints))
        assert answer.verdict is Verdict.WORSE
        assert answer.plan is not None
        assert answer.plan.tensor == 4
        assert "job.constraints." in answer.sentences[0]


@pytest.mark.slow
def test_what_every_answer_says_is_true_over_a_grid_of_settings() -> None:
    asked = question()
    decision = decide(asked)
    for tensor, pipeline, microbatch in itertools.product((1, 3), (1, 8), (1, 5)):
        settings = {"tensor": tensor, "pipeline": pipeline, "microbatch": microbatch}
        answer = why_not(asked, decision, settings)
        job = replace(asked.job, constraints=Constraints(fix=settings))
        legal = len(search.decide.legal_space(asked.model, asked.cluster, job).table) > 0
        assert (answer.verdict is Verdict.ILLEGAL) == (not legal), settings
        if answer.verdict is Verdict.WORSE:
            assert answer.gaps[0].seconds >= 0, "nothing that fits is faster than the best"


ALTERNATIVE = re.compile(
    r"(?:(?P<axis>tensor|pipeline|context|expert|shard|microbatch) (?P<degree>\d+)|(?P<zero>zero\d)|"
    r"(?P<again>\w+) recompute|(?P<schedule>gpipe|1f1b|interleaved|breadth-first|zb-\S+|dualpipe-v|seq1f1b))"
    r" instead of "
)
CHANGE = re.compile(r"would take (?:(?P<share>[\d.]+ %) (?P<way>more|less) time|as long)")


def settings_of(line: str) -> dict[str, int | str] | None:
    """The settings that a reason is about; None for one of another form."""
    found = ALTERNATIVE.match(line)
    if found is None:
        return None
    if found["axis"]:
        return {found["axis"]: int(found["degree"])}
    if found["zero"] or found["schedule"]:
        return {"zero" if found["zero"] else "schedule": found["zero"] or found["schedule"]}
    return {"recompute": "none" if found["again"] == "no" else found["again"]}


@pytest.mark.parametrize(
    ("model", "cluster", "sets"),
    [
        pytest.param("llama-3.1-8b", "24xH100", ["batch_tokens=16Ki"], marks=pytest.mark.slow),
        ("llama-2-7b", "4xA100-40GB", ["sequence_length=4096", "batch_tokens=256Ki"]),
    ],
)
def test_a_reason_and_the_question_behind_it_say_the_same(model: str, cluster: str, sets: list[str]) -> None:
    """On these a reason said `more time` of the upper end where the question said `faster`, or another figure."""
    asked = Question(
        model=catalog.load_model(model), cluster=catalog.load_cluster(cluster), job=catalog.load_job(None, sets=sets)
    )
    decision = search.design(asked.model, asked.cluster, asked.job)
    told = 0
    for line in decision.why:
        settings = settings_of(line)
        if settings is None:
            continue
        answer = why_not(asked, decision, settings)
        assert answer.report is not None, line
        change = answer.report.step_seconds / decision.report.step_seconds - 1.0
        said = CHANGE.search(line)
        assert said is not None, line
        if said["share"]:
            assert said["share"] == format_percent(abs(change)), (line, answer.sentences)
            assert (said["way"] == "more") == (change > 0), line
        else:
            assert abs(change) < TIE, line
        assert ("; but " in line) == (answer.verdict is Verdict.UNSURE), line
        told += 1
    assert told >= 4
