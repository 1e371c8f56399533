"""A job file of torchtitan read back as a plan, by its own rules: job_config.py and parallel_dims.py of 0.2.2.

Knows nothing of the writer. Models are flavors, whose sizes are those of torchtitan's own model files.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.export.meaning import Meaning, Sizes, Steps
from meshwright.export.rest import Reading, without
from meshwright.export.script import MOST, MOST_LISTED
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.plan import Offload, Recompute, ScheduleKind, Sharding

_LAUNCH = re.compile(r"^#.*torchrun .*--nnodes[ =](\d+) .*--nproc_per_node[ =](\d+)", re.MULTILINE)
_SINGLE_STAGE = {"gpipe": ScheduleKind.GPIPE, "1f1b": ScheduleKind.ONE_F_ONE_B}
_MULTI_STAGE = {
    "interleaved1f1b": ScheduleKind.INTERLEAVED,
    "loopedbfs": ScheduleKind.BREADTH_FIRST,
    "zbvzerobubble": ScheduleKind.ZERO_BUBBLE_V,
    "dualpipev": ScheduleKind.DUAL_PIPE_V,
}
# How a run does the same: compared with what is exported, and no part of a plan's meaning.
WAYS = (
    "compile.enable",
    "debug.deterministic",
    "parallelism.pipeline_parallel_expert_parallel_overlap",
)
_TEXT = "text and its tokenizer, which no export names"
_SAVES = "when and where a state is saved, and taken up again"
_RECORDS = "what is recorded of a run"
# By pattern: what changes nothing of what is trained, and why.
_IDLE = {
    "training.dataset*": _TEXT,
    "training.dataloader.*": _TEXT,
    "model.hf_assets_path": _TEXT,
    "model.tokenizer_path": _TEXT,
    **dict.fromkeys((f"checkpoint.{name}" for name in ("enable", "folder", "interval", "load_step")), _SAVES),
    **dict.fromkeys(("checkpoint.keep_latest_k", "checkpoint.async_mode", "checkpoint.last_save_*"), _SAVES),
    "validation.*": "held-out loss, from which nothing is learned",
    "job.*": _RECORDS,
    "metrics.*": _RECORDS,
    "profiling.*": _RECORDS,
    "comm.*": "where processes meet, and how long they wait",
    "training.gc_*": "what the host does beside the step",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Degrees:
    replicate: int
    shard: int
    context: int
    tensor: int
    pipeline: int

    @property
    def fsdp(self) -> bool:
        return self.shard > 1 or self.context > 1


def read(text: str, *, where: str = "torchtitan") -> Reading:
    """What the job file `text` would train. Raises ConfigError for what torchtitan, or this reader, refuses.

    The processes are those of the torchrun line in a comment; without one, those of the degrees, none of them -1.
    """
    try:
        job = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(Problem(where=where, what="cannot be read as TOML", why=str(error))) from error
    table = _Table(job=job, where=where)
    launch = _LAUNCH.search(text)
    world = int(launch.group(1)) * int(launch.group(2)) if launch else None
    degrees = _degrees(table, world)
    model = _flavor(table)
    micro, microbatches, batch = _batches(table, degrees)
    stages, kind = _stages(table, degrees, model)
    sharding = _sharding(table, degrees)
    if degrees.fsdp or degrees.tensor * degrees.pipeline == 1:
        product = table.get("training", "mixed_precision_param", "bfloat16")
    else:
        product = table.get("training", "dtype", "float32")
    if table.get("training", "enable_cpu_offload", False):
        raise table.wrong("training.enable_cpu_offload moves more than a plan can say")
    if table.get("training", "mixed_precision_reduce", "float32") != "float32":
        raise table.wrong("training.mixed_precision_reduce is float32 and nothing else")
    meant = Meaning(
        devices=math.prod((degrees.replicate, degrees.shard, degrees.context, degrees.tensor, degrees.pipeline)),
        nodes=int(launch.group(1)) if launch else 1,
        pipeline=degrees.pipeline,
        replicate=degrees.replicate,
        shard=degrees.shard,
        context=degrees.context,
        tensor=degrees.tensor,
        sequence_parallel=degrees.tensor > 1,
        sharding=sharding,
        exchange="gather" if degrees.context > 1 else "none",
        expert_grid=_expert_grid(table, degrees) if model.mixture else (),
        dispatch="all_to_all" if model.mixture else "none",
        stages=stages,
        schedule=kind,
        chunks=len(stages) // degrees.pipeline,
        slices=1,
        sequence_length=table.size("training", "seq_len", 2048),
        microbatch=micro,
        microbatches=microbatches,
        batch=batch,
        recompute=(_recompute(table),) * model.layers,
        offload=(Offload.NONE,) * model.layers,
        precision=_precision(table, str(product)),
        gradients=Precision.FP32,
        seed=table.get("debug", "seed", None),
        model=model,
        optimizer=_optimizer(table),
    )
    return Reading(meaning=meant, rest=without(table.unread, _IDLE))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    job: Mapping[str, Any]
    where: str
    asked: set[str] = field(default_factory=set, compare=False)

    @property
    def unread(self) -> dict[str, str]:
        """What the file says and nobody has asked for, with its values."""
        return {name: json.dumps(value) for name, value in _flat("", self.job) if name not in self.asked}

    def get(self, section: str, name: str, default: Any) -> Any:
        self.asked.add(f"{section}.{name}")
        found: Any = self.job
        for part in section.split("."):
            found = found.get(part, {})
        return found.get(name, default)

    def size(self, section: str, name: str, default: int) -> int:
        value = self.get(section, name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(f"{section}.{name} {value} is not a size", "degrees should be 1 or more")
        most = MOST_LISTED if "pipeline" in name else MOST
        if value > most:
            raise self.wrong(f"{section}.{name} is more than {most:,}")
        return value

    def wrong(self, what: str, why: str = "") -> ConfigError:
        return ConfigError(Problem(where=self.where, what=what, why=why))


def _flat(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """`training.steps` and its value, for every value of the file."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


