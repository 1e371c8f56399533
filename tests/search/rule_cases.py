"""For every rule a design that it accepts, one that it refuses, and what it then says."""

from __future__ import annotations

from dataclasses import replace

from meshwright.search import Scope
from meshwright.spec.cluster import DeviceKind, Precision
from meshwright.spec.exchange import Exchange
from meshwright.spec.job import Constraints, Switch
from meshwright.spec.model import Tower
from meshwright.spec.optimizer import Muon
from meshwright.spec.plan import (
    Axis,
    AxisName,
    ExpertGrid,
    Offload,
    Recompute,
    Schedule,
    ScheduleKind,
    Sharding,
    TensorGrid,
    Training,
)
from meshwright.spec.synchronize import GradientSync, SyncKind
from tests.search import search_samples as samples
from tests.search.asked_cases import ASKED_CASES
from tests.search.compression_cases import COMPRESSION_CASES, Case
from tests.search.elastic_cases import ELASTIC_CASES
from tests.search.quorum_cases import QUORUM_CASES
from tests.search.rule_designs import (
    DROPPING,
    FEWER,
    HALF,
    INTERLEAVED,
    SHARDS_AWAY,
    SLICED,
    D,
    compiled,
    constrained,
    emptied,
    factoring,
    frozen,
    gridded,
    grouped,
    hosted,
    leaping,
    met,
    odd_length,
    of_kinds,
    of_text,
    on_paths,
    planned,
    regrouped,
    reranked,
    rounded,
    rounding,
    scheduled,
    small_memory,
    tabled,
    tens,
    thin,
    tied,
    turned,
)
from tests.search.schedule_cases import SCHEDULE_CASES
from tests.search.torchft_cases import TORCHFT_CASES
from tests.support.designs import sharded
from tests.support.models import with_prefix

EVEN = ((0, 1, 3), (0, 2, 3)) * 4
FOUR = Schedule(microbatches=4)
WIDE = D(pipeline=1, shard=4, schedule=FOUR)
ANYWHERE = frozenset({Scope.PLAN, Scope.SEARCH, Scope.MEMORY})


