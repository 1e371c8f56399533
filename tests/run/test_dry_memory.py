"""The peak of memory is predicted within half a per cent of what a dry run counts, for every block and layout named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import cost
from meshwright.catalog import load_cluster
from meshwright.cost.fixed_buffers import workspace_bytes
from meshwright.cost.stacks import software
from meshwright.run.dry.count import RankCount
from meshwright.spec.cluster import Precision
from meshwright.spec.model import (
    Attention,
    Embedding,
    FeedForward,
    Head,
    LatentAttention,
    Layer,
    MatrixRank,
    Mixture,
    ModelSpec,
    Norm,
    Rotary,
    Routing,
    Score,
)
from meshwright.spec.optimizer import Master, Moments
from meshwright.spec.plan import Design, ExpertGrid, Offload, Recompute, ScheduleKind, Sharding, TensorGrid
from meshwright.spec.report import MemoryPart
from tests.parallel.offload_cases import with_groups
from tests.run import dry_cases
from tests.support import designs
from tests.support.designs import Layout

WIDTH, LENGTH, VOCAB = 1024, 1024, 32000
NORM = Norm(width=WIDTH)
MIXER = Attention(width=WIDTH, heads=8, kv_heads=4, head_dim=128, norm=NORM, rotary=Rotary(dims=128))
DENSE = Layer(mixer=MIXER, transform=FeedForward(width=WIDTH, hidden=2816, norm=NORM))
SPARSE = Layer(mixer=MIXER, transform=Mixture(width=WIDTH, hidden=704, experts=8, top_k=2, norm=NORM))
RANKS = {"mixer.query": 128, "mixer.output": 64, "transform.down": 256, "transform.gate": 192, "transform.up": 192}
THIN = replace(DENSE, ranks=tuple(MatrixRank(name=name, rank=rank) for name, rank in sorted(RANKS.items())))
LATENT = LatentAttention(
    width=WIDTH,
    heads=8,
    query_rank=256,
    kv_rank=128,
    nope_dim=128,
    rope_dim=64,
    value_dim=128,
    norm=NORM,
    rotary=Rotary(dims=64),
)
# As Kimi-K2 has them: more experts than a rank's choices can be dealt evenly, and the scores of all are kept.
DEALT = Mixture(
    width=WIDTH,
    hidden=704,
    experts=24,
    top_k=4,
    norm=NORM,
    shared=FeedForward(width=WIDTH, hidden=704, norm=None),
    routing=Routing(score=Score.SIGMOID, bias_rate=1e-3, scale=2.5),
)
CHOSEN = Layer(mixer=LATENT, transform=DEALT)
GRID = Layout(
    shard=4,
    tensor=2,
    sequence_parallel=True,
    sharding=Sharding.PARAMETERS,
    recompute=Recompute.SELECTIVE,
    experts=ExpertGrid(expert=4, tensor=1),
    batch=8,
)
# Of whose experts every rank has its own whole, which others of its parameters are gathered beside.
CAST = Layout(pipeline=2, shard=4, sharding=Sharding.GRADIENTS, experts=ExpertGrid(expert=4, tensor=1), batch=16)
MACHINES, MORE_MACHINES = load_cluster("8xH100"), load_cluster("2x8xH100")
CASES = {
    "dense": (DENSE, Layout(batch=3)),
    "tensor": (DENSE, Layout(tensor=4, sequence_parallel=True, recompute=Recompute.FULL, batch=3)),
    "frozen": (DENSE, Layout(batch=3)),
    "sparse": (SPARSE, Layout(replicate=4, batch=8)),
    "thin under tensor and zero3": (
        THIN,
        Layout(shard=2, tensor=2, sequence_parallel=True, sharding=Sharding.PARAMETERS, batch=6),
    ),
}
MORE = {
    "context ranks and zero3": (DENSE, Layout(shard=2, context=2, sharding=Sharding.PARAMETERS, batch=6)),
    "context ranks, computed again": (DENSE, Layout(context=2, recompute=Recompute.FULL, batch=3)),
    "experts on a grid": (CHOSEN, replace(GRID, sharding=Sharding.OPTIMIZER, recompute=Recompute.NONE)),
    "frozen under tensor": (DENSE, Layout(tensor=4, sequence_parallel=True, recompute=Recompute.FULL, batch=3)),
    "whole sequences": (DENSE, Layout(tensor=4, batch=3)),
    "selective": (DENSE, Layout(recompute=Recompute.SELECTIVE, batch=3)),
    "replicas": (DENSE, Layout(replicate=4, batch=12)),
    "zero1": (DENSE, Layout(shard=4, sharding=Sharding.OPTIMIZER, batch=12)),
    "square": (DENSE, Layout(tensor=4, microbatch=2, batch=6, tensor_grid=TensorGrid.SQUARE)),
    "cube": (DENSE, Layout(tensor=8, recompute=Recompute.FULL, microbatch=4, batch=12, tensor_grid=TensorGrid.CUBE)),
    "zero2": (DENSE, Layout(shard=4, sharding=Sharding.GRADIENTS, batch=12)),
    "zero3": (DENSE, Layout(shard=4, sharding=Sharding.PARAMETERS, batch=12)),
    "thin": (THIN, Layout(batch=3)),
    "thin, whole sequences": (THIN, Layout(tensor=4, batch=3)),
    "thin, computed again": (THIN, Layout(tensor=4, sequence_parallel=True, recompute=Recompute.FULL, batch=3)),
    "thin, zero2": (THIN, Layout(shard=4, sharding=Sharding.GRADIENTS, batch=12)),
    "halves of backwards of four stages": (DENSE, Layout(pipeline=4, kind=ScheduleKind.ZERO_BUBBLE_H1, batch=8)),
    "halves of backwards, computed again": (
        DENSE,
        Layout(pipeline=2, kind=ScheduleKind.ZERO_BUBBLE_H1, recompute=Recompute.FULL, batch=4),
    ),
    "halves of backwards of twice as many": (DENSE, Layout(pipeline=4, kind=ScheduleKind.ZERO_BUBBLE_H2, batch=8)),
    "halves of backwards of experts and zero3": (
        SPARSE,
        Layout(pipeline=2, shard=2, kind=ScheduleKind.ZERO_BUBBLE_H1, sharding=Sharding.PARAMETERS, batch=8),
    ),
    "thin, halves of backwards": (THIN, Layout(pipeline=2, kind=ScheduleKind.ZERO_BUBBLE_H1, batch=4)),
    "zero3 computed again": (
        DENSE,
        Layout(shard=4, sharding=Sharding.PARAMETERS, recompute=Recompute.FULL, batch=12),
    ),
    "zero3 of experts": (SPARSE, Layout(shard=4, sharding=Sharding.PARAMETERS, batch=12)),
    "zero3 and tensor": (
        DENSE,
        Layout(shard=2, tensor=2, sequence_parallel=True, sharding=Sharding.PARAMETERS, batch=6),
    ),
    "interleaved": (DENSE, Layout(pipeline=2, chunks=2, kind=ScheduleKind.INTERLEAVED, batch=4)),
    "halves of backwards": (DENSE, Layout(pipeline=2, kind=ScheduleKind.ZERO_BUBBLE_H1, batch=4)),
    "pipeline and zero1": (DENSE, Layout(pipeline=2, shard=2, sharding=Sharding.OPTIMIZER, batch=8)),
    "square of a pipeline": (
        DENSE,
        Layout(pipeline=2, tensor=4, microbatch=2, batch=8, tensor_grid=TensorGrid.SQUARE),
    ),
    "experts cast for every microbatch": (SPARSE, CAST),
    "experts cast for every microbatch of four stages": (SPARSE, replace(CAST, pipeline=4, batch=32)),
    "experts cast in stages that take turns": (SPARSE, replace(CAST, chunks=2, kind=ScheduleKind.INTERLEAVED)),
    "all at once": (DENSE, Layout(pipeline=2, kind=ScheduleKind.GPIPE, batch=4)),
    "pipeline": (DENSE, Layout(pipeline=2, batch=4)),
    "pipeline and zero3": (DENSE, Layout(pipeline=2, shard=2, sharding=Sharding.PARAMETERS, batch=8)),
}


# Of short sequences weights, their gradients and what is gathered are most: which of them meet decides.
SHORT = {
    f"{kind.value} x{chunks}, {sharding.value} over {shard}": Layout(
        pipeline=2, chunks=chunks, kind=kind, shard=shard, sharding=sharding, batch=4 * shard
    )
    for kind, chunks in (
        (ScheduleKind.BREADTH_FIRST, 4),
        (ScheduleKind.INTERLEAVED, 4),
        (ScheduleKind.BREADTH_FIRST, 2),
        (ScheduleKind.ONE_F_ONE_B, 1),
        (ScheduleKind.GPIPE, 1),
        (ScheduleKind.ZERO_BUBBLE_H1, 1),
    )
    for sharding, shard in (
        (Sharding.NONE, 1),
        (Sharding.OPTIMIZER, 2),
        (Sharding.GRADIENTS, 8),
        (Sharding.PARAMETERS, 2),
    )
}
ONE_LAYER_STAGES = "breadth-first x4, zero1 over 2"


ONE_LAYER = Layout(
    pipeline=3, chunks=2, kind=ScheduleKind.BREADTH_FIRST, shard=2, sharding=Sharding.PARAMETERS, batch=8
)


def by_document() -> Design:
    """Four layers like Kimi-K2's, under masks of documents that are kept for the scores computed again."""
    found = asked(CHOSEN, GRID, layers=4)
    return replace(found, job=replace(found.job, data=replace(found.job.data, document_mask=True)))


