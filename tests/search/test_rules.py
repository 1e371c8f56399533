"""Every rule in both directions: a design it accepts and one it refuses, by its name and with a fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from meshwright.schedule import placement
from meshwright.schedule import problems as schedule_problems
from meshwright.schedule.build import LOOPS, V_SHAPES
from meshwright.search import RULES, Rule, Scope, check
from meshwright.search.degree_rules import least_microbatches
from meshwright.search.rules import choices, divisors
from meshwright.spec.cluster import Link, Precision
from meshwright.spec.job import Constraints
from meshwright.spec.model import Layer, Tower
from meshwright.spec.plan import (
    Axis,
    AxisName,
    Design,
    Exchange,
    ExpertGrid,
    Offload,
    Recompute,
    Schedule,
    ScheduleKind,
    Sharding,
)
from meshwright.spec.routing import Routing
from tests.search import search_samples as samples

D = samples.design
ANYWHERE = frozenset({Scope.PLAN, Scope.MEMORY})
DROPPING = Routing(capacity=1.0)
HALF = samples.job(sequences=16)
FEWER = samples.job(constraints=Constraints(devices="any"))
INTERLEAVED = Schedule(kind=ScheduleKind.INTERLEAVED, microbatches=8, chunks=2)


def planned(design: Design, **fields: object) -> Design:
    return replace(design, plan=replace(design.plan, **fields))


def turned(design: Design) -> Design:
    """The design with its axes from the innermost outwards."""
    return planned(design, axes=tuple(reversed(design.plan.axes)))


def scheduled(design: Design, **fields: object) -> Design:
    return planned(design, schedule=replace(design.plan.schedule, **fields))


def regrouped(design: Design, stage: int = 0, **fields: object) -> Design:
    """The design with its stage's one group changed."""
    stages = list(design.plan.stages)
    stages[stage] = replace(stages[stage], groups=(replace(stages[stage].groups[0], **fields),))
    return planned(design, stages=tuple(stages))


def reranked(design: Design, *ranks: int) -> Design:
    stages = (replace(stage, rank=rank) for stage, rank in zip(design.plan.stages, ranks, strict=True))
    return planned(design, stages=tuple(stages))


def small_memory() -> Design:
    device = samples.device(memory_bytes=2**16)
    return D(on=samples.cluster(samples.nodes(of=device)))


def odd_length() -> Design:
    job = samples.job(length=129)
    return planned(D(asked=job), sequence_length=129)


def hosted() -> Design:
    link = Link(bandwidth=2e10, latency_seconds=1e-5)
    return D(offload=Offload.OPTIMIZER, on=samples.cluster(samples.nodes(host=link)))


@dataclass(frozen=True)
class Case:
    legal: Callable[[], Design]
    illegal: Callable[[], Design]
    says: str


def constrained(**fields: object) -> Design:
    return D(asked=samples.job(constraints=Constraints(**fields)))