def _degrees(table: _Table, world: int | None) -> _Degrees:
    names = ("data_parallel_replicate", "context_parallel", "tensor_parallel", "pipeline_parallel")
    replicate, context, tensor, pipeline = (table.size("parallelism", f"{name}_degree", 1) for name in names)
    others = replicate * context * tensor * pipeline
    shard = table.get("parallelism", "data_parallel_shard_degree", -1)
    if shard == -1 and world is None:
        raise table.wrong(
            "parallelism.data_parallel_shard_degree -1 takes the ranks left, and no torchrun line says how many"
        )
    shard = (world or 0) // others if shard == -1 else table.size("parallelism", "data_parallel_shard_degree", 1)
    if world is not None and shard * others != world:
        raise table.wrong(f"the degrees multiply to {shard * others} and WORLD_SIZE is {world}")
    return _Degrees(replicate=replicate, shard=shard, context=context, tensor=tensor, pipeline=pipeline)


def _batches(table: _Table, degrees: _Degrees) -> tuple[int, int, int]:
    """Sequences of a microbatch, microbatches of a step, and sequences of a step."""
    local, data = table.size("training", "local_batch_size", 8), degrees.replicate * degrees.shard
    asked = table.get("training", "global_batch_size", -1)
    batch = local * data if asked < 0 else table.size("training", "global_batch_size", 1)
    if batch % (local * data):
        raise table.wrong(f"global batch size {batch} must be a multiple of {local} x {data} data ranks")
    rounds = batch // (local * data)
    if degrees.pipeline == 1:
        return local, rounds, batch
    micro = table.size("parallelism", "pipeline_parallel_microbatch_size", 1)
    if local % micro:
        raise table.wrong(f"local batch size {local} must be divisible by microbatch size {micro}")
    if rounds > 1:
        raise table.wrong(f"a step fills and drains its pipeline {rounds} times, and a plan does so once")
    return micro, local // micro, batch


