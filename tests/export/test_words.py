"""What each peer can say and what it cannot, by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.export import NotExpressible, Peer, Verdict, check, export, read
from meshwright.export.peers import nearest
from meshwright.spec.cluster import DeviceKind, Precision
from meshwright.spec.exchange import Exchange, ExchangeKind, TokenLayout
from meshwright.spec.job import Decay
from meshwright.spec.model import Mixture, Routing
from meshwright.spec.optimizer import Adafactor, Muon, Optimizer, OptimizerSpec, ParameterGroup, Sgd
from meshwright.spec.plan import Design, Dispatch, ExpertGrid, Offload, Recompute, ScheduleKind, Sharding
from tests.export.plans import design
from tests.support.designs import sharded
from tests.support.models import with_prefix

MEGATRON, TITAN, DEEPSPEED = Peer.MEGATRON_LM, Peer.TORCHTITAN, Peer.DEEPSPEED
ZERO3, ZERO2, ZERO1 = Sharding.PARAMETERS, Sharding.GRADIENTS, Sharding.OPTIMIZER
PIPE: dict[str, Any] = {"pipeline": 2, "shard": 4}
UNEVEN = (0, 20, 34)

SAID: list[tuple[Peer, dict[str, Any], tuple[str, ...]]] = [
    (MEGATRON, {}, ("--use-distributed-optimizer", "--overlap-param-gather")),
    (MEGATRON, {"replicate": 2, "shard": 4}, ("--num-distributed-optimizer-instances 2",)),
    (MEGATRON, {"sharding": ZERO3}, ("--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads_params")),
    (MEGATRON, {"shard": 1, "replicate": 8}, ("--overlap-grad-reduce",)),
    (MEGATRON, {**PIPE, "kind": ScheduleKind.INTERLEAVED, "chunks": 4, "bounds": (0, 5, 9, 13, 17, 21, 25, 29, 34)},
     ("--num-virtual-stages-per-pipeline-rank 4",)),
    (MEGATRON, {**PIPE, "bounds": UNEVEN}, ("--pipeline-model-parallel-layout 'Et*19|t*13L'",)),
    (MEGATRON, {**PIPE, "bounds": (0, 1, 34)}, ("--pipeline-model-parallel-layout 'E|t*32L'",)),
    (MEGATRON, {"tensor": 4, "shard": 2}, ("--sequence-parallel", "--tensor-model-parallel-size 4")),
    (MEGATRON, {"context": 4, "shard": 2}, ("--cp-comm-type p2p",)),
    (MEGATRON, {"context": 4, "shard": 2, "exchange": Exchange(kind=ExchangeKind.GATHER)},
     ("--cp-comm-type all_gather",)),
    (MEGATRON, {"context": 4, "shard": 2, "exchange": Exchange(inner=4)}, ("--cp-comm-type a2a",)),
    (MEGATRON, {"context": 4, "shard": 2, "exchange": Exchange(inner=2)},
     ("--cp-comm-type a2a+p2p", "--hierarchical-context-parallel-sizes 2 2")),
    (MEGATRON, {"model": "mixtral-8x7b", "tensor": 2, "shard": 4, "experts": ExpertGrid(expert=4, tensor=1)},
     ("--expert-model-parallel-size 4", "--expert-tensor-parallel-size 1", "--num-experts 8")),
    (MEGATRON, {"model": "deepseek-v3"}, ("--multi-latent-attention", "--moe-layer-freq")),
    (MEGATRON, {"recompute": Recompute.FULL}, ("--recompute-granularity full", "--recompute-num-layers 1")),
    (MEGATRON, {"recompute": Recompute.SELECTIVE}, ("--recompute-granularity selective",)),
    (MEGATRON, {"precision": Precision.FP8}, ("--fp8-format hybrid", "--fp8-recipe tensorwise")),
    (MEGATRON, {"precision": Precision.FP8_BLOCK}, ("--fp8-recipe blockwise",)),
    (MEGATRON, {"precision": Precision.MXFP8}, ("--fp8-recipe mxfp8",)),
    (MEGATRON, {"precision": Precision.NVFP4}, ("--fp4-format e2m1",)),
    (MEGATRON, {"precision": Precision.FP16}, ("--fp16", "--accumulate-allreduce-grads-in-fp32")),
    (MEGATRON, {"gradients": Precision.BF16}, ("--grad-reduce-in-bf16",)),
    (MEGATRON, {"offload": Offload.OPTIMIZER}, ("--optimizer-cpu-offload", "--use-precision-aware-optimizer")),
    (MEGATRON, {"decay": Decay.WSD}, ("--lr-wsd-decay-iters 200",)),
    (TITAN, {"sharding": ZERO3}, ('fsdp_reshard_after_forward = "always"', "data_parallel_shard_degree = 8")),
    (TITAN, {"sharding": ZERO2}, ('fsdp_reshard_after_forward = "never"',)),
    (TITAN, {"sharding": ZERO3, "replicate": 2, "shard": 4}, ("data_parallel_replicate_degree = 2",)),
    (TITAN, PIPE, ('pipeline_parallel_schedule = "1F1B"', "local_batch_size = 8")),
    (TITAN, {**PIPE, "bounds": UNEVEN}, ('"layers.18"],', '"norm", "output"],')),
    (TITAN, {**PIPE, "kind": ScheduleKind.GPIPE}, ('"GPipe"',)),
    (TITAN, {**PIPE, "kind": ScheduleKind.INTERLEAVED, "chunks": 3}, ('"Interleaved1F1B"',)),
    (TITAN, {**PIPE, "kind": ScheduleKind.BREADTH_FIRST, "chunks": 2}, ('"LoopedBFS"',)),
    (TITAN, {**PIPE, "kind": ScheduleKind.ZERO_BUBBLE_V, "chunks": 2}, ('"ZBVZeroBubble"',)),
    (TITAN, {**PIPE, "kind": ScheduleKind.DUAL_PIPE_V, "chunks": 2, "recompute": Recompute.FULL},
     ('"DualPipeV"', "pipeline_parallel_expert_parallel_overlap = false")),
    (TITAN, {"sharding": ZERO3, "context": 2, "shard": 4, "exchange": Exchange(kind=ExchangeKind.GATHER)},
     ("context_parallel_degree = 2",)),
    (TITAN, {"sharding": ZERO3, "model": "qwen3-30b-a3b", "tensor": 2, "shard": 4,
             "experts": ExpertGrid(expert=8, tensor=1)},
     ("expert_parallel_degree = 8", "expert_tensor_parallel_degree = 1")),
    (TITAN, {"sharding": ZERO3, "recompute": Recompute.FULL}, ('mode = "full"',)),
    (TITAN, {"sharding": ZERO3, "precision": Precision.FP8}, ('converters = ["quantize.linear.float8"]',)),
    (TITAN, {"sharding": ZERO3, "precision": Precision.MXFP8}, ('converters = ["quantize.linear.mx"]',)),
    (TITAN, {"sharding": ZERO3, "decay": Decay.WSD}, ("decay_ratio = 0.2",)),
    (DEEPSPEED, {"sharding": ZERO3}, ('"stage": 3', "--zero-stage 3", "--no-pipeline-parallel")),
    (DEEPSPEED, {**PIPE, "bounds": (0, 17, 34)}, ('"stage": 1', "--pipeline-model-parallel-size 2")),
    (DEEPSPEED, {**PIPE, "kind": ScheduleKind.ZERO_BUBBLE_H1, "bounds": (0, 17, 34)}, ("--enable-zbh1-pipeline",)),
    (DEEPSPEED, {"context": 4, "shard": 2, "exchange": Exchange(inner=4)}, ("--ds-sequence-parallel-size 4",)),
    (DEEPSPEED, {"offload": Offload.OPTIMIZER}, ('"offload_optimizer"', "--cpu-optimizer")),
    (DEEPSPEED, {"offload": Offload.ACTIVATIONS, "recompute": Recompute.FULL}, ('"cpu_checkpointing": true',)),
    (DEEPSPEED, {"gradients": Precision.BF16}, ('"communication_data_type": "bf16"',)),
    (DEEPSPEED, {"precision": Precision.FP16}, ("--fp16",)),
    (DEEPSPEED, {"model": "mixtral-8x7b", "experts": ExpertGrid(expert=4)},
     ("--moe-expert-parallel-size 4", "--num-experts 8", "--topk 2")),
]  # fmt: skip

UNSAID: list[tuple[Peer, dict[str, Any], str]] = [
    (MEGATRON, {**PIPE, "sharding": ZERO3}, "zero3 with a pipeline"),
    (MEGATRON, {**PIPE, "kind": ScheduleKind.GPIPE}, "the gpipe schedule"),
    (MEGATRON, {**PIPE, "kind": ScheduleKind.SEQUENCE_1F1B, "slices": 2}, "the seq1f1b schedule"),
    (MEGATRON, {**PIPE, "kind": ScheduleKind.ZERO_BUBBLE_V, "chunks": 2}, "the zb-v schedule"),
    (MEGATRON, {"context": 4, "shard": 2, "exchange": Exchange(kind=ExchangeKind.GATHER, inner=2)}, "inside a gather"),
    (MEGATRON, {"context": 2, "shard": 4, "exchange": Exchange(layout=TokenLayout.STRIPED)}, "striped tokens"),
    (TITAN, {"context": 2, "shard": 4,
             "exchange": Exchange(kind=ExchangeKind.GATHER, layout=TokenLayout.BALANCED)}, "balanced tokens"),
    (DEEPSPEED, {"context": 4, "shard": 2, "exchange": Exchange(inner=4, layout=TokenLayout.STRIPED)},
     "striped tokens"),
    (MEGATRON, {"offload": Offload.ACTIVATIONS}, "every activation in the host's memory"),
    (MEGATRON, {"offload": Offload.OPTIMIZER, "shard": 1}, "state that is not sharded"),
    (MEGATRON, {"precision": Precision.TF32}, "tf32 products"),
    (MEGATRON, {"model": "gemma-2-9b"}, "soft caps"),
    (MEGATRON, {"model": "gpt-oss-20b"}, "attention sinks"),
    (MEGATRON, {"model": "mixtral-8x7b", "tensor": 2, "sequence_parallel": False}, "experts beside tensor ranks"),
    (MEGATRON, {"model": "mixtral-8x7b", "experts": ExpertGrid(expert=4, dispatch=Dispatch.ALL_GATHER)},
     "tokens gathered by experts"),
    (TITAN, {"sharding": ZERO1}, "zero1 over 8 ranks"),
    (TITAN, {**PIPE, "sharding": ZERO3}, "zero3 over 4 ranks with a pipeline"),
    (TITAN, {"shard": 1, "replicate": 4, "tensor": 2}, "replicas beside tensor or pipeline ranks"),
    (TITAN, {"sharding": ZERO3, "tensor": 2, "sequence_parallel": False}, "not sequence parallel"),
    (TITAN, {"sharding": ZERO3, "recompute": Recompute.SELECTIVE}, "recompute of attention alone"),
    (TITAN, {"sharding": ZERO3, "offload": Offload.OPTIMIZER}, "optimizer alone in the host's memory"),
    (TITAN, {"sharding": ZERO3, "context": 2}, "ring of keys and values"),
    (TITAN, {**PIPE, "kind": ScheduleKind.ZERO_BUBBLE_H1}, "the zb-h1 schedule"),
    (TITAN, {"sharding": ZERO3, "model": "mixtral-8x7b"}, "the model mixtral-8x7b"),
    (TITAN, {**PIPE, "model": "qwen3-8b"}, "a pipeline of qwen3"),
    (TITAN, {"sharding": ZERO3, "precision": Precision.FP8_BLOCK}, "fp8-block products"),
    (TITAN, {"sharding": ZERO3, "gradients": Precision.BF16}, "gradients reduced in bf16"),
    (TITAN, {"sharding": ZERO3, "model": "qwen3-30b-a3b", "tensor": 4, "shard": 2,
             "experts": ExpertGrid(expert=2, tensor=2)}, "experts divided by 2 beside tensor 4"),
    (DEEPSPEED, {**PIPE, "sharding": ZERO2}, "zero2 with a pipeline"),
    (DEEPSPEED, {"replicate": 2, "shard": 4}, "replicas of shards"),
    (DEEPSPEED, {**PIPE, "bounds": UNEVEN}, "stages of these layers"),
    (DEEPSPEED, {**PIPE, "kind": ScheduleKind.INTERLEAVED, "chunks": 2}, "the interleaved schedule"),
    (DEEPSPEED, {"context": 2, "tensor": 2, "exchange": Exchange(inner=2)}, "context ranks beside tensor"),
    (DEEPSPEED, {"context": 2}, "ring of keys and values"),
    (DEEPSPEED, {"precision": Precision.FP8}, "fp8 products"),
    (DEEPSPEED, {"decay": Decay.WSD}, "stays and then decays"),
    (DEEPSPEED, {"model": "deepseek-v3"}, "latent attention"),
    (DEEPSPEED, {"model": "mixtral-8x7b", "sharding": ZERO3}, "zero3 of experts"),
]  # fmt: skip


@pytest.mark.parametrize(("peer", "choices", "words"), SAID)
def test_what_a_peer_can_say(peer: Peer, choices: dict[str, Any], words: tuple[str, ...]) -> None:
    entry = design(**choices)
    found = export(entry, to=peer)
    assert [word for word in words if word not in found.text] == []
    assert read(found.text, to=peer) == nearest(entry, to=peer)


@pytest.mark.parametrize(("peer", "choices", "what"), UNSAID)
def test_what_a_peer_cannot_say(peer: Peer, choices: dict[str, Any], what: str) -> None:
    with pytest.raises(NotExpressible, match=f"cannot say .*{what}") as error:
        export(design(**choices), to=peer)
    assert error.value.exit_code == 3


@pytest.mark.parametrize("peer", Peer)
@pytest.mark.parametrize(("kind", "what"), [(DeviceKind.TPU, "TPUs"), (DeviceKind.CPU, "processors")])
def test_no_peer_trains_on_tpus_or_processors(peer: Peer, kind: DeviceKind, what: str) -> None:
    entry = design()
    (group,) = entry.cluster.groups
    there = replace(entry.cluster, groups=(replace(group, device=replace(group.device, kind=kind)),))
    with pytest.raises(NotExpressible, match=f"cannot say training on {what}"):
        export(replace(entry, cluster=there), to=peer)


@pytest.mark.parametrize("peer", Peer)
def test_a_routing_of_its_own_is_not_lost(peer: Peer) -> None:
    entry = design("mixtral-8x7b", experts=ExpertGrid(expert=4))
    layer = entry.model.layers[0]
    assert isinstance(layer.transform, Mixture)
    routed = replace(layer, transform=replace(layer.transform, routing=Routing(capacity=1.25)))
    odd = replace(entry, model=replace(entry.model, layers=(routed,) * len(entry.model.layers)))
    with pytest.raises(NotExpressible, match="cannot say a routing of its own"):
        export(odd, to=peer)


@pytest.mark.parametrize("peer", Peer)
def test_blocks_that_are_sharded_in_unlike_ways_are_not_lost(peer: Peer) -> None:
    entry = design(sharding=ZERO3)
    odd = sharded(entry, "3" * 9 + "1" * (len(entry.model.blocks) - 9))
    with pytest.raises(NotExpressible, match="differ between blocks"):
        export(odd, to=peer)


@pytest.mark.parametrize("peer", Peer)
def test_a_prefix_mask_is_not_lost(peer: Peer) -> None:
    entry = design("llama-3.1-8b")
    odd = replace(entry, model=with_prefix(entry.model))
    with pytest.raises(NotExpressible, match="cannot say prefix masks"):
        export(odd, to=peer)


@pytest.mark.parametrize("peer", Peer)
def test_everything_is_told_at_once(peer: Peer) -> None:
    entry = design(pipeline=2, kind=ScheduleKind.SEQUENCE_1F1B, slices=2, precision=Precision.TF32)
    with pytest.raises(NotExpressible) as error:
        export(entry, to=peer)
    assert {"plan.schedule.kind", "plan.stages[*].groups[*].precision"} <= {each.where for each in error.value.problems}


@pytest.mark.parametrize("peer", Peer)
@pytest.mark.parametrize("spec", [Muon(), Sgd(), Adafactor(), OptimizerSpec(groups=(ParameterGroup(names=("*",)),))])
def test_no_peer_is_told_of_other_optimizers(peer: Peer, spec: Optimizer) -> None:
    entry = design()
    with pytest.raises(NotExpressible) as error:
        export(replace(entry, job=replace(entry.job, optimizer=spec)), to=peer)
    assert "job.optimizer" in {each.where for each in error.value.problems}
    with pytest.raises(NotExpressible):
        check(replace(entry, job=replace(entry.job, optimizer=spec)), "", to=peer)


def some_recomputed(first: int) -> Design:
    """A pipeline of two stages whose first `first` layers are recomputed, and no others."""
    entry = design(pipeline=2, shard=4, bounds=(0, 17, 34))
    stages = []
    for stage in entry.plan.stages:
        group = stage.groups[0]
        cut = max(group.start, 1) + first
        parts = (replace(group, stop=cut, recompute=Recompute.FULL), replace(group, start=cut))
        stages.append(replace(stage, groups=parts))
    return replace(entry, plan=replace(entry.plan, stages=tuple(stages)))


def test_the_first_layers_of_every_stage_may_be_recomputed_in_megatron_alone() -> None:
    entry = some_recomputed(5)
    found = export(entry, to=MEGATRON)
    assert "--recompute-method block" in found.text
    assert "--recompute-num-layers 5" in found.text
    for peer in (TITAN, DEEPSPEED):
        with pytest.raises(NotExpressible, match="recompute that differs between layers"):
            export(entry, to=peer)


@pytest.mark.parametrize("peer", Peer)
def test_ranks_that_are_moved_are_refused(peer: Peer) -> None:
    entry = design(sharding=ZERO2)
    moved = replace(entry, plan=replace(entry.plan, placement=(1, 0, *range(2, 8))))
    with pytest.raises(NotExpressible, match="which rank lies on which device"):
        export(moved, to=peer)


@pytest.mark.parametrize("peer", Peer)
def test_axes_in_another_order_are_refused(peer: Peer) -> None:
    entry = design(pipeline=2, shard=4, sharding=ZERO1)
    axes = {axis.name: axis for axis in entry.plan.axes if axis.size > 1}
    turned = replace(entry, plan=replace(entry.plan, axes=tuple(reversed(axes.values()))))
    with pytest.raises(NotExpressible, match=r"axes in this order; plan with --set constraints.order=usual"):
        export(turned, to=peer)


@pytest.mark.parametrize("peer", Peer)
def test_what_is_lost_is_told(peer: Peer) -> None:
    lost = {line.name for line in export(design(sharding=ZERO2), to=peer).lines if line.verdict is Verdict.LOST}
    assert {"text and tokenizer", "weight decay", "document mask"} <= lost


@pytest.mark.parametrize("peer", Peer)
def test_rows_without_a_sequence_are_not_read_as_some(peer: Peer) -> None:
    entry = design()
    entry = replace(entry, plan=replace(entry.plan, empty_rows=1))
    with pytest.raises(NotExpressible, match="cannot say rows without a sequence"):
        export(entry, to=peer)