CASES = {
    "answers-design": Case(D, lambda: planned(D(), model="other"), "'other' is not the design's model 'small'"),
    "axes-once": Case(
        D, lambda: planned(D(), axes=(*D().plan.axes, Axis(name=AxisName.TENSOR, size=1))), "tensor is named 2 times"
    ),
    "axes-order": Case(
        lambda: planned(D(), axes=D().plan.axes[:1] + D().plan.axes[2:]),
        lambda: turned(D(on=samples.cluster(samples.nodes(num_nodes=3, devices_per_node=3)), asked=FEWER)),
        "what the order tensor, shard, pipeline costs is not known (an axis does not fill its nodes evenly; rule "
        "axes-order); order them pipeline, replicate, shard, context, tensor",
    ),
    "runtime-order": Case(
        lambda: planned(D(), axes=(*D().plan.axes[1:4], D().plan.axes[0], D().plan.axes[4])),
        lambda: turned(D()),
        "axes in the order tensor, shard, pipeline can be predicted and not trained yet",
    ),
    "world-fits": Case(
        D, lambda: D(shard=4, on=samples.cluster(samples.nodes(devices_per_node=4))), "16 ranks and the cluster has 4"
    ),
    "world-is-whole": Case(
        lambda: D(
            shard=1, schedule=Schedule(microbatches=16), asked=samples.job(constraints=Constraints(devices="any"))
        ),
        lambda: D(shard=1, schedule=Schedule(microbatches=16)),
        "4 ranks and the job asks for all 8 devices",
    ),
    "placement-permutes": Case(
        lambda: planned(D(), placement=(7, 6, 5, 4, 3, 2, 1, 0)),
        lambda: planned(D(), placement=(0, 0, 1, 2, 3, 4, 5, 6)),
        "device 0 holds more than one rank",
    ),
    "stages-cover": Case(lambda: D(bounds=(0, 1, 8)), lambda: regrouped(D(), 1, start=5), "5 does not follow block 3"),
    "stages-match-pipeline": Case(
        lambda: D(schedule=INTERLEAVED), lambda: scheduled(D(), chunks=2), "2 stages for pipeline 2 of 2 chunks"
    ),
    "embedding-first": Case(D, lambda: reranked(D(), 1, 0), "embedding is not on the first pipeline rank"),
    "head-last": Case(D, lambda: reranked(D(), 1, 0), "head is not on the last pipeline rank"),
    "stages-loop": Case(
        lambda: D(schedule=INTERLEAVED), lambda: reranked(D(schedule=INTERLEAVED), 0, 0, 1, 1), "choose rank 1"
    ),
    "groups-uniform": Case(
        lambda: regrouped(D(), 1, recompute=Recompute.FULL),
        lambda: regrouped(D(), 1, precision=Precision.FP32),
        "plan.stages[*].groups[*].precision: groups differ",
    ),
    "tensor-is-axis": Case(D, lambda: regrouped(D(), 0, tensor=1), "1 is not the size of the tensor axis, 2"),
    "tensor-divides-heads": Case(
        lambda: D(tensor=4, shard=1, schedule=Schedule(microbatches=16)),
        lambda: D(of=samples.model(layer=samples.dense_layer(heads=9))),
        "2 does not divide 9 heads",
    ),
    "tensor-divides-kv-heads": Case(
        D,
        lambda: D(of=samples.model(layer=samples.dense_layer(kv_heads=1))),
        "plan.stages[0].groups[0].tensor: 2 does not divide 1 key-value heads (rule tensor-divides-kv-heads); choose 1",
    ),
    "tensor-divides-hidden": Case(
        D,
        lambda: D(of=samples.model(layer=samples.dense_layer(hidden=191))),
        "2 does not divide 191 features of the feed-forward",
    ),
    "tensor-divides-vocab": Case(
        D, lambda: D(of=samples.model(vocab=511)), "2 does not divide 511 entries of the vocabulary"
    ),
    "sequence-parallel-divides": Case(D, odd_length, "tensor 2 does not divide the sequence length 129"),
    "sharding-has-ranks": Case(
        D, lambda: regrouped(regrouped(D(), 0, sharding=Sharding.NONE), 1, sharding=Sharding.NONE), "nothing is sharded"
    ),
    "precision-known": Case(
        lambda: D(precision=Precision.FP32), lambda: D(precision=Precision.FP8), "device has no fp8 arithmetic"
    ),
    "batch-is-asked": Case(D, lambda: D(microbatch=1), "are 16 sequences, and the job's batch is 32"),
    "sequence-fits-positions": Case(
        lambda: D(of=samples.model(positions=128)),
        lambda: D(of=samples.model(positions=64)),
        "128 is more than the 64 positions",
    ),
    "chunks-are-interleaved": Case(
        lambda: D(schedule=INTERLEAVED),
        lambda: D(schedule=Schedule(kind=ScheduleKind.GPIPE, microbatches=8, chunks=2)),
        "2 chunks under gpipe",
    ),
    "microbatches-fill": Case(
        lambda: D(microbatch=16, schedule=Schedule(kind=ScheduleKind.GPIPE, microbatches=1)),
        lambda: D(microbatch=16, schedule=Schedule(microbatches=1)),
        "1 microbatches do not fill a pipeline of 2 under 1f1b",
    ),
    "microbatches-round": Case(
        lambda: D(schedule=INTERLEAVED),
        lambda: D(microbatch=1, schedule=replace(INTERLEAVED, microbatches=5), asked=samples.job(sequences=10)),
        "5 microbatches are not whole rounds of pipeline 2",
    ),
    "context-divides": Case(
        lambda: D(context=2, shard=1, asked=HALF),
        lambda: planned(D(context=2, shard=1, asked=samples.job(length=126, sequences=16)), sequence_length=126),
        "2 x context 2 does not divide the sequence length 126",
    ),
    "context-attends": Case(
        lambda: D(
            of=samples.model(layer=samples.recurrent_layer()),
            context=2,
            shard=1,
            asked=HALF,
            exchange=Exchange(inner=2),
        ),
        lambda: D(of=samples.model(layer=samples.recurrent_layer()), context=2, shard=1),
        "a recurrence runs along the whole sequence",
    ),
    "exchange-divides": Case(
        lambda: D(context=2, shard=1, asked=HALF, exchange=Exchange(inner=2)),
        lambda: D(context=2, shard=1, asked=HALF, exchange=Exchange(inner=4)),
        "4 ranks that trade heads do not divide a context axis of 2",
    ),
    "experts-divide": Case(
        lambda: D(experts=ExpertGrid(expert=2, tensor=2), of=samples.model(layer=samples.mixture_layer())),
        lambda: D(experts=ExpertGrid(expert=8), of=samples.model(layer=samples.mixture_layer())),
        "expert 8 x tensor 1 does not divide the 4 ranks of a stage",
    ),
    "offload-has-host": Case(
        hosted, lambda: D(offload=Offload.OPTIMIZER), "nothing is known of the link from a nodes to its host's memory"
    ),
    "slices-divide": Case(
        lambda: D(schedule=Schedule(kind=ScheduleKind.SEQUENCE_1F1B, microbatches=8, slices=4)),
        lambda: D(schedule=Schedule(microbatches=8, slices=4)),
        "4 slices under 1f1b",
    ),
    "keeps-constraints": Case(
        lambda: constrained(fix={"tensor": 2}, forbid=("recompute=full",)),
        lambda: constrained(forbid=("pipeline",)),
        "plan (pipeline 2): refused by job.constraints.forbid[0]",
    ),
    "memory-fits": Case(D, small_memory, "has"),
    "runtime-axes": Case(
        D,
        lambda: D(context=2, shard=1, asked=HALF),
        "context parallel 2 can be predicted and not trained yet",
    ),
    "runtime-experts": Case(
        lambda: D(experts=ExpertGrid(expert=2), of=samples.model(layer=samples.mixture_layer(routing=DROPPING))),
        lambda: D(context=2, shard=1, asked=HALF, of=samples.model(layer=samples.mixture_layer(routing=DROPPING))),
        "experts counted over a sequence that context ranks divide can be predicted and not trained yet",
    ),
    "runtime-schedule": Case(
        D,
        lambda: D(schedule=Schedule(kind=ScheduleKind.ZERO_BUBBLE_H1, microbatches=8)),
        "zb-h1 can be predicted and not trained yet",
    ),
    "runtime-offload": Case(
        D,
        hosted,
        "offload of optimizer can be predicted and not trained yet",
    ),
    "runtime-precision": Case(D, lambda: D(precision=Precision.FP16), "fp16 can be predicted and not trained yet"),
    "runtime-layers": Case(
        D,
        lambda: D(
            tensor=1, shard=4, schedule=Schedule(microbatches=4), of=samples.model(layer=samples.recurrent_layer())
        ),
        "a recurrence can be predicted and not trained yet",
    ),
    "runtime-towers": Case(
        D, lambda: D(of=replace(samples.model(), towers=(Tower(name="vision", parameters=1000),))), "vision"
    ),
}


def test_every_rule_has_a_case_in_both_directions() -> None:
    names = [rule.name for rule in RULES]
    assert len(names) == len(set(names))
    assert set(names) == set(CASES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_accepts_what_is_legal(rule: Rule) -> None:
    design = CASES[rule.name].legal()
    assert rule(design) is None
    assert check(design, scopes=frozenset(Scope) if rule.scope is Scope.RUNTIME else ANYWHERE) == ()


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
    design = D(of=samples.model(layer=samples.dense_layer(kv_heads=1, hidden=191)), precision=Precision.FP8)
    text = " ".join(map(str, check(design)))
    assert all(name in text for name in ("tensor-divides-kv-heads", "tensor-divides-hidden", "precision-known"))


def test_a_runtime_rule_does_not_forbid_the_prediction() -> None:
    design = D(precision=Precision.FP16)
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


@pytest.mark.parametrize("kind", list(ScheduleKind))
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
        assert ("microbatches-fill" in heard) == (microbatches < least)
        sizes = {"pipeline": pipeline, "chunks": chunks, "microbatches": microbatches, "slices": slices}
        if not heard:
            assert schedule_problems(kind, **sizes) == ()