def _stages(table: _Table, degrees: _Degrees, model: Sizes) -> tuple[tuple[tuple[int, int, int], ...], ScheduleKind]:
    """(rank, start, stop) of every stage in blocks, and the schedule."""
    pipeline = degrees.pipeline
    if pipeline == 1:
        return ((0, 0, model.layers + 2),), ScheduleKind.ONE_F_ONE_B
    if table.get("parallelism", "pipeline_parallel_schedule_csv", ""):
        raise table.wrong("parallelism.pipeline_parallel_schedule_csv is not read here")
    name = str(table.get("parallelism", "pipeline_parallel_schedule", "1F1B"))
    kind = (_SINGLE_STAGE | _MULTI_STAGE).get(name.lower())
    if kind is None:
        raise table.wrong(f"parallelism.pipeline_parallel_schedule {name} is not known")
    if table.get("model", "name", "llama3") == "qwen3":
        raise table.wrong("Pipeline Parallel is enabled but qwen3 does not support pipelining")
    parts = table.get("parallelism", "module_fqns_per_model_part", None)
    single = name.lower() in _SINGLE_STAGE
    counts = _counts(table, model, parts) if parts else _split(table, degrees, model, single=single)
    if len(counts) % pipeline or (single and len(counts) != pipeline):
        raise table.wrong(f"{len(counts)} stages do not suit {name} on {pipeline} ranks")
    loop = kind not in (ScheduleKind.ZERO_BUBBLE_V, ScheduleKind.DUAL_PIPE_V)
    if not loop and len(counts) != 2 * pipeline:
        raise table.wrong(f"v schedules assume 2 stages per rank, got {len(counts) // pipeline}")
    found, start = [], 0
    for index, count in enumerate(counts):
        rank = index % pipeline if loop else min(index, 2 * pipeline - 1 - index)
        found.append((rank, start, start + count))
        start += count
    return tuple(found), kind


def _counts(table: _Table, model: Sizes, parts: Sequence[Sequence[str]]) -> list[int]:
    """Blocks of each part; norm and output together are the head, and every module has its turn."""
    names = [name for part in parts for name in part]
    expected = ["tok_embeddings", *(f"layers.{index}" for index in range(model.layers)), "norm", "output"]
    if names != expected or parts[-1][-2:] not in (["norm", "output"],):
        raise table.wrong(
            "parallelism.module_fqns_per_model_part are not the modules of the model, each once, in order"
        )
    return [len(part) - (part[-1] == "output") for part in parts]


def _split(table: _Table, degrees: _Degrees, model: Sizes, *, single: bool) -> list[int]:
    """The split that torchtitan makes itself: layers dealt evenly, embedding and head weighing as many as told."""
    ends = [table.get("parallelism", f"pipeline_parallel_{end}_stage_less_layers", 1) for end in ("first", "last")]
    total, each = model.layers + sum(ends), table.get("parallelism", "pipeline_parallel_layers_per_stage", None)
    number = math.ceil(total / each) if each else degrees.pipeline * (1 if single else 2)
    base, more = divmod(total, number)
    if base == 0 or max(ends) > base:
        raise table.wrong(f"{model.layers} layers do not fill {number} stages")
    counts = [base + (index < more) for index in range(number)]
    counts[0] += 1 - ends[0]
    counts[-1] += 1 - ends[1]
    return counts