def short(name: str) -> Design:
    """Six layers at a sequence of 128 tokens."""
    return asked(DENSE, SHORT[name], length=128, layers=6)


def asked(layer: Layer, layout: Layout, *, length: int = LENGTH, layers: int = 8, vocab: int = VOCAB) -> Design:
    head = Head(vocab=vocab, width=WIDTH, norm=NORM)
    model = ModelSpec(
        name="medium",
        embedding=Embedding(vocab=vocab, width=WIDTH),
        layers=(layer,) * layers,
        head=head,
        max_positions=4096,
        initializer_range=0.02,
    )
    found = designs.design(model, replace(layout, precision=Precision.BF16))
    data = replace(found.job.data, document_mask=False)
    job = replace(found.job, sequence_length=length, batch_tokens=layout.batch * length, data=data)
    machines = MACHINES if layout.ranks <= 8 else MORE_MACHINES
    plan = replace(found.plan, sequence_length=length, cluster=machines.name)
    return replace(found, cluster=machines, job=job, plan=plan)


# Blocks of eight or of six layers that are sharded in unlike ways: embedding, layers and head.
UNLIKE = {
    "ends and first layers": ("33333113", Layout(shard=4, sharding=Sharding.PARAMETERS, batch=12)),
    "last layers": ("11113331", Layout(shard=4, sharding=Sharding.PARAMETERS, batch=12)),
    "layers alone": ("13333331", Layout(shard=2, sharding=Sharding.PARAMETERS, batch=4)),
    "parameters alone": ("33322223", Layout(shard=4, sharding=Sharding.PARAMETERS, batch=12)),
    "three ways": ("33221111", Layout(shard=4, sharding=Sharding.PARAMETERS, batch=12)),
    "runs that come again": ("33113311", Layout(shard=4, sharding=Sharding.PARAMETERS, batch=12)),
    "of a pipeline": ("33133113", Layout(pipeline=2, shard=2, sharding=Sharding.PARAMETERS, batch=8)),
    "of halves of backwards": (
        "33133113",
        Layout(pipeline=2, kind=ScheduleKind.ZERO_BUBBLE_H1, shard=2, sharding=Sharding.PARAMETERS, batch=8),
    ),
    "of stages that take turns": (
        "31313113",
        Layout(pipeline=2, chunks=2, kind=ScheduleKind.BREADTH_FIRST, shard=2, sharding=Sharding.PARAMETERS, batch=8),
    ),
}


