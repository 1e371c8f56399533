"""Stacks of software by name, and what sets each apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

from meshwright.cost.expert_handling import ExpertHandling
from meshwright.cost.operators import ATTENTION_KERNELS, GATED_KERNELS, QUERY_KEY_NORM_KERNELS, ROTARY_KERNELS
from meshwright.cost.repeated import ATTENTION_KEPT, MODULES, OPERATORS, PRODUCTS_KEPT
from meshwright.cost.shard_copies import ShardCopies
from meshwright.cost.software import Software
from meshwright.cost.variants import VARIANTS, changed, meant, plain_names
from meshwright.cost.work import LossKernel
from meshwright.spec.cluster import AttentionKernel, ClusterSpec, DeviceKind
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.job import Automatic, JobSpec, Switch

_LAYER_SECONDS = 1e-3  # python of a dense layer in eager Megatron: explains launch-bound A100 runs (docs/lab.md)
_QWEN3_KERNELS = ATTENTION_KERNELS + ROTARY_KERNELS + QUERY_KEY_NORM_KERNELS
_FEED_FORWARD_SECONDS = GATED_KERNELS / (_QWEN3_KERNELS + GATED_KERNELS) * _LAYER_SECONDS  # which a mixture has not


def _mixture_seconds(milliseconds: float) -> float:
    """Host seconds of what takes so many milliseconds in a profile of Qwen3 30B on H100: a mixture 4.77, its router
    and what comes before tokens are sent 1.72 of it, and attention 1.79 (the least of each range of host time in
    yanring/Megatron-MoE-ModelZoo, issue 7). Attention is what a dense layer takes beside its feed-forward."""
    return milliseconds / 1.79 * (_LAYER_SECONDS - _FEED_FORWARD_SECONDS)


def _sending(settings: Mapping[str, Any], *, once: bool = False, hides: bool = False) -> Software:
    """Software of these settings whose tokens cross to a node `once`, and travel beside other work where it `hides`."""
    plain = Software(**settings)
    return replace(plain, hides_experts=hides, experts=replace(plain.experts, dispatches_once=once))


_MEGATRON: Mapping[str, Any] = {
    "shard_copies": ShardCopies.NONE,
    "waits_for_transfers": True,
    "waits_in_loops": True,
    "overlap": False,
    "fused_accumulation": True,
    "scatters_transfers": True,
    "dense_masks": False,
    "casts_each_pass": False,
    "eager": False,
    "expert_streams": 4,  # Transformer Engine's grouped linear
    "expert_seconds": 8.7e-6,  # an expert of 154 rows takes as long as one of 308 (SimuMax's table of B200)
    "experts": ExpertHandling(biases_apart=True, pads=True, clamps_apart=True),
    "tokens_first": True,
    "keeps_copies": True,
    "fused_loss": False,
    "stops_early": False,  # a checkpoint of its own, whose backward is that of the whole layer run again
    "layer_seconds": _LAYER_SECONDS,
    "mixture_seconds": _mixture_seconds(4.77) - _FEED_FORWARD_SECONDS,
}
# All-reduces of 1 to 16 MiB among 2, 4 and 8 A100 in vTrain's tables (VIA-Research/vTrain trace/a100, MIT) took 27, 40
# and 68 us longer than those that newer versions of the library take there.
_OLD_NCCL: Mapping[str, Any] = {"collective_seconds": 20e-6, "step_seconds": 3.4e-6}
# Without segments that grow, fragments take 15 % of what torch's allocator reserves (2401.08156, eight models on A100).
_OLD_SEGMENTS: Mapping[str, Any] = {"filled": 0.85}
_UNFUSED: Mapping[str, Any] = {
    "fused_attention": False,
    "dropout": True,
    "adds_biases": True,
    "softmax_heads": 4,
    **_OLD_NCCL,
    **_OLD_SEGMENTS,
    **_MEGATRON,
    "fused_accumulation": False,
}
# Megatron v1.1.5 has its fused softmax, biases and dropout switched off by default, and so have the scripts of its 3D
# pipelines (microsoft/DeepSpeedExamples); gradients are those of fp16 parameters.
_PIPES: Mapping[str, Any] = {**_UNFUSED, "keeps_logits": True}
_FIRST_PIPES: Mapping[str, Any] = {
    **_PIPES,
    "plain_softmax": True,
    "softmax_heads": 0,
    "adds_narrow": True,
    "eager": True,
}
_SCALING: Mapping[str, Any] = {
    **_MEGATRON,
    **_OLD_SEGMENTS,
    "eager": True,
    "adds_narrow": True,
    "reduces_whole": True,
    "whole_logits": True,
}
_CORE: Mapping[str, Any] = {
    **_MEGATRON,
    "hides_gradients": True,
    "regathers": True,
    "waits_in_loops": False,
    "overlap": True,
    "fused_loss": True,
    "placeholders": True,
    "sums_biases": False,
}
# Primus' recipes add gradients up apart from their products (gradient_accumulation_fusion in examples/megatron/configs)
_PRIMUS: Mapping[str, Any] = {**_CORE, "fused_accumulation": False, "placeholders": False}
# huggingface/nanotron of 2024, module by module in PyTorch: gates unfused (GLUActivation in models/llama.py), kernels
# for norms (TritonRMSNorm), logits cast to fp32 for a loss over tensor ranks' parts, gradients in fp32 that each
# product's is added to (optim/gradient_accumulator.py) and that travel during the last backward; stages wait for what
# they send and receive (pipeline_parallel/p2p.py), whole features of it.
_NANOTRON: Mapping[str, Any] = {
    **_MEGATRON,
    "eager": True,
    "overlap": True,
    "fused_accumulation": False,
    "scatters_transfers": False,
    "stops_early": True,
}
# EleutherAI/gpt-neox fuses neither biases with dropout nor norms nor rotations unless told (bias_dropout_fusion,
# layernorm_fusion and rope_fusion of megatron/neox_arguments/neox_args.py), and drops nothing by default.
_NEOX: Mapping[str, Any] = {"eager": True, "adds_biases": True, "dropout": False}
# ServiceNow/Fast-LLM: its own backward with Triton's kernels for norms, rotations, gates, loss and AdamW
# (fast_llm/functional/triton), gradients with the loss (entropy_loss.py); buffers in the precision that multiplies, and
# gradients that are added to a sum in fp32 (update_linear_gradients in functional/linear.py).
_FAST_LLM: Mapping[str, Any] = {
    "attention_kernel": AttentionKernel.FLASH_2,
    "shard_copies": ShardCopies.NONE,
    "eager": False,
    "composite_norms": False,
    "dense_masks": False,
    "casts_each_pass": False,
    "keeps_copies": True,
    "loss_kernel": LossKernel(early=True),
}
# DeepSpeed's transformer kernels of 2020 (csrc/transformer): biases, dropout, activations, residuals and norms fused,
# scores softmaxed in one pass; parameters in fp16.
_FUSED_LAYERS: Mapping[str, Any] = {
    **_OLD_NCCL,
    "fused_attention": False,
    "dropout": True,
    "eager": False,
    "composite_norms": False,
    "dense_masks": False,
    "casts_each_pass": False,
    "keeps_copies": True,
    "adds_narrow": True,
    "fused_loss": False,
    "sums_biases": False,
    "stops_early": False,
}
_TITAN: Mapping[str, Any] = {
    "attention_kernel": AttentionKernel.FLASH_2,
    "torch_attention": True,
    "fused_loss": False,
    "repeats": OPERATORS,
}
_COMPILED: Mapping[str, Mapping[str, Any]] = {
    "": {"plain_norms": True},
    "-compiled": {"compiled": True},
    "-async": {"compiled": True, "pieces": True},
}
# its recipes of eight bits keep parameters so (fp8_param_gather in recipes/precision/mixed_precision.py)
_NEMO: Mapping[str, Any] = {**_CORE, "pieces": True, "narrow_parameters": True}
# its recipes ask for Transformer Engine's loss (cross_entropy_fusion_impl in scripts/performance/utils/overrides.py)
_BRIDGE: Mapping[str, Any] = {**_NEMO, "loss_kernel": LossKernel(early=True)}
_XLA: Mapping[str, Any] = {
    "shard_copies": ShardCopies.NONE,
    "eager": False,
    "composite_norms": False,
    "fused_accumulation": True,
    "fused_loss": False,
    "dense_masks": False,
    "sums_biases": False,
    "repeats": PRODUCTS_KEPT,
    "experts": ExpertHandling(masks=True),  # generate_masks in MaxText's layers/moe.py
}
# Nothing hides a reduce-scatter: 5 % of an 8B step on v6e-8, which is 4.7 % faster where SparseCores do them
# (vlasenkoalexey/tpu_performance_autoresearch_wiki, llama3_8B/jax exp12b and exp28b).
# Windowed einsum is on for TPUs (DISABLE_COLLECTIVE_MATMUL in MaxText's benchmarks/xla_flags_library.py). A loss in
# fp32 over bf16 logits, compiled for v6e, has two bytes a logit: their gradient is written over them (docs/lab.md).
_XLA_TPU: Mapping[str, Any] = {
    **_XLA,
    "pieces": True,
    "fused_loss": True,
    "sums_replicas_last": True,
    "scatters_alone": True,
    "experts": ExpertHandling(masks=True, block=512),
}
# Pax of 2023 has XLA hide collectives and not pipeline them (flags in rosetta/projects/pax of NVIDIA/JAX-Toolbox): what
# is gathered for a layer does not travel beside the layer before.
_XLA_IN_TURN: Mapping[str, Any] = {**_XLA, "gathers_alone": True, "scatters_alone": True}
_FUSED: Mapping[str, Mapping[str, Any]] = {"": {}, "-unfused": {"fused_attention": False}}
_ON_SPARSE_CORES: Mapping[str, Any] = {**_XLA_TPU, "scatters_alone": False}
# karpathy/llm.c: one program whose kernels add residuals with norms and write gradients of logits over them, whose
# products add to gradients in bf16, which travel during the last backward (train_gpt2.cu, llmc/fused_classifier.cuh).
_PROGRAM: Mapping[str, Any] = {
    "shard_copies": ShardCopies.NONE,
    "eager": False,
    "composite_norms": False,
    "dense_masks": False,
    "casts_each_pass": False,
    "fused_accumulation": True,
    "adds_narrow": True,
    "keeps_copies": True,
    "stops_early": False,
}
_REMAT: Mapping[str, Mapping[str, Any]] = {"": {}, "-keeps-attention": {"repeats": ATTENTION_KEPT}}
_EXPERTS: Mapping[str, Mapping[str, bool]] = {
    "": {},
    "-deepep": {"once": True},
    "-overlap": {"hides": True},
    "-deepep-overlap": {"once": True, "hides": True},
}
# What is captured: of a layer the router and what comes before tokens are sent, and attention too; or the whole step.
# Then hosts start nothing, and tokens are counted on the device alone, by the fused kernels of experts that go with it
# (use_transformer_engine_op_fuser in Megatron-Bridge's recipes of full_iteration). A bias that the router scales is
# still added apart, as those kernels could not at first (_is_fused_impl_supported of Megatron-Core).
_GRAPHS: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "-router-graphs": {"mixture_seconds": _mixture_seconds(4.77 - 1.72) - _FEED_FORWARD_SECONDS},
    "-layer-graphs": {"layer_seconds": 0.0, "mixture_seconds": _mixture_seconds(4.77 - 1.72)},
    "-step-graph": {
        "layer_seconds": 0.0,
        "mixture_seconds": 0.0,
        "expert_streams": 0,
        "expert_seconds": 0.0,
        "experts": ExpertHandling(biases_apart=True, pads=True, fused=True),
    },
}
_WITH_MODULES = ("megatron-core", "primus", "nemo", "megatron-bridge")
OWN, _ON_TPUS = "torch", "xla"  # this runtime, and what runs where it does not
SOFTWARE: Mapping[str, Software] = MappingProxyType(
    {
        "torch": Software(agrees_on_scales=True, grouped_experts=True, torch_attention=True),
        # Whoever trains with PyTorch alone: its own loss, and experts as a module each.
        "torch-plain": Software(fused_loss=False, torch_attention=True),
        # ZeRO-3: gradients are scaled on the host (unscale_and_clip_grads of DeepSpeed's runtime/zero/stage3.py), and
        # masters cast there for a blocking copy, which goes through pages that are pinned (aten's cuda/Copy.cu)
        # Hooks fetch and release module after module (runtime/zero/parameter_offload.py): full fine-tuning of Qwen-1.8B
        # on one A100 takes 2.1 s a step of eight sequences whether they are of 256 or 1,024 tokens (its README, ZeRO-3
        # and checkpoints): 3.5 ms a layer and pass, 0.5 of them its kernels, and seven modules have parameters.
        "deepspeed": Software(
            agrees_on_scales=True,
            grouped_experts=True,
            host_bytes=8.0 + 6.0 + 4.0,
            fetch_seconds=3.0e-3 / 7.0,
            torch_attention=True,
            fused_loss=False,
            **_OLD_SEGMENTS,
        ),
        "torch-2021": Software(
            layer_seconds=_LAYER_SECONDS,
            fused_attention=False,
            dropout=True,
            plain_softmax=True,
            stops_early=False,
            **_OLD_SEGMENTS,
            **_OLD_NCCL,
        ),
        # llm-foundry with the images of its tables (torch 2.1); ComposerMPTCausalLM in its modeling_mpt.py
        "torch-2023": Software(
            attention_kernel=AttentionKernel.FLASH_1,
            plain_norms=True,
            shard_copies=ShardCopies.FLAT,
            loss_kernel=LossKernel(metrics=2),
            **_OLD_SEGMENTS,
        ),
        **{f"torch-2024{name}": Software(**_TITAN, **how) for name, how in _COMPILED.items()},
        **{
            f"torch-2025{name}": Software(**{**_TITAN, "attention_kernel": AttentionKernel.NATIVE}, **how)
            for name, how in _COMPILED.items()
        },
        # NeMo AutoModel: FSDP2 of modules of Transformer Engine, and DeepEP (docs/performance-summary.mdx); what lies
        # between experts' products is compiled (components/moe/experts.py), and kernels know windows and sinks
        # (components/attention/flex_attention.py); its loss stays in bf16 (fp32_upcast in examples/llm_benchmark)
        "automodel": Software(
            experts=ExpertHandling(dispatches_once=True),
            fused_loss=False,
            repeats=OPERATORS,
            compiled=True,
            dense_masks=False,
            steps_narrow=True,
            narrow_loss=True,
        ),
        "megatron-2021": Software(**_UNFUSED),
        "megatron-2022": Software(hides_gradients=True, regathers=True, **{**_UNFUSED, "fused_accumulation": True}),
        "megatron-deepspeed": Software(**_PIPES, keeps_terms=True),
        "deepspeed-3d": Software(**_FIRST_PIPES),
        "megatron-flash": Software(attention_kernel=AttentionKernel.FLASH_2, **_MEGATRON),
        "gpt-neox": Software(attention_kernel=AttentionKernel.FLASH_2, **{**_MEGATRON, **_NEOX}),
        "gpt-neox-unfused": Software(**{**_UNFUSED, **_NEOX}),
        "nanotron": Software(attention_kernel=AttentionKernel.FLASH_2, **_NANOTRON),
        "fast-llm": Software(**_FAST_LLM),
        "fast-llm-unfused": Software(fused_attention=False, plain_softmax=True, **_FAST_LLM),
        "deepspeed-2020": Software(**_FUSED_LAYERS),
        "scaling": Software(attention_kernel=AttentionKernel.FLASH_2, plain_norms=True, **_SCALING),
        "scaling-fused-norms": Software(attention_kernel=AttentionKernel.FLASH_2, **_SCALING),
        "scaling-flash-1": Software(attention_kernel=AttentionKernel.FLASH_1, plain_norms=True, **_SCALING),
        "scaling-fused-softmax": Software(fused_attention=False, plain_norms=True, **_SCALING),
        "scaling-plain-softmax": Software(fused_attention=False, plain_softmax=True, plain_norms=True, **_SCALING),
        # rows of megablox's tiles by make_group_metadata in MaxText's kernels/megablox and its configs/base.yml
        **{f"xla{name}": Software(**{**_XLA_TPU, **how}) for name, how in _REMAT.items()},
        **{f"xla-sparsecore{name}": Software(**{**_ON_SPARSE_CORES, **how}) for name, how in _REMAT.items()},
        **{f"xla-gpu{name}": Software(**{**_XLA, **how}) for name, how in _REMAT.items()},
        "xla-2022": Software(fused_attention=False, **_XLA),
        **{f"xla-gpu-2023{name}": Software(**_XLA_IN_TURN, **how) for name, how in _FUSED.items()},
        # NVIDIA/DeepLearningExamples, TensorFlow/LanguageModeling/BERT (20.06): Horovod, with and without --use_xla;
        # hidden features and probabilities of attention are dropped out in training (modeling.py)
        "tensorflow-2020": Software(fused_attention=False, dropout=True, plain_softmax=True, **_OLD_NCCL),
        "tensorflow-2020-xla": Software(fused_attention=False, dropout=True, **_OLD_NCCL, **_XLA),
        # doc/en/install.md and modeling_internlm.py of InternLM/InternEvo: flash-attention 1.0.5, modules one by one
        "internevo": Software(
            attention_kernel=AttentionKernel.FLASH_1,
            loss_kernel=LossKernel(),
            **{**_MEGATRON, "eager": True, "overlap": True, "fused_accumulation": False, "adds_narrow": True},
        ),
        "llm.c": Software(**_PROGRAM, loss_kernel=LossKernel()),
        "megatron-core-serial": Software(
            **{**_CORE, "overlap": False, "waits_in_loops": True, "hides_gradients": False}
        ),
        **{f"megatron-core{name}": _sending(_CORE, **how) for name, how in _EXPERTS.items()},
        **{f"primus{name}": _sending(_PRIMUS, **how) for name, how in _EXPERTS.items()},
        # fully_shard of a layer at a time with no precision of its own (torch_fully_sharded_data_parallel.py of
        # Megatron-Core): bf16 is gathered, and gradients are summed as they are
        "primus-fsdp2": Software(**{**_PRIMUS, "shard_copies": ShardCopies.UNITS, "adds_narrow": True}),
        **{f"nemo{name}": _sending(_NEMO, **how) for name, how in _EXPERTS.items()},
        **{
            f"megatron-bridge{name}{graphs}": _sending({**_BRIDGE, **captured}, **how)
            for name, how in _EXPERTS.items()
            for graphs, captured in _GRAPHS.items()
        },
    }
)


def software(name: str) -> Software:
    """The features of the software called `name`, with what variants say after that of its stack
    (`megatron-core-flash-2`), and after a colon the modules that its selective recompute runs again
    (`megatron-core:mla_up_proj+mlp`); raises ConfigError when it is not known."""
    plain, colon, modules = name.partition(":")
    stack, said = next((taken for taken in plain_names(plain) if taken[0] in SOFTWARE), (plain, ()))
    known = SOFTWARE.get(stack)
    if known is None:
        raise ConfigError(
            Problem(
                what=f"software {name!r} is not known",
                where="job.software",
                fix=f"{meant(stack, SOFTWARE)}, with any of {', '.join(VARIANTS)} after it",
            )
        )
    found = changed(known, said)
    if not colon:
        return found
    if not plain.startswith(_WITH_MODULES):
        what = f"software {plain!r} has no modules to run again"
        fix = f"leave them out; names that take some begin with {', '.join(_WITH_MODULES)}"
        raise ConfigError(Problem(what=what, where="job.software", fix=fix))
    return _repeating(found, modules)


def software_name(job: JobSpec, cluster: ClusterSpec) -> str:
    """The name of what plans of `job` are priced as: what it says, else what runs on the devices of `cluster`, this
    runtime or on TPUs XLA. Raises ConfigError where it says nothing and nothing runs on all of them at once."""
    if job.software != Automatic.AUTO:
        return job.software
    of_tpus = {group.device.kind is DeviceKind.TPU: group.device.name for group in cluster.groups}
    if len(of_tpus) == 1:
        return _ON_TPUS if True in of_tpus else OWN
    raise ConfigError(
        Problem(
            what=f"no software trains on {of_tpus[True]} and {of_tpus[False]} at once",
            where="job.software",
            fix=f"plan for one of them, or price all devices as one software: --set software={_ON_TPUS}",
        )
    )


def software_of(job: JobSpec, cluster: ClusterSpec) -> Software:
    """The software of `job` on `cluster`, as it runs where the job compiles what it does operator by operator:
    element-wise work and norms are fused, and a loss of its own reads logits once for the largest, once for their
    exponentials, and once to write their gradients over them."""
    found = software(software_name(job, cluster))
    if job.compile is not Switch.ON or not found.eager:
        return found
    kernel = LossKernel(tops=True) if found.fused_loss and found.loss_kernel is None else found.loss_kernel
    return replace(found, compiled=True, plain_norms=False, loss_kernel=kernel)


@cache
def _repeating(plain: Software, modules: str) -> Software:
    """`plain` whose selective recompute runs `modules` again, as Megatron-Core calls them, with a plus between."""
    said = modules.split("+")
    if not set(said) <= set(MODULES):
        fix = f"leave them out, or name some of {', '.join(MODULES)}"
        raise ConfigError(Problem(what=f"modules {modules!r} are not known", where="job.software", fix=fix))
    return replace(plain, repeats=frozenset(what for each in said for what in MODULES[each]))