def _sharding(table: _Table, degrees: _Degrees) -> Sharding:
    """FSDP as a stage of ZeRO. Torch's pipeline runtime lets gradients meet after the last microbatch alone."""
    if not degrees.fsdp:
        if degrees.replicate > 1 and degrees.tensor * degrees.pipeline > 1:
            raise table.wrong("DDP has not supported > 1D parallelism")
        return Sharding.NONE
    policy = table.get("parallelism", "fsdp_reshard_after_forward", "default")
    if policy not in ("default", "always", "never"):
        raise table.wrong(f"parallelism.fsdp_reshard_after_forward {policy} is not known")
    if degrees.pipeline == 1:
        return Sharding.GRADIENTS if policy == "never" else Sharding.PARAMETERS
    if policy == "always":
        raise table.wrong("parameters gathered for every microbatch and gradients kept whole are no plan's sharding")
    return Sharding.OPTIMIZER


def _expert_grid(table: _Table, degrees: _Degrees) -> tuple[int, int]:
    expert = table.size("parallelism", "expert_parallel_degree", 1)
    tensor = table.size("parallelism", "expert_tensor_parallel_degree", 1)
    if expert == 1:
        return 1, degrees.tensor
    if tensor not in (1, degrees.tensor):
        raise table.wrong("Currently we only support ETP=TP or ETP=1")
    if (degrees.shard * degrees.context * degrees.tensor) % (expert * tensor):
        raise table.wrong(f"{expert} x {tensor} experts do not divide the ranks they live on")
    return expert, tensor


def _recompute(table: _Table) -> Recompute:
    mode = table.get("activation_checkpoint", "mode", "selective")
    if mode not in ("none", "full"):
        raise table.wrong(f"activation_checkpoint.mode {mode} is no recompute that a plan knows")
    return Recompute(mode)


def _precision(table: _Table, product: str) -> Precision:
    converters = table.get("model", "converters", [])
    if product not in ("bfloat16", "float32") or (converters and product != "bfloat16"):
        raise table.wrong(f"precision {product} with model.converters {converters} is none that a plan knows")
    for name in converters:
        recipe = table.get("quantize.linear.float8", "recipe_name", None) or "tensorwise"
        if name == "quantize.linear.mx":
            return Precision.MXFP8
        if name == "quantize.linear.float8" and recipe == "tensorwise":
            return Precision.FP8
        raise table.wrong(f"model.converters {name} is no precision that a plan knows")
    return Precision.BF16 if product == "bfloat16" else Precision.FP32


def _optimizer(table: _Table) -> Steps:
    steps = table.size("training", "steps", 10000)
    warmup = min(table.get("lr_scheduler", "warmup_steps", 200), steps)
    ratio = table.get("lr_scheduler", "decay_ratio", None)
    last = float(table.get("lr_scheduler", "min_lr_factor", 0.0))
    kind = str(table.get("lr_scheduler", "decay_type", "linear"))
    flat = last == 1.0 and kind == "linear" and ratio is None
    decay = "constant" if flat else "wsd" if kind == "linear" and ratio is not None else kind
    clip = float(table.get("training", "max_norm", 1.0))
    return Steps(
        kind=str(table.get("optimizer", "name", "AdamW")).lower(),
        learning_rate=float(table.get("optimizer", "lr", 8e-4)),
        beta1=float(table.get("optimizer", "beta1", 0.9)),
        beta2=float(table.get("optimizer", "beta2", 0.95)),
        epsilon=float(table.get("optimizer", "eps", 1e-8)),
        weight_decay=float(table.get("optimizer", "weight_decay", 0.1)),
        clip_norm=None if math.isinf(clip) else clip,
        decay=decay,
        warmup=warmup,
        decay_steps=round(steps * ratio) if ratio is not None else 0,
        final_fraction=last,
        steps=steps,
    )


def _flavor(table: _Table) -> Sizes:
    from meshwright.export.torchtitan_models import flavor

    name, kind = str(table.get("model", "name", "llama3")), str(table.get("model", "flavor", "debugmodel"))
    found = flavor(name, kind, sequence_length=table.size("training", "seq_len", 2048))
    if found is None:
        raise table.wrong(f"model.flavor {kind} of {name} is not known here")
    return found