def unlike(name: str) -> Design:
    word, layout = UNLIKE[name]
    return designs.sharded(asked(DENSE, layout, length=128, layers=len(word) - 2), word)


# The first blocks keep nothing, and those in the middle no inputs of their products.
FROZEN = {"frozen": frozenset({0, 1, 4, 5}), "frozen under tensor": frozenset({0, 1, 2, 9})}


def laid(cases: dict, *, layers: int = 8) -> dict[str, Design]:
    """Of so many layers, or of eight where some are frozen."""
    made = {name: asked(*case, layers=8 if name in FROZEN else layers) for name, case in cases.items()}
    return {name: designs.frozen(entry, FROZEN.get(name, frozenset())) for name, entry in made.items()}


def away(cases: dict) -> dict[str, Design]:
    return {name: with_groups(asked(layer, layout), offload=kind) for name, (layer, layout, kind) in cases.items()}


def hold(entries: dict[str, Design]) -> list[list[RankCount]]:
    """Peaks are predicted, on the device and in the host's memory; what was counted of all of their pipeline ranks."""
    found: list[list[RankCount]]
    found = dry_cases.apart(dry_cases.count_whole, designs=list(entries.values()))
    workspace = workspace_bytes(MACHINES.groups[0].device, software=software("torch"))
    for (name, entry), ranks in zip(entries.items(), found, strict=True):
        told = {stage.rank: stage for stage in cost.predict(entry).memory}
        for count in ranks:
            counted = sum(count.memory.values()) + workspace
            assert told[count.rank].allocated == pytest.approx(counted, rel=0.005), (name, count.rank)
            assert told[count.rank].host == pytest.approx(count.host, rel=1e-3), (name, count.rank)
            assert (count.host > 0.0) == any(group.offload is not Offload.NONE for group in entry.plan.groups)
    return found