CASES = {
    "counts-are-positive": Case(D, lambda: planned(D(), microbatch=0), "0 is not a count of anything"),
    "stages-hold-blocks": Case(
        D,
        lambda: planned(D(), stages=(replace(D().plan.stages[0], groups=()), D().plan.stages[1])),
        "plan.stages[0]: the stage holds no blocks",
    ),
    "learners-are-replicas": Case(
        met,
        lambda: planned(D(), gradients=met().plan.gradients),
        "learners meet as diloco and the replicate axis has one",
    ),
    "learners-hold-experts": Case(lambda: met(held=2), lambda: met(held=4), "a grid of 4 experts' ranks"),
    "spikes-are-of-all": Case(lambda: leaping(D()), lambda: leaping(met()), "learners see unlike losses"),
    "rounds-are-whole": Case(met, lambda: met(momentum=1.0), "1.0 is no momentum"),
    "rounds-fit-kind": Case(
        lambda: met(SyncKind.STREAMING, fragments=2, delay=5),
        lambda: met(SyncKind.STREAMING, fragments=2, delay=6),
        "2 fragments of 6 steps travel at once in rounds of 10 steps",
    ),
    "rounds-precision": Case(
        lambda: met(precision=Precision.INT4),
        lambda: met(precision=Precision.FP16),
        "learners that meet in fp16 can be predicted and not trained yet",
    ),
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
        lambda: turned(D()),
        lambda: turned(D(replicate=2, pipeline=1, schedule=Schedule(microbatches=4))),
        "axes in the order tensor, shard, replicate can be predicted and not trained yet",
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
    "tensor-grid-closes": Case(
        gridded,
        lambda: gridded(TensorGrid.CUBE),
        "4 tensor ranks are no cube (rule tensor-grid-closes)",
    ),
    "tensor-grid-alone": Case(
        gridded, lambda: gridded(sequence_parallel=True), "a square of tensor ranks and sequence parallel"
    ),
    "tensor-grid-divides": Case(
        lambda: gridded(TensorGrid.CUBE, tensor=8, shard=1, sharding=Sharding.NONE, microbatch=4),
        lambda: gridded(microbatch=1),
        "a square of 4 divides sequences of a microbatch in 2, and not 1",
    ),
    "runtime-tensor-grid": Case(
        gridded,
        lambda: replace(gridded(), job=replace(gridded().job, compile=Switch.ON)),
        "compiled layers beside a square of tensor ranks can be predicted and not trained yet",
    ),
    "low-rank-training-rounds": Case(
        lambda: factoring(met(), switch_at=10),
        lambda: factoring(met(), switch_at=95),
        "2 learners meet every 10 steps, and no round ends from step 95, when the switch is due, to the last one, 100 "
        "(rule low-rank-training-rounds); choose low_rank.switch_at = 90",
    ),
    "low-rank-training-decay": Case(
        lambda: factoring(D()),
        lambda: factoring(planned(D(), schedule=Schedule(kind=ScheduleKind.ZERO_BUBBLE_H1, microbatches=8))),
        "zb-h1 puts off the gradients of matrices",
    ),
    "low-rank-training-layout": Case(
        lambda: factoring(D()),
        lambda: factoring(gridded()),
        "no way is known to lay thin matrices on a square (job.low_rank gives the model some",
    ),
    "low-rank-line": Case(
        lambda: thin(D()), lambda: thin(gridded()), "no way is known to lay thin matrices on a square"
    ),
    "runtime-low-rank": Case(
        lambda: thin(D()),
        lambda: thin(scheduled(rounded(), kind=ScheduleKind.ONE_F_ONE_B)),
        "fp8 products of thin matrices can be predicted and not trained yet",
    ),
    "tensor-is-axis": Case(D, lambda: regrouped(D(), 0, tensor=1), "1 is not the size of the tensor axis, 2"),
    "tensor-divides-heads": Case(
        lambda: D(tensor=4, shard=1, schedule=Schedule(microbatches=16)),
        lambda: D(of=samples.model(layer=samples.dense_layer(heads=9))),
        "2 does not divide 9 heads",
    ),
    "tensor-shares-kv-heads": Case(
        lambda: D(of=samples.model(layer=samples.dense_layer(kv_heads=1))),
        lambda: D(of=samples.model(layer=samples.dense_layer(heads=6, kv_heads=3))),
        "plan.stages[0].groups[0].tensor: 2 neither divides 3 key-value heads nor is a multiple of them "
        "(rule tensor-shares-kv-heads); choose 1",
    ),
    "tensor-divides-hidden": Case(
        D,
        lambda: D(of=samples.model(layer=samples.dense_layer(hidden=191))),
        "2 does not divide 191 features of the feed-forward",
    ),
    "tensor-shares-vocab": Case(
        lambda: D(of=samples.model(vocab=511)),
        lambda: D(of=samples.model(vocab=5), tensor=4, shard=1, schedule=Schedule(microbatches=16)),
        "4 ranks of 2 entries of a vocabulary of 5 leave the last one none (rule tensor-shares-vocab); choose 2",
    ),
    "sequence-parallel-divides": Case(D, odd_length, "tensor 2 does not divide the sequence length 129"),
    "sharding-has-ranks": Case(
        D, lambda: regrouped(regrouped(D(), 0, sharding=Sharding.NONE), 1, sharding=Sharding.NONE), "nothing is sharded"
    ),
    "sharding-mixes": Case(
        lambda: sharded(D(), "32111113"),
        lambda: sharded(D(of=samples.model(tied=True), pipeline=1, shard=4), "31111111"),
        "zero1 of a head that is tied to a table of zero3",
    ),
    "shards-divide": Case(
        lambda: sharded(WIDE, "31333333", over=".1......"),
        lambda: sharded(WIDE, "31333333", over=".3......"),
        "3 ranks neither divide the shard axis of 4 nor are several of it that divide the 4 data parallel ranks (rule "
        "shards-divide); choose 1 or 2, or leave it out",
    ),
    "shards-laid": Case(
        lambda: sharded(WIDE, "31333333", over=".1......"),
        lambda: turned(sharded(D(pipeline=1, replicate=2, schedule=FOUR), "31333333", over=".1......")),
        "a group over ranks of its own in a plan with axes in another order",
    ),
    "precision-known": Case(
        lambda: D(precision=Precision.FP32), lambda: D(precision=Precision.FP8), "device has no fp8 arithmetic"
    ),
    "batch-is-asked": Case(D, lambda: D(microbatch=1), "are 16 sequences, and the job's batch is 32"),
    "empty-rows-are-last": Case(
        lambda: emptied(D(), 1),
        lambda: emptied(D(), 2),
        "2 empty rows of 2 data ranks with 16 rows each (rule empty-rows-are-last); choose 0 to 1",
    ),
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
    "paths-are-asked": Case(
        lambda: on_paths(*EVEN), lambda: on_paths(*EVEN, share=0.0), "of the layers and the job allows none"
    ),
    "paths-are-even": Case(
        lambda: on_paths(*EVEN),
        lambda: on_paths(*((0, 1, 3),) * 6, *EVEN[:2]),
        "7 microbatches pass stage 1 and 1 stage 2 (stages would learn unevenly",
    ),
    "runtime-paths": Case(
        lambda: on_paths(*EVEN),
        lambda: regrouped(on_paths(*EVEN), 0, training=Training.FROZEN),
        "paths of microbatches around frozen blocks can be predicted and not trained yet",
    ),
    "table-is-legal": Case(
        lambda: D(schedule=tabled("0F*2 (0B 0F)*6 0B*2", "(1F 1I)*7 1W*6 1F 1B 1W")),
        lambda: D(schedule=tabled("(0F 0B)*8", "1F*2 (1B 1F)*6 1B*2")),
        "plan.schedule.table[0][1]: rank 0 waits for ever at 0B0, and 1 more (the ranks wait for each other",
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
    "offload-has-shards": Case(
        lambda: regrouped(regrouped(hosted(), 0, **SHARDS_AWAY), 1, **SHARDS_AWAY),
        lambda: regrouped(hosted(), 0, **SHARDS_AWAY),
        "parameters in the host's memory that are not shards of zero3, in every block",
    ),
    "slices-divide": Case(
        lambda: D(schedule=Schedule(kind=ScheduleKind.SEQUENCE_1F1B, microbatches=8, slices=4)),
        lambda: D(schedule=Schedule(microbatches=8, slices=4)),
        "4 slices under 1f1b",
    ),
    "prefix-has-prompts": Case(
        lambda: D(of=with_prefix(samples.model()), asked=of_text(prompt_field="ask")),
        lambda: D(of=with_prefix(samples.model()), asked=of_text()),
        "has a prefix mask, and no source has prompts",
    ),
    "prefix-in-one-slice": Case(
        lambda: D(of=with_prefix(samples.model())),
        lambda: D(
            of=with_prefix(samples.model()),
            schedule=Schedule(kind=ScheduleKind.SEQUENCE_1F1B, microbatches=8, slices=4),
        ),
        "a prompt may reach beyond its slice, one of 4",
    ),
    "trains-something": Case(lambda: frozen(0), lambda: frozen(0, 1), "every block is frozen"),
    "tied-ends-train-alike": Case(
        lambda: frozen(0), lambda: frozen(0, of=tied()), "the head, which has the same table, is trained"
    ),
    "keeps-constraints": Case(
        lambda: constrained(fix={"tensor": 2}, forbid=("recompute=full",)),
        lambda: constrained(forbid=("pipeline",)),
        "plan (pipeline 2): refused by job.constraints.forbid[0]",
    ),
    "memory-fits": Case(D, small_memory, "has"),
    "runtime-experts": Case(
        lambda: D(context=2, shard=1, asked=HALF, of=samples.model(layer=samples.mixture_layer(routing=DROPPING))),
        tens,
        "10 ranks of a stage are not whole grids of 2 ranks that share 2 ways",
    ),
    "runtime-schedule": Case(
        lambda: D(context=2, shard=1, asked=HALF, schedule=SLICED),
        lambda: D(pipeline=1, shard=4, schedule=Schedule(kind=ScheduleKind.SEQUENCE_1F1B, microbatches=4, slices=2)),
        "2 slices on one pipeline rank",
    ),
    "runtime-compile": Case(
        lambda: compiled(ScheduleKind.ONE_F_ONE_B),
        lambda: compiled(ScheduleKind.ZERO_BUBBLE_H1),
        "zb-h1 splits backwards",
    ),
    "runtime-offload": Case(
        hosted,
        lambda: replace(hosted(), job=replace(hosted().job, optimizer=Muon())),
        "the state of muon in the host's memory can be predicted and not trained yet",
    ),
    "runtime-master": Case(
        lambda: D(asked=rounding()),
        lambda: D(asked=rounding(), precision=Precision.FP32),
        "parameters kept in bf16 that are not multiplied in bf16 can be predicted and not trained yet",
    ),
    "runtime-precision": Case(D, lambda: of_kinds(rounded(), DeviceKind.ROCM), "fp8 can be predicted and not trained"),
    "runtime-devices": Case(
        lambda: of_kinds(D(), DeviceKind.ROCM),
        lambda: of_kinds(D(), DeviceKind.TPU),
        "plans on device can be predicted and not trained yet",
    ),
    "software-known": Case(
        lambda: of_kinds(D(), DeviceKind.CUDA, DeviceKind.ROCM),
        lambda: of_kinds(D(), DeviceKind.CUDA, DeviceKind.TPU),
        "no software trains on device and device at once",
    ),
    "groups-name-parameters": Case(
        lambda: grouped("layers.*.mixer.*", "head.output.weight"),
        lambda: grouped("layers.*.mixer.*", "head.outputs.weight"),
        "no parameter of small is called 'head.outputs.weight'",
    ),
    "runtime-gradients": Case(
        lambda: planned(D(), gradients=GradientSync(precision=Precision.FP8)),
        lambda: planned(D(), gradients=GradientSync(precision=Precision.INT4)),
        "gradients that meet in int4 can be predicted and not trained yet",
    ),
    "runtime-products": Case(
        D, rounded, "fp8 products whose backward zb-h1 splits can be predicted and not trained yet"
    ),
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
    "runtime-empty-rows": Case(
        lambda: emptied(D(), 1),
        lambda: emptied(D(of=samples.model(layer=samples.mixture_layer())), 1),
        "routers of experts would count rows that have no sequence",
    ),
    **ASKED_CASES,
    **COMPRESSION_CASES,
    **ELASTIC_CASES,
    **QUORUM_CASES,
    **SCHEDULE_CASES,
    **TORCHFT_CASES,
}
