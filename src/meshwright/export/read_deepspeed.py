"""A DeepSpeed launch read back as a plan: ds_config.json by DeepSpeed's rules, flags by Megatron-DeepSpeed's.

Knows nothing of the writer: names, defaults and rules are those of DeepSpeed 0.19's runtime/config.py, zero/config.py
and pipe/engine.py, and of Megatron-DeepSpeed's arguments.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.export.idle_flags import IDLE_FLAGS
from meshwright.export.meaning import Meaning, Sizes, Steps, deviation_words, routing_words
from meshwright.export.read_activation import read_activation
from meshwright.export.rest import Reading, without
from meshwright.export.script import Given, parse_script
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.json_text import parse_json
from meshwright.spec.plan import Offload, Recompute, ScheduleKind, Sharding

_CONFIG = re.compile(r"cat > (\S+) <<'?(\w+)'?\n(.*?)\n\2\n", re.DOTALL)
_SHARDINGS = (Sharding.NONE, Sharding.OPTIMIZER, Sharding.GRADIENTS, Sharding.PARAMETERS)
_FOREIGN = (
    "--num-layers-per-virtual-pipeline-stage",
    "--rampup-batch-size",
    "--checkpoint-activations",
    "--ds-sequence-parallel-fpdt",
    "--standalone-embedding-stage",
    "--use-distributed-optimizer",
    "--mlp-type",
)
# How a run does the same: compared with what is exported, and no part of a plan's meaning.
WAYS = (
    "zero_optimization.overlap_comm",
    "zero_optimization.offload_optimizer.pin_memory",
    "data_types.grad_accum_dtype",
    "--deepspeed-activation-checkpointing",
)
_READ = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("zero_optimization.stage", "zero_optimization.offload_optimizer.device"),
    *("activation_checkpointing.cpu_checkpointing", "bf16.enabled", "fp16.enabled"),
    *("communication_data_type", "gradient_clipping"),
)
_RECORDS = "what is recorded of a run"
_IDLE = dict.fromkeys(
    ("steps_per_print", "wall_clock_breakdown", "dump_state", "tensorboard.*", "wandb.*", "csv_monitor.*"), _RECORDS
)
_FOREIGN_ZERO = ("mics_shard_size", "zero_hpz_partition_size", "zero_quantized_gradients", "offload_param")


def read(text: str, *, where: str = "deepspeed") -> Reading:
    """What the launch script `text`, with its ds_config.json, would run. Raises ConfigError for what it refuses."""
    found = _CONFIG.search(text)
    if found is None:
        raise ConfigError(Problem(where=where, what="there is no `cat > ds_config.json <<'JSON'` in it"))
    try:
        config = parse_json(found.group(3))
    except ValueError as error:
        raise ConfigError(Problem(where=where, what="its ds_config.json is not JSON", why=str(error))) from error
    given = parse_script(text[: found.start()] + text[found.end() :], runner="deepspeed", where=where)
    _check_start(given, file=found.group(1))
    zero = config.get("zero_optimization", {})
    for name in [flag for flag in _FOREIGN if given.on(flag)] + [key for key in _FOREIGN_ZERO if key in zero]:
        raise ConfigError(Problem(where=where, what=f"{name} is not read here", fix="leave it out"))
    nodes = given.degree("--num_nodes", 1)
    world = nodes * given.degree("--num_gpus")
    tensor = given.degree("--tensor-model-parallel-size", 1)
    pipeline = given.degree("--pipeline-model-parallel-size", 1)
    context = given.degree("--ds-sequence-parallel-size", 1)
    data = _data_ranks(given, world, tensor=tensor, pipeline=pipeline, context=context)
    micro, microbatches, batch = _batches(given, config, data)
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3) or stage != given.number("--zero-stage", 1):
        raise given.wrong(f"zero_optimization.stage {stage} is not --zero-stage {given.number('--zero-stage', 1)}")
    if stage > 1 and not given.on("--no-pipeline-parallel"):
        raise given.wrong("ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism")
    model = _model(given)
    meant = Meaning(
        devices=world,
        nodes=nodes,
        pipeline=pipeline,
        replicate=1 if stage else data,
        shard=data if stage else 1,
        context=context,
        tensor=tensor,
        sequence_parallel=given.on("--sequence-parallel") and tensor > 1,
        sharding=_SHARDINGS[stage],
        exchange="all-to-all" if context > 1 else "none",
        expert_grid=_experts(given, data=data, tensor=tensor) if model.mixture else (),
        dispatch="all_to_all" if model.mixture else "none",
        stages=_stages(given, layers=model.layers, pipeline=pipeline),
        schedule=_schedule(given),
        chunks=1,
        slices=1,
        sequence_length=given.degree("--seq-length"),
        microbatch=micro,
        microbatches=microbatches,
        batch=batch,
        recompute=(_recompute(given),) * model.layers,
        offload=(_offload(given, config, stage),) * model.layers,
        precision=_precision(given, config),
        gradients=_gradients(given, config),
        seed=_seed(given),
        model=model,
        optimizer=_optimizer(given, config),
    )
    beyond = {name: value for name, value in _flat("", config) if name not in _READ}
    return Reading(meaning=meant, rest=without(beyond, _IDLE) | without(given.unread, IDLE_FLAGS))


def _check_start(given: Given, *, file: str) -> None:
    """DeepSpeed is on, with the file that the script writes, and positions reach as far as a sequence."""
    if not given.on("--deepspeed") or given.word("--deepspeed_config") != file:
        raise given.wrong(f"--deepspeed with --deepspeed_config {file} is not given")
    if given.degree("--max-position-embeddings") < given.degree("--seq-length"):
        raise given.wrong("--max-position-embeddings is less than --seq-length")


def _seed(given: Given) -> int:
    """Counted from 0; its own lowest is 1."""
    seed = given.number("--seed", 1234)
    if seed < 1:
        raise given.wrong(f"Seed ({seed}) should be a positive integer.")
    return seed - 1


def _flat(prefix: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """`zero_optimization.stage` and its value, for every value of the file."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", json.dumps(value)


