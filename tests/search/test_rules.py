"""Every rule in both directions: a design it accepts and one it refuses, by its name and with a fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from meshwright.schedule import NAMED, build, placement
from meshwright.schedule import problems as schedule_problems
from meshwright.schedule.build import LOOPS, V_SHAPES
from meshwright.schedule.table import Table
from meshwright.search import RULES, Rule, Scope, check
from meshwright.search.degree_rules import batch_is_asked, least_microbatches, namesake, sharding_has_ranks
from meshwright.search.extent_rules import extents_divide
from meshwright.search.job_rules import check_job
from meshwright.search.rules import choices, divisors
from meshwright.search.runtime_rules import gradients_reduced, products_whole
from meshwright.spec.cluster import DeviceKind, Precision
from meshwright.spec.errors import ConfigError
from meshwright.spec.model import Layer
from meshwright.spec.plan import (
    Design,
    Schedule,
    ScheduleKind,
    Sharding,
    Training,
)
from meshwright.spec.skip import Swap
from meshwright.spec.synchronize import GradientSync, SynchronizeSpec, SyncKind
from tests.search import search_samples as samples
from tests.search.rule_cases import ANYWHERE, CASES, EVEN
from tests.search.rule_designs import (
    INTERLEAVED,
    SHARDS_AWAY,
    D,
    of_kinds,
    on_paths,
    planned,
    regrouped,
    reranked,
    scheduled,
    tabled,
)


def test_every_rule_has_a_case_in_both_directions() -> None:
    names = [rule.name for rule in RULES]
    assert len(names) == len(set(names))
    assert set(names) == set(CASES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_accepts_what_is_legal(rule: Rule) -> None:
    design = CASES[rule.name].legal()
    assert rule(design) is None
    assert check(design, scopes=ANYWHERE | {rule.scope}) == ()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_refuses_in_words_with_a_fix(rule: Rule) -> None:
    design = CASES[rule.name].illegal()
    problem = rule(design)
    assert problem is not None
    assert CASES[rule.name].says in str(problem)
    assert f"rule {rule.name})" in str(problem)
    assert problem.fix
    assert problem.where
    assert problem in check(design)
    assert check(design, scopes=frozenset(Scope) - {rule.scope}) == () or rule.scope is not Scope.PLAN


@pytest.mark.parametrize(
    "layer",
    [
        samples.recurrent_layer(),
        replace(samples.dense_layer(), extra_parameters=8),
        replace(samples.dense_layer(), tokens=0.5),
        replace(samples.dense_layer(), mixer=replace(samples.dense_layer().mixer, causal=False)),
        replace(samples.latent_layer(), mixer=replace(samples.latent_layer().mixer, indexer=samples.INDEXER)),
        replace(
            samples.mixture_layer(),
            transform=replace(samples.mixture_layer().transform, shared=samples.dense_layer().transform),
        ),
    ],
)
def test_layers_without_a_module_are_predicted_only(layer: Layer) -> None:
    design = D(tensor=1, shard=4, schedule=Schedule(microbatches=4), of=samples.model(layer=layer))
    assert "can be predicted and not trained yet" in str(check(design)[0])
    assert check(design, scopes=frozenset({Scope.PLAN, Scope.MEMORY})) == ()


@pytest.mark.parametrize("layer", [samples.latent_layer(), samples.mixture_layer()])
def test_layers_of_every_kind_divide_over_tensor_ranks(layer: Layer) -> None:
    assert check(D(of=samples.model(layer=layer, tied=True))) == ()


def test_all_violations_come_at_once() -> None:
    design = D(of=samples.model(layer=samples.dense_layer(heads=6, kv_heads=3, hidden=191)), precision=Precision.FP8)
    text = " ".join(map(str, check(design)))
    assert all(name in text for name in ("tensor-shares-kv-heads", "tensor-divides-hidden", "precision-known"))


def test_rounded_products_are_of_heads_that_one_rank_holds() -> None:
    few = samples.model(layer=samples.dense_layer(kv_heads=1))
    for precision, told in ((Precision.FP8, True), (Precision.BF16, False)):
        found = products_whole(D(of=few, precision=precision))
        assert (found is not None) is told
        assert found is None or found.fix == "choose a tensor degree up to 1, or bf16"
    assert products_whole(D(precision=Precision.FP8)) is None


def test_gradients_in_eight_bits_meet_over_two_axes_where_devices_hold_them() -> None:
    eight = GradientSync(precision=Precision.INT8)
    for replicate, told in ((1, False), (2, True)):
        held = planned(D(replicate=replicate, pipeline=1), gradients=eight)
        assert gradients_reduced(held) is None
        away = gradients_reduced(regrouped(held, 0, **SHARDS_AWAY))
        assert (away is not None) is told
        assert away is None or "among replicas of shards in the host's memory" in away.what


def test_of_one_wrong_number_of_a_group_the_first_cause_is_told() -> None:
    for value in (1, 3):
        (problem,) = check(regrouped(D(), 1, tensor=value))
        assert problem.where == "plan.stages[1].groups[0].tensor"
        assert "is not the size of the tensor axis" in problem.what


def test_a_runtime_rule_does_not_forbid_the_prediction() -> None:
    design = of_kinds(D(), DeviceKind.TPU)
    assert check(design, scopes=frozenset({Scope.PLAN, Scope.MEMORY})) == ()
    assert [str(problem) for problem in check(design)]


def test_divisors_and_choices() -> None:
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert divisors(1) == (1,)
    assert choices((1, 2, 4, 8)) == "choose 1, 2, 4 or 8"
    assert choices((1,)) == "choose 1"


V = Schedule(kind=ScheduleKind.ZERO_BUBBLE_V, microbatches=8, chunks=2)


def told(design: Design) -> dict[str, str]:
    """What the rules of schedules and stages say, by rule."""
    names = (
        "chunks-are-interleaved",
        "microbatches-fill",
        "microbatches-pair",
        "microbatches-round",
        "embedding-first",
        "head-last",
        "stages-loop",
        "stages-match-pipeline",
    )
    found = ((rule.name, rule(design)) for rule in RULES if rule.name in names)
    return {name: str(problem) for name, problem in found if problem is not None}


@pytest.mark.parametrize("kind", [ScheduleKind.ZERO_BUBBLE_V, ScheduleKind.DUAL_PIPE_V])
def test_a_v_holds_both_ends_of_the_model_on_the_first_rank(kind: ScheduleKind) -> None:
    design = D(schedule=replace(V, kind=kind))
    assert told(reranked(design, 0, 1, 1, 0)) == {}
    looped = told(reranked(design, 0, 1, 0, 1))
    assert set(looped) == {"head-last", "stages-loop"}
    assert "the head is not on the first pipeline rank" in looped["head-last"]
    assert "0 breaks the V of pipeline 2 (rule stages-loop); choose rank 1" in looped["stages-loop"]
    assert "stages-loop" in told(reranked(D(schedule=INTERLEAVED), 0, 1, 1, 0))


@pytest.mark.parametrize(
    ("kind", "chunks", "pipeline", "says"),
    [
        (ScheduleKind.BREADTH_FIRST, 2, 2, ""),
        (ScheduleKind.BREADTH_FIRST, 4, 1, ""),
        (ScheduleKind.BREADTH_FIRST, 1, 2, "choose gpipe, or 2 chunks"),
        (ScheduleKind.INTERLEAVED, 2, 1, "choose 1f1b, or 2 chunks"),
        (ScheduleKind.ZERO_BUBBLE_H1, 1, 2, ""),
        (ScheduleKind.ZERO_BUBBLE_H2, 2, 2, "2 chunks under zb-h2"),
        (ScheduleKind.SEQUENCE_1F1B, 2, 2, "2 chunks under seq1f1b"),
        (ScheduleKind.ZERO_BUBBLE_V, 1, 2, "zb-v has 1 chunks and its ranks hold two stages"),
        (ScheduleKind.ZERO_BUBBLE_V, 3, 2, "zb-v has 3 chunks and its ranks hold two stages"),
        (ScheduleKind.DUAL_PIPE_V, 2, 1, "dualpipe-v has 2 chunks on 1 pipeline ranks"),
    ],
)
def test_schedules_have_the_chunks_they_know(kind: ScheduleKind, chunks: int, pipeline: int, says: str) -> None:
    shape = Schedule(kind=kind, chunks=chunks, microbatches=8)
    heard = told(D(pipeline=pipeline, shard=4 // pipeline, schedule=shape))
    assert says in heard.get("chunks-are-interleaved", "")
    assert ("chunks-are-interleaved" in heard) == bool(says)


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (tabled("0F*8 0B*8"), "plan.schedule.table: 1 row for 2 pipeline ranks (rule table-is-legal); write one row"),
        (tabled("0F*8 0B*8", "1F*8 1G*8"), "plan.schedule.table[1]: '1G*8' is no pass (rule"),
        (tabled("0F*8 0B*8", "1F*8 1B*8)"), "brackets of '1F*8 1B*8)' do not match"),
        (tabled("0F*8 0B*8", "(1F 1B*8"), "a bracket of '(1F 1B*8' is not closed"),
        (tabled("0F*8 0B*8", ""), "plan.schedule.table[1]: nothing is done"),
        (tabled("0F*9999999 0B*8", "1F*8 1B*8"), "plan.schedule.table[0]: more than 1,000,000 passes"),
        (tabled("0F*8 0B*8", "0F*8 0B*8"), "plan.schedule.table[1]: passes of stage 0 on rank 1 of 2, with 1 stage a"),
        (tabled("1F*8 1B*8", "0F*8 0B*8"), "on rank 0 of 2, with 1 stage a rank, and 1 more (rule table-is-legal)"),
        (tabled("0F*8 0B*7", "1F*8 1B*8"), "stage 0: 8 F and 7 B for 8 microbatches"),
        (tabled("0F*9 0B*9", "1F*9 1B*9"), "stage 0: 9 F and 9 B for 8 microbatches, and 1 more"),
        (tabled("0F*8 0B*8", "1F*8 1I*7 1B 1W*8"), "stage 1: 8 F, 1 B, 7 I and 8 W for 8 microbatches"),
        (tabled("0F*8 0B*8", "1F*8 1I 1W*8 1I*7"), "plan.schedule.table[1][10]: 1W1 comes before 1I1"),
        (tabled("0F*8 0B*8", "(1B 1F)*8"), "plan.schedule.table[1][0]: 1B0 comes before 1F0"),
        (tabled("0F*8 0B*8", "1F*8 1B*8", chunks=2), "passes of stage 0 on rank 0 of 2, with 2 stages a rank"),
        (replace(tabled("0F*8 0B*8", "1F*8 1B*8"), kind=ScheduleKind.GPIPE), "a table beside kind gpipe"),
        (tabled("0F*8 0B*8", "1F*8 1B*8", slices=2), "plan.schedule.slices: 2 slices under table"),
    ],
)
def test_a_table_that_is_not_legal_is_refused_in_words(schedule: Schedule, says: str) -> None:
    problems = check(planned(D(), schedule=schedule))
    assert problems
    assert any(says in str(problem) and problem.fix for problem in problems)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (
            lambda: on_paths(*EVEN, share=0.25),
            "the job allows 25.0 % (what is trained so is another model; rule paths",
        ),
        (
            lambda: on_paths((0, 2, 1, 3), *EVEN, (0, 2, 1, 3), swap=Swap.NONE),
            "stages are passed out of turn and the job allows none (rule paths-are-asked)",
        ),
        (lambda: scheduled(on_paths(*EVEN), table=()), "plan.schedule.table: 0 rows for 4 pipeline ranks"),
        (lambda: scheduled(on_paths(*EVEN), kind=ScheduleKind.GPIPE, table=()), "paths beside kind gpipe"),
        (lambda: scheduled(on_paths(*EVEN), chunks=2), "paths of microbatches through 2 stages a rank"),
        (lambda: scheduled(on_paths(*EVEN), paths=("0 3",) * 8), "stage 1 is on no path"),
        (lambda: scheduled(on_paths(*EVEN), slices=2), "2 slices under table"),
    ],
)
def test_paths_that_are_not_legal_are_refused_in_words(entry: Callable[[], Design], says: str) -> None:
    problems = check(entry())
    assert any(says in str(problem) and problem.fix for problem in problems), [str(each) for each in problems]


def test_a_table_is_of_a_pipeline() -> None:
    (problem,) = check(D(pipeline=1, shard=4, microbatch=1, schedule=tabled("0F*8 0B*8")))
    assert "a table of one pipeline rank (rule table-is-legal); choose 1f1b" in str(problem)


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize("slices", [1, 2])
def test_what_fills_a_pipeline_and_rounds_is_what_build_gives(kind: ScheduleKind, pipeline: int, slices: int) -> None:
    chunks = 2 if kind in LOOPS | V_SHAPES else 1
    slices = slices if kind is ScheduleKind.SEQUENCE_1F1B else 1
    least = least_microbatches(kind, pipeline=pipeline, slices=slices)
    for microbatches in range(1, 3 * pipeline):
        shape = Schedule(kind=kind, chunks=chunks, microbatches=microbatches, slices=slices)
        design = D(pipeline=pipeline, shard=4 // pipeline, schedule=shape)
        places = placement(kind, pipeline=pipeline, chunks=chunks)
        heard = told(reranked(design, *places))
        sizes = {"pipeline": pipeline, "chunks": chunks, "microbatches": microbatches, "slices": slices}
        unbuilt = schedule_problems(kind, **sizes)
        assert ("microbatches-fill" in heard) == (microbatches < least)
        assert bool(heard.keys() - {"microbatches-fill"}) == bool(unbuilt)


@pytest.mark.parametrize("pipeline", [1, 2, 3, 4])
def test_the_search_has_one_name_for_one_order_of_passes(pipeline: int) -> None:
    for microbatches in range(1, 2 * pipeline + 2):
        seen: dict[Table, ScheduleKind] = {}
        for kind, chunks, slices in product(NAMED, (1, 2), (1, 2, 4)):
            sizes = {"pipeline": pipeline, "microbatches": microbatches, "slices": slices}
            alone = pipeline == 1 and kind not in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.BREADTH_FIRST)
            single = (kind in LOOPS and chunks == 1) or (kind is ScheduleKind.SEQUENCE_1F1B and slices == 1)
            unfilled = microbatches < least_microbatches(kind, pipeline=pipeline, slices=slices)
            unbuilt = schedule_problems(kind, chunks=chunks, **sizes)
            if alone or single or unfilled or unbuilt or namesake(kind, **sizes):
                continue
            assert seen.setdefault(build(kind, chunks=chunks, **sizes), kind) is kind, (kind, sizes)


@pytest.mark.parametrize(
    ("kind", "sequences", "fix"),
    [
        (ScheduleKind.ZERO_BUBBLE_V, 8, "choose 8 microbatches of 1 sequence"),
        (ScheduleKind.ONE_F_ONE_B, 24, "choose 4 microbatches of 6 sequences, or gpipe"),
        (ScheduleKind.INTERLEAVED, 24, "choose 4 microbatches of 6 sequences, or breadth-first"),
        (
            ScheduleKind.INTERLEAVED,
            6,
            "choose breadth-first, or a smaller pipeline, or a larger batch: the 6 sequences",
        ),
        (ScheduleKind.DUAL_PIPE_V, 6, "choose a smaller pipeline, or a larger batch: the 6 sequences of a data rank"),
    ],
)
def test_microbatches_that_are_suggested_can_be_taken(kind: ScheduleKind, sequences: int, fix: str) -> None:
    """Seven microbatches or more fill a V of four ranks, and eight sequences cannot be cut into seven."""
    chunks, job = 2 if kind in LOOPS | V_SHAPES else 1, samples.job(sequences=sequences)
    places = placement(kind, pipeline=4, chunks=chunks)

    def heard(microbatches: int) -> dict[str, str]:
        shape = Schedule(kind=kind, chunks=chunks, microbatches=microbatches)
        size = sequences // microbatches
        return told(reranked(D(pipeline=4, shard=1, schedule=shape, microbatch=size, asked=job), *places))

    said = heard(6 if kind is ScheduleKind.INTERLEAVED else 2)
    assert said
    assert all(f"; {fix}" in each for each in said.values())
    if "microbatches of" in fix:
        assert heard(int(fix.split()[1])) == {}


def test_an_offload_that_is_fixed_needs_a_host_that_is_known() -> None:
    job = samples.job()
    fixed = replace(job, constraints=replace(job.constraints, fix={"offload": "optimizer"}))
    with pytest.raises(
        ConfigError, match=r"fix.offload: nothing is known of the link .*rule offload-has-host"
    ) as caught:
        check_job(samples.model(), samples.cluster(), fixed)
    assert len(caught.value.problems) == 1
    check_job(samples.model(), samples.cluster(), job)


def test_a_group_of_more_blocks_than_there_are_is_refused_before_anybody_counts_them():
    made = samples.design()
    stage = made.plan.stages[-1]
    endless = replace(stage.groups[-1], stop=10**15, training=Training.FROZEN)
    stages = (*made.plan.stages[:-1], replace(stage, groups=(endless,)))
    (problem,) = check(replace(made, plan=replace(made.plan, stages=stages)))
    assert "are more than the" in problem.what


def test_empty_rows_of_a_batch_that_is_whole_without_them_are_told_to_go() -> None:
    whole = samples.design()
    found = batch_is_asked(replace(whole, plan=replace(whole.plan, empty_rows=1)))
    assert found is not None
    assert found.fix == "choose 0 empty rows"


def test_ranks_of_the_only_group_are_told_to_be_left_out() -> None:
    design = samples.design()
    stages = tuple(
        replace(stage, groups=tuple(replace(group, shards=3) for group in stage.groups))
        for stage in design.plan.stages[:1]
    )
    alone = replace(design, plan=replace(design.plan, stages=stages))
    found = extents_divide(alone)
    assert found is not None
    assert found.fix == "leave it out"


def test_groups_over_ranks_of_their_own_beside_a_shard_axis_of_one_are_told_the_plan_that_is_alike() -> None:
    """Of four replicas: a stage over all of them, and one that has everything whole."""
    plain = D(pipeline=2, tensor=1, replicate=4, shard=1)
    apart = regrouped(regrouped(plain, 0, sharding=Sharding.PARAMETERS, shards=4), 1, sharding=Sharding.OPTIMIZER)
    found = sharding_has_ranks(apart)
    assert found is not None
    assert found.what == "groups over 4 ranks of their own beside a shard axis of 1"
    assert found.fix.startswith("choose replicate 1 and shard 4: groups over 4 do not say so then")
    alike = D(pipeline=2, tensor=1, replicate=1, shard=4, schedule=Schedule(microbatches=4))
    alike = regrouped(regrouped(alike, 0, sharding=Sharding.PARAMETERS), 1, sharding=Sharding.OPTIMIZER, shards=1)
    assert check(alike) == ()


def test_a_batch_that_data_ranks_do_not_divide_is_offered_empty_rows() -> None:
    """Of two data ranks and 15 sequences each has eight rows, and one of them is empty; routers would count it."""
    odd = {"asked": samples.job(sequences=15), "microbatch": 3, "schedule": Schedule(microbatches=3)}
    found = batch_is_asked(D(**odd))
    assert found is not None
    assert found.fix == "choose 2 microbatches of 4 sequences and 1 empty row, or a data parallel size that divides 15"
    routed = batch_is_asked(D(**odd, of=samples.model(layer=samples.mixture_layer())))
    assert routed is not None
    assert routed.fix == "choose a data parallel size that divides 15"


def test_a_quorum_of_more_learners_than_there_can_be_is_refused() -> None:
    """Eight devices share the batch, and a grace waits for one learner more."""
    for quorum, grace, fix in ((9, 0.0, "from 1 to 8, or leave it out"), (8, 2.0, "from 1 to 7, or leave it out and")):
        asked = SynchronizeSpec(kinds=(SyncKind.DILOCO,), quorum=quorum, grace_seconds=grace)
        with pytest.raises(ConfigError, match=f"never comes together .*choose {fix}"):
            check_job(samples.model(), samples.cluster(), replace(samples.job(), synchronize=asked))
        check_job(samples.model(), samples.cluster(), replace(samples.job(), synchronize=replace(asked, quorum=7)))