# What lies in the host's memory; of a pipeline's parameters the peak is a part in a hundred off.
AWAY = {
    "optimizer": (DENSE, Layout(batch=1), Offload.OPTIMIZER),
    "activations": (DENSE, Layout(batch=1), Offload.ACTIVATIONS),
}
MORE_AWAY = {
    "activations of whole sequences": (DENSE, Layout(tensor=4, batch=3), Offload.ACTIVATIONS),
    "activations computed again": (DENSE, Layout(recompute=Recompute.FULL, batch=3), Offload.ACTIVATIONS),
    "scores computed again": (DENSE, Layout(recompute=Recompute.SELECTIVE, batch=3), Offload.ACTIVATIONS),
    "activations of shards": (DENSE, Layout(shard=4, sharding=Sharding.PARAMETERS, batch=12), Offload.ACTIVATIONS),
    "activations of experts": (SPARSE, Layout(replicate=4, batch=8), Offload.ACTIVATIONS),
    "activations of a pipeline": (DENSE, Layout(pipeline=2, batch=4), Offload.ACTIVATIONS),
    "sharded optimizer": (DENSE, Layout(shard=4, sharding=Sharding.OPTIMIZER, batch=12), Offload.OPTIMIZER),
    "parameters": (DENSE, Layout(shard=4, sharding=Sharding.PARAMETERS, batch=12), Offload.PARAMETERS),
}


# Vocabularies of which the last tensor rank has less than the first, which is counted.
UNEVEN = {
    "vocabulary of two": (50257, Layout(tensor=2, sequence_parallel=True, batch=3)),
    "vocabulary of four and zero3": (509, Layout(shard=2, tensor=4, sharding=Sharding.PARAMETERS, batch=6)),
}


def uneven() -> dict[str, Design]:
    return {name: asked(DENSE, layout, layers=2, vocab=vocab) for name, (vocab, layout) in UNEVEN.items()}


# Key-value heads of which tensor ranks hold copies: large ones beside what the ranks divide.
FEW_HEADS = {
    "heads that runs of ranks hold": (2, Layout(tensor=8, sequence_parallel=True, batch=3)),
    "a head that every rank holds, zero3": (1, Layout(shard=2, tensor=4, sharding=Sharding.PARAMETERS, batch=6)),
}


def few_heads() -> dict[str, Design]:
    def layer(kv_heads: int) -> Layer:
        return replace(DENSE, mixer=replace(MIXER, kv_heads=kv_heads))

    return {name: asked(layer(heads), layout, layers=2, vocab=512) for name, (heads, layout) in FEW_HEADS.items()}