def _data_ranks(given: Given, world: int, *, tensor: int, pipeline: int, context: int) -> int:
    if context > 1 and tensor * pipeline > 1:
        raise given.wrong("DeepSpeed's sequence parallel does not work with tensor parallel or pipeline parallel")
    if given.on("--no-pipeline-parallel") and pipeline > 1:
        raise given.wrong("pipeline_model_parallel_size must be 1 if pipeline parallel is disabled")
    ranks = tensor * pipeline * context
    if world % ranks:
        raise given.wrong(f"world size ({world}) is not divisible by {ranks}")
    return world // ranks


def _batches(given: Given, config: Mapping[str, Any], data: int) -> tuple[int, int, int]:
    """Any two of the three sizes give the third; one alone accumulates nothing; the flags must say the same."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name in names:
        size = config.get(name)
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise given.wrong(f"{name}: {size} has to be greater than 0")
    batch, micro, steps = (config.get(name) for name in names)
    if batch is None and micro is None:
        raise given.wrong("Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided")
    if micro is None:
        steps = steps or 1
        micro = (batch or 0) // data // steps
    if steps is None:
        steps = batch // micro // data if batch is not None else 1
    batch = micro * steps * data if batch is None else batch
    if batch != micro * steps * data:
        raise given.wrong(f"train_batch_size {batch} is not micro_batch {micro} * gradient_acc {steps} * world {data}")
    if given.degree("--micro-batch-size") != micro or given.degree("--global-batch-size", micro * data) != batch:
        raise given.wrong("--micro-batch-size and --global-batch-size are not those of ds_config.json")
    return micro, steps, batch


def _stages(given: Given, *, layers: int, pipeline: int) -> tuple[tuple[int, int, int], ...]:
    """type:transformer balances the number of transformer layers; ends carry embedding and head."""
    if layers % pipeline:
        raise given.wrong(f"{layers} layers are not dealt evenly to {pipeline} stages")
    each, last = layers // pipeline, pipeline - 1
    return tuple(
        (rank, 1 + rank * each - (rank == 0), 1 + (rank + 1) * each + (rank == last)) for rank in range(pipeline)
    )


def _schedule(given: Given) -> ScheduleKind:
    if not given.on("--enable-zbh1-pipeline"):
        return ScheduleKind.ONE_F_ONE_B
    if given.on("--sequence-parallel"):
        raise given.wrong("the zero bubble schedule is not for sequence parallel")
    return ScheduleKind.ZERO_BUBBLE_H1


def _recompute(given: Given) -> Recompute:
    kind = given.word("--recompute-granularity", "none")
    if given.on("--recompute-activations"):
        kind = "selective"
    if kind not in ("none", "selective", "full"):
        raise given.wrong(f"--recompute-granularity {kind} is not known")
    if kind == "full" and (given.word("--recompute-method"), given.number("--recompute-num-layers", 1)) != (
        "uniform",
        1,
    ):
        raise given.wrong("DeepSpeed's pipeline recomputes uniform units, and a plan knows units of one layer")
    return Recompute(kind)


def _offload(given: Given, config: Mapping[str, Any], stage: int) -> Offload:
    device = config.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none")
    checkpoints = config.get("activation_checkpointing", {}).get("cpu_checkpointing", False)
    if device not in ("none", "cpu"):
        raise given.wrong(f"offload_optimizer.device {device} is not the host's memory")
    if checkpoints != given.on("--checkpoint-in-cpu"):
        raise given.wrong("activation_checkpointing.cpu_checkpointing and --checkpoint-in-cpu say different things")
    if device == "cpu":
        if stage == 0 or not given.on("--cpu-optimizer") or checkpoints:
            raise given.wrong("offload_optimizer is for stages 1, 2 and 3 with --cpu-optimizer, activations left alone")
        return Offload.OPTIMIZER
    if checkpoints and not given.on("--deepspeed-activation-checkpointing"):
        raise given.wrong("cpu_checkpointing without --deepspeed-activation-checkpointing")
    return Offload.ACTIVATIONS if checkpoints else Offload.NONE


def _precision(given: Given, config: Mapping[str, Any]) -> Precision:
    halves = [kind for kind in (Precision.BF16, Precision.FP16) if config.get(kind.value, {}).get("enabled", False)]
    flags = [kind for kind in (Precision.BF16, Precision.FP16) if given.on(f"--{kind.value}")]
    if halves != flags or len(halves) > 1:
        raise given.wrong("bf16 and fp16 of ds_config.json are not those of the flags")
    return halves[0] if halves else Precision.FP32


def _gradients(given: Given, config: Mapping[str, Any]) -> Precision:
    """In the precision of the products unless communication_data_type says so."""
    word = config.get("communication_data_type")
    if word is None:
        return _precision(given, config)
    if word not in ("fp16", "bf16", "fp32"):
        raise given.wrong(f"Invalid communication_data_type {word}")
    return Precision(word)


def _experts(given: Given, *, data: int, tensor: int) -> tuple[int, int]:
    expert = given.degree("--moe-expert-parallel-size", 1)
    if data % expert:
        raise given.wrong(f"{expert} ranks of experts do not divide {data} data ranks")
    if tensor > 1 and not given.on("--enable-expert-tensor-parallelism"):
        raise given.wrong("experts that tensor ranks hold whole are no grid that a plan knows")
    return expert, tensor


def _model(given: Given) -> Sizes:
    layers, width, heads = (given.degree(f"--{name}") for name in ("num-layers", "hidden-size", "num-attention-heads"))
    gated, rotary = given.on("--swiglu"), given.on("--use-rotary-position-embeddings")
    usual = int((4 * width * 2 / 3) / 64) * 64 if gated else 4 * width
    hidden = given.degree("--ffn-hidden-size", usual)
    experts = given.degree("--num-experts", 1)
    if experts > 1 and given.degree("--expert-interval", 2) != 1:
        raise given.wrong("--expert-interval other than 1 is not read here")
    learned = not rotary and not given.on("--no-position-embedding")
    unit = given.degree("--make-vocab-size-divisible-by", 128) * given.degree("--tensor-model-parallel-size", 1)
    bias = not given.on("--disable-bias-linear")
    return Sizes(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=given.degree("--num-key-value-heads", heads),
        head_dim=given.degree("--kv-channels", width // heads),
        feed_forward=0 if experts > 1 else hidden,
        vocab=-(-given.degree("--vocab-size") // unit) * unit,
        tied=not given.on("--untie-embeddings-and-output-weights"),
        gated=gated,
        activation=read_activation(given, gated=gated, bias=bias),
        norm={"rmsnorm": "rms", "layernorm": "layer"}[given.word("--normalization", "layernorm")],
        positions=given.degree("--max-position-embeddings") if learned else 0,
        theta=given.real("--rotary-position-embeddings-theta", 10000) if rotary else 0.0,
        bias=bias,
        qkv_bias=bias,
        mixture=(experts, given.degree("--topk", 1), hidden, 0) if experts > 1 else (),
        with_experts=(True,) * layers if experts > 1 else (),
        norm_epsilon=given.real("--layernorm-epsilon", 1e-5),
        routing=_routing(given) if experts > 1 else "none",
        hidden_dropout=given.real("--hidden-dropout", 0.1),
        attention_dropout=given.real("--attention-dropout", 0.1),
        first_weights=deviation_words(given.real("--init-method-std", 0.02)),
    )


def _routing(given: Given) -> str:
    """A softmax over all: of two that are chosen divided by their sum, the second of them sampled unless told, and
    choices beyond the capacity dropped unless told. Its loss weighs first choices alone, by 0.1 unless told."""
    two = given.degree("--topk", 1) == 2
    words = routing_words(
        "softmax",
        weighing="normalized" if two else "score",
        scale=1.0,
        groups=1,
        chosen=1,
        bias_rate=0.0,
        balance={"microbatch's first choices": given.real("--moe-loss-coeff", 0.1)},
    )
    capacity = given.real("--moe-train-capacity-factor", 1.0)
    whole, ranked = given.on("--disable-moe-token-dropping"), given.on("--disable-moe-top2-2nd-expert-sampling")
    words += "" if whole else f", no more than {capacity:g} x the mean of an expert"
    return words + ("" if ranked or not two else ", the second sampled")


def _optimizer(given: Given, config: Mapping[str, Any]) -> Steps:
    rate, clip = given.real("--lr"), float(config.get("gradient_clipping", 0.0))
    if given.on("--clip-grad") and given.real("--clip-grad") != clip:
        raise given.wrong(f"gradient_clipping {clip:g} is not --clip-grad {given.real('--clip-grad'):g}")
    return Steps(
        kind={"adam": "adamw"}.get(given.word("--optimizer", "adam"), given.word("--optimizer", "adam")),
        learning_rate=rate,
        beta1=given.real("--adam-beta1", 0.9),
        beta2=given.real("--adam-beta2", 0.999),
        epsilon=given.real("--adam-eps", 1e-8),
        weight_decay=given.real("--weight-decay", 0.01),
        clip_norm=clip if clip > 0 else None,
        decay=given.word("--lr-decay-style", "linear"),
        warmup=given.number("--lr-warmup-iters", 0),
        decay_steps=0,
        final_fraction=round(given.real("--min-lr", 0.0) / rate, 12),
        steps=given.degree("--train-iters"),
    )
