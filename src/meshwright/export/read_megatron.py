"""Flags of Megatron-LM's pretrain_gpt.py read back as a plan, by its own rules: validate_args of Megatron Core 0.19.

Knows nothing of the writer: every name, default and rule below is from Megatron-LM's arguments.py,
transformer_config.py and pipeline_parallel_layer_layout.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshwright.export.idle_flags import IDLE_FLAGS
from meshwright.export.meaning import Meaning, Steps
from meshwright.export.read_megatron_model import read_model
from meshwright.export.rest import Reading, without
from meshwright.export.script import Given, parse_script
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.plan import Offload, Recompute, ScheduleKind, Sharding

# Flags that change the plan in a way that this reader does not follow; read in silence they would be misread.
_FOREIGN = (
    "--decoder-num-layers",
    "--encoder-num-layers",
    "--use-torch-fsdp2",
    "--rampup-batch-size",
    "--hybrid-layer-pattern",
    "--yaml-cfg",
    "--use-checkpoint-args",
    "--use-tp-pp-dp-mapping",
    "--mtp-num-layers",
    "--fine-grained-activation-offloading",
    "--cpu-offloading-num-layers",
    "--recompute-modules",
    "--tensor-parallel-num-weight-shards",
    "--microbatch-group-size-per-virtual-pipeline-stage",
    "--outer-dp-sharding-strategy",
    "--hybrid-context-parallel",
)
# How a run does the same: compared with what is exported, and no part of a plan's meaning.
WAYS = (
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--moe-grouped-gemm",
    "--ckpt-format",
    "--no-gradient-accumulation-fusion",
    "--init-model-with-meta-device",
)


def read(text: str, *, where: str = "megatron-lm") -> Reading:
    """What the launch script `text` would run. Raises ConfigError for what Megatron-LM, or this reader, refuses."""
    given = parse_script(text, runner="torchrun", where=where)
    for name in _FOREIGN:
        if given.on(name):
            raise ConfigError(Problem(where=where, what=f"{name} is not read here", fix="leave it out"))
    nodes = given.degree("--nnodes", 1)
    world = nodes * given.degree("--nproc-per-node", 1)
    tensor, pipeline = (
        given.degree("--tensor-model-parallel-size", 1),
        given.degree("--pipeline-model-parallel-size", 1),
    )
    context = given.degree("--context-parallel-size", 1)
    model_ranks = tensor * pipeline * context
    if world % model_ranks:
        raise given.wrong(f"world size {world} is not divisible by {model_ranks}", "tensor x pipeline x context")
    data = world // model_ranks
    replicate, shard, sharding = _states(given, data)
    micro = given.degree("--micro-batch-size")
    batch = given.degree("--global-batch-size", micro * data)
    if batch % (micro * data):
        raise given.wrong(f"batch {batch} is not whole microbatches of {micro} on {data} ranks", "global-batch-size")
    model = read_model(given)
    stages = _stages(given, layers=model.layers, pipeline=pipeline)
    chunks = len(stages) // pipeline
    found = Meaning(
        devices=world,
        nodes=nodes,
        pipeline=pipeline,
        replicate=replicate,
        shard=shard,
        context=context,
        tensor=tensor,
        sequence_parallel=given.on("--sequence-parallel") and tensor > 1,
        sharding=sharding,
        exchange=_exchange(given, context),
        expert_grid=_experts(given, tensor) if model.mixture else (),
        dispatch=_dispatch(given) if model.mixture else "none",
        stages=stages,
        schedule=ScheduleKind.INTERLEAVED if chunks > 1 else ScheduleKind.ONE_F_ONE_B,
        chunks=chunks,
        slices=1,
        sequence_length=given.degree("--seq-length"),
        microbatch=micro,
        microbatches=batch // (micro * data),
        batch=batch,
        recompute=_recompute(given, stages, layers=model.layers),
        offload=(_offload(given, sharding),) * model.layers,
        precision=_precision(given),
        gradients=_gradients(given),
        seed=_seed(given),
        model=model,
        optimizer=_optimizer(given),
    )
    _check_positions(given)
    return Reading(meaning=found, rest=without(given.unread, IDLE_FLAGS))


def _seed(given: Given) -> int:
    """Counted from 0; its own lowest is 1."""
    seed = given.number("--seed", 1234)
    if seed < 1:
        raise given.wrong(f"Seed ({seed}) should be a positive integer.")
    return seed - 1


def _check_positions(given: Given) -> None:
    """Positions reach as far as a sequence; rotary ones have no table, so more of them change nothing."""
    if given.degree("--max-position-embeddings") < given.degree("--seq-length"):
        raise given.wrong("--max-position-embeddings is less than --seq-length")


def _dispatch(given: Given) -> str:
    """Experts are reached by all-to-all, and by a gather unless told."""
    kind = given.word("--moe-token-dispatcher-type", "allgather")
    known = {"alltoall": "all_to_all", "flex": "all_to_all", "allgather": "all_gather"}
    if kind not in known:
        raise given.wrong(f"--moe-token-dispatcher-type {kind} is not known")
    return known[kind]


def _states(given: Given, data: int) -> tuple[int, int, Sharding]:
    """Replicas, ranks that share one copy of the states, and what they share."""
    fsdp = given.on("--use-megatron-fsdp")
    if given.on("--overlap-param-gather") and not (given.on("--use-distributed-optimizer") or fsdp):
        raise given.wrong("--overlap-param-gather is only for the distributed optimizer or Megatron-FSDP")
    if given.on("--overlap-param-gather") and not given.on("--overlap-grad-reduce"):
        raise given.wrong("--overlap-param-gather must be with --overlap-grad-reduce")
    if fsdp:
        strategy = given.word("--data-parallel-sharding-strategy", "optim_grads_params")
        kinds = {
            "no_shard": Sharding.NONE,
            "optim": Sharding.OPTIMIZER,
            "optim_grads": Sharding.GRADIENTS,
            "optim_grads_params": Sharding.PARAMETERS,
        }
        if strategy not in kinds:
            raise given.wrong(f"--data-parallel-sharding-strategy {strategy} is not known")
        kind = kinds[strategy]
    else:
        kind = Sharding.OPTIMIZER if given.on("--use-distributed-optimizer") else Sharding.NONE
    if kind is Sharding.NONE:
        return data, 1, kind
    instances = given.degree("--num-distributed-optimizer-instances", 1)
    if data % instances:
        raise given.wrong(f"{instances} instances of the distributed optimizer do not divide {data} data ranks")
    return instances, data // instances, kind


def _exchange(given: Given, context: int) -> str:
    if context == 1:
        return "none"
    kinds = given.words("--cp-comm-type", ("p2p",))
    if len(kinds) != 1:
        raise given.wrong("--cp-comm-type differs between layers")
    if kinds[0] == "a2a+p2p":
        sizes = given.words("--hierarchical-context-parallel-sizes")
        if len(sizes) != 2 or int(sizes[0]) * int(sizes[1]) != context:
            raise given.wrong(f"--hierarchical-context-parallel-sizes do not multiply to {context}")
        return f"all-to-all {int(sizes[0])} in ring {int(sizes[1])}"
    words = {"p2p": "ring", "all_gather": "gather", "allgather": "gather", "a2a": "all-to-all"}
    if kinds[0] not in words:
        raise given.wrong(f"--cp-comm-type {kinds[0]} is not known")
    return words[kinds[0]]


def _experts(given: Given, tensor: int) -> tuple[int, int]:
    return given.degree("--expert-model-parallel-size", 1), given.degree("--expert-tensor-parallel-size", tensor)


def _stages(given: Given, *, layers: int, pipeline: int) -> tuple[tuple[int, int, int], ...]:
    """(rank, start, stop) of every stage in blocks, the embedding being block 0."""
    counts = _layout(given) if given.on("--pipeline-model-parallel-layout") else _counts(given, layers, pipeline)
    if len(counts) % pipeline:
        raise given.wrong(f"{len(counts)} stages do not divide over {pipeline} pipeline ranks")
    if sum(counts) != layers + 2:
        raise given.wrong(f"the stages hold {sum(counts) - 2} layers and the model has {layers}")
    found, start = [], 0
    for index, count in enumerate(counts):
        found.append((index % pipeline, start, start + count))
        start += count
    return tuple(found)


def _layout(given: Given) -> list[int]:
    """Blocks of each stage of a layout like `Et*3|(t|)*2tL`; E embeds, L is the head with the loss."""
    text = given.word("--pipeline-model-parallel-layout").replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda match: match.group(1) * given.times(match.group(2)), text)
    joined = text.replace("|", "")
    if not re.fullmatch(r"Et*L", joined):
        raise given.wrong(f"the layout is {joined[:40]} and not E, layers t, and L", "pipeline-model-parallel-layout")
    return [len(stage) for stage in text.split("|")]


def _counts(given: Given, layers: int, pipeline: int) -> list[int]:
    if given.on("--num-layers-per-virtual-pipeline-stage"):
        size = given.degree("--num-layers-per-virtual-pipeline-stage")
        if layers % pipeline or (layers // pipeline) % size:
            raise given.wrong(f"{layers} layers are not whole virtual stages of {size} on {pipeline} ranks")
        chunks = layers // pipeline // size
    else:
        chunks = given.degree("--num-virtual-stages-per-pipeline-rank", 1)
    first, last = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
    held: list[int | None] = [None] * pipeline
    held[0] = given.number(first) if given.on(first) else None
    held[-1] = given.number(last) if given.on(last) else held[-1]
    extra = [0] * pipeline
    extra[0] += given.on("--account-for-embedding-in-pipeline-split")
    extra[-1] += given.on("--account-for-loss-in-pipeline-split")
    left = layers + sum(extra) - sum(count for count in held if count is not None)
    open_ranks = [rank for rank, count in enumerate(held) if count is None]
    if open_ranks and left % len(open_ranks):
        raise given.wrong("number of layers should be divisible by the pipeline-model-parallel size")
    each = left // len(open_ranks) if open_ranks else 0
    ranks = [each if count is None else count for count in held]
    if any(count % chunks for count in ranks):
        raise given.wrong(f"a rank's layers are not divisible by its {chunks} virtual stages")
    stages = [ranks[index % pipeline] // chunks for index in range(pipeline * chunks)]
    stages[0] += 1 - extra[0]
    stages[-1] += 1 - extra[-1]
    return stages


def _recompute(given: Given, stages: Sequence[tuple[int, int, int]], *, layers: int) -> tuple[Recompute, ...]:
    kind = given.word("--recompute-granularity", "none")
    if given.on("--recompute-activations"):
        kind = "selective"
    if kind in ("none", "selective"):
        return (Recompute(kind),) * layers
    if kind != "full":
        raise given.wrong(f"--recompute-granularity {kind} is not known")
    method, size = given.word("--recompute-method"), given.number("--recompute-num-layers")
    if method == "uniform":
        if size != 1:
            raise given.wrong(f"units of {size} layers are recomputed, and a plan knows single layers")
        return (Recompute.FULL,) * layers
    found: list[Recompute] = []
    for _, start, stop in stages:
        held = min(stop, layers + 1) - max(start, 1)
        found += [Recompute.FULL if index < size else Recompute.NONE for index in range(held)]
    return tuple(found)


def _offload(given: Given, sharding: Sharding) -> Offload:
    if not given.on("--optimizer-cpu-offload"):
        return Offload.NONE
    if not given.on("--use-precision-aware-optimizer") or sharding is Sharding.NONE:
        raise given.wrong("--optimizer-cpu-offload needs the precision-aware distributed optimizer")
    if given.real("--optimizer-offload-fraction", 1.0) != 1.0:
        raise given.wrong("--optimizer-offload-fraction is not 1")
    return Offload.OPTIMIZER


def _precision(given: Given) -> Precision:
    if given.on("--fp16") and given.on("--bf16"):
        raise given.wrong("--fp16 and --bf16 at once")
    if (given.on("--fp4-format") or given.on("--fp8-format")) and not given.on("--bf16"):
        raise given.wrong("--fp4-format and --fp8-format without --bf16 are no precision that a plan knows")
    if given.on("--fp4-format"):
        if (given.word("--fp4-format"), given.word("--fp4-recipe", "nvfp4")) != ("e2m1", "nvfp4"):
            raise given.wrong("--fp4-format and --fp4-recipe are not e2m1 and nvfp4")
        return Precision.NVFP4
    if given.on("--fp8-format"):
        kind = given.word("--fp8-format"), given.word("--fp8-recipe", "delayed")
        known = {
            ("hybrid", "tensorwise"): Precision.FP8,
            ("e4m3", "blockwise"): Precision.FP8_BLOCK,
            ("e4m3", "mxfp8"): Precision.MXFP8,
        }
        if kind not in known:
            raise given.wrong(f"--fp8-format {kind[0]} with --fp8-recipe {kind[1]} is no precision that a plan knows")
        return known[kind]
    if given.on("--fp16"):
        return Precision.FP16
    return Precision.BF16 if given.on("--bf16") else Precision.FP32


def _gradients(given: Given) -> Precision:
    """bf16 accumulates and reduces in fp32 unless told; fp16 reduces in fp16 unless told."""
    if given.on("--bf16"):
        return Precision.BF16 if given.on("--grad-reduce-in-bf16") else Precision.FP32
    half = given.on("--fp16") and not given.on("--accumulate-allreduce-grads-in-fp32")
    return Precision.FP16 if half else Precision.FP32


def _decay_steps(given: Given) -> int:
    """Of a rate that stays and then decays, in a line: its own default is exponential."""
    if given.word("--lr-decay-style", "linear") != "WSD":
        return 0
    if given.word("--lr-wsd-decay-style", "exponential") != "linear":
        raise given.wrong("--lr-wsd-decay-style other than linear is no decay that a plan knows")
    return given.number("--lr-wsd-decay-iters")


def _optimizer(given: Given) -> Steps:
    rate, clip = given.real("--lr"), given.real("--clip-grad", 1.0)
    return Steps(
        kind={"adam": "adamw"}.get(given.word("--optimizer", "adam"), given.word("--optimizer", "adam")),
        learning_rate=rate,
        beta1=given.real("--adam-beta1", 0.9),
        beta2=given.real("--adam-beta2", 0.999),
        epsilon=given.real("--adam-eps", 1e-8),
        weight_decay=given.real("--weight-decay", 0.01),
        clip_norm=clip if clip > 0 else None,
        decay=given.word("--lr-decay-style", "linear").lower(),
        warmup=given.number("--lr-warmup-iters", 0),
        decay_steps=_decay_steps(given),
        final_fraction=round(given.real("--min-lr", 0.0) / rate, 12),
        steps=given.degree("--train-iters"),
    )