def test_peaks_are_predicted() -> None:
    first = next(iter(UNLIKE))
    hold(
        {
            **laid(CASES, layers=4),
            **uneven(),
            **few_heads(),
            **away(AWAY),
            ONE_LAYER_STAGES: short(ONE_LAYER_STAGES),
            first: unlike(first),
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", list(UNLIKE)[1:])
def test_peaks_of_blocks_that_are_sharded_in_unlike_ways_are_too(name: str) -> None:
    hold({name: unlike(name)})


@pytest.mark.slow
def test_probes_tell_blocks_that_are_sharded_in_unlike_ways() -> None:
    layout = Layout(shard=4, sharding=Sharding.PARAMETERS, batch=12)
    entry = designs.sharded(asked(DENSE, layout, length=128, layers=16), "3" * 9 + "1" * 9)
    (ranks,) = dry_cases.apart(dry_cases.count_both, designs=[entry])
    for whole, probed in ranks:
        assert probed.probed
        assert (dict(whole.bytes), dict(whole.memory)) == (dict(probed.bytes), dict(probed.memory))


@pytest.mark.slow
def test_peaks_of_plans_like_those_that_are_chosen_are_too() -> None:
    """Of Llama-3.1-405B on 16,384 H100, its activations on the device and away, and of Kimi-K2 on 3,072."""
    stages = asked(DENSE, ONE_LAYER, length=128, layers=4)
    away_too = with_groups(stages, offload=Offload.ACTIVATIONS)
    long = asked(DENSE, Layout(pipeline=2, context=2, batch=2), length=4096, layers=2)
    grid = by_document()
    hold({"one-layer stages": stages, "away": away_too, "context ranks": long, "experts on a grid": grid})


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_AWAY)
def test_peaks_of_what_is_offloaded_are_too(name: str) -> None:
    hold(away({name: MORE_AWAY[name]}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["optimizer", "activations"])
def test_probes_tell_what_is_offloaded_too(name: str) -> None:
    layer, _, kind = AWAY[name]
    entry = with_groups(asked(layer, Layout(batch=7)), offload=kind)
    (ranks,) = dry_cases.apart(dry_cases.count_both, designs=[entry])
    for whole, probed in ranks:
        assert probed.probed
        assert (whole.host, dict(whole.memory)) == (probed.host, dict(probed.memory))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHORT if name != ONE_LAYER_STAGES])
def test_peaks_of_short_sequences_are_too(name: str) -> None:
    hold({name: short(name)})


@pytest.mark.slow
def test_what_parameters_and_narrow_state_take_is_predicted() -> None:
    """To the byte: nothing of what the host holds, and of what stays moments and masters as they are packed."""
    layout = Layout(shard=4, sharding=Sharding.PARAMETERS, batch=4)
    plain = asked(DENSE, layout)
    spec = replace(plain.job.optimizer, state=Moments.DYNAMIC8, master=Master.BF16_STOCHASTIC)
    narrow = replace(plain, job=replace(plain.job, optimizer=spec))
    entries = [with_groups(plain, offload=Offload.PARAMETERS), narrow]
    for entry, (count,) in zip(entries, dry_cases.apart(dry_cases.count_whole, designs=entries), strict=True):
        told = cost.predict(entry).memory[0].parts
        for part in (MemoryPart.PARAMETERS, MemoryPart.OPTIMIZER):
            assert count.memory.get(part.value, 0.0) == pytest.approx(told[part], abs=64 * 8)
        away = entry is entries[0]
        assert (told[MemoryPart.PARAMETERS] == 0.0) == away
        assert (count.memory.get(MemoryPart.GRADIENTS.value, 0.0) == 0.0) or not away


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_peaks_of_other_layouts_are_too(name: str) -> None:
    hold(laid({name: MORE[name]}))


def test_frozen_blocks_have_the_flops_that_are_counted() -> None:
    entry = designs.frozen(asked(*CASES["dense"]), frozenset({0, 1, 4, 5, 9}))
    (ranks,) = dry_cases.apart(dry_cases.count_whole, designs=[entry])
    assert cost.predict(entry).model_flops == pytest.approx(sum(ranks[0].flops.values()), rel=1e-9)


def test_experts_with_a_capacity_take_what_is_counted() -> None:
    """FLOPs, bytes of every collective and peaks, where a choice in two is dropped and where none is."""
    grid = Layout(shard=4, sharding=Sharding.OPTIMIZER, experts=ExpertGrid(expert=4, tensor=1), batch=8)
    cases = {"none dropped": (1.0, Layout(batch=3)), "half of them": (0.5, grid)}
    entries = {name: asked(bounded(capacity), layout) for name, (capacity, layout) in cases.items()}
    for (name, entry), (count,) in zip(entries.items(), hold(entries), strict=True):
        flops = entry.plan.data * sum(count.flops.values())
        assert cost.predict(entry).model_flops == pytest.approx(flops, rel=1e-9), name
        assert dict(cost.traffic(entry, rank=0).bytes) == dict(count.bytes), name


def bounded(capacity: float) -> Layer:
    assert isinstance(SPARSE.transform, Mixture)
    return replace(SPARSE, transform=replace(SPARSE.transform, routing=Routing(capacity=capacity)))
