"""From a published run to the Design that it was, with what had to be assumed; or why there is none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn, TypeVar

from meshwright import schedule
from meshwright.catalog.decoders.shapes import GptStyle, LlamaStyle
from meshwright.replay.machines import cluster
from meshwright.replay.runs import Run
from meshwright.spec.cluster import ClusterSpec, Precision
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import DataSpec, JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import (
    Axis,
    AxisName,
    BlockGroup,
    Design,
    GradientSync,
    Plan,
    Recompute,
    Schedule,
    ScheduleKind,
    Sharding,
    Stage,
)

MEGATRON_VOCAB = 51200  # GPT-2's 50,257 tokens, padded as Megatron pads them
T = TypeVar("T")
_RECENT = ("megatron-core", "nemo/", "zero bubble")
_TORCH = {"composer": "torch-2023", "fsdp1": "torch-2024", "torchtitan": "torch-2024", "fsdp": "torch"}
_MEGATRON = ("megatron", "nemo", "internevo", "deepspeed 3d")


class InexpressibleError(Exception):
    """No Design says what the run was; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expressed:
    """The design of one run, and in words what its source left open."""

    design: Design
    assumed: tuple[str, ...]


def express(run: Run) -> Expressed:
    """The design that `run` was. Raises InexpressibleError."""
    return _Reader(run).expressed()


@dataclass(slots=True)
class _Reader:
    run: Run
    assumed: list[str] = field(default_factory=list)

    def expressed(self) -> Expressed:
        if self.run.faults:
            _refuse("; ".join(self.run.faults))
        machines = cluster(self.run)
        if isinstance(machines, str):
            _refuse(machines)
        try:
            model = self._model()
            plan, software = self._plan(model, machines), self._software()
        except ConfigError as error:
            _refuse("; ".join(map(str, error.problems)))
        job = JobSpec(
            sequence_length=plan.sequence_length,
            batch_tokens=plan.batch_tokens,
            precision=plan.first_group.precision,
            data=DataSpec(document_mask=False),
            software=software,
        )
        design = Design(model=model, cluster=machines, job=job, plan=plan)
        return Expressed(design=design, assumed=tuple(self.assumed))

    def _model(self) -> ModelSpec:
        kind = self.run.text("arch")
        if kind not in ("gpt", "llama"):
            _refuse(f"models of the kind {kind or '(blank)'} are not rebuilt from these columns yet")
        layers, width = self._need("layers"), self._need("hidden")
        head_dim = self.run.whole("head_dim")
        heads = self.run.whole("heads") or self._assume("heads of 64 features", width // (head_dim or 64))
        vocab = self.run.whole("vocab") or self._assume(f"a vocabulary of {MEGATRON_VOCAB}", MEGATRON_VOCAB)
        hidden, positions = self.run.whole("ffn"), self._need("seq")
        name = self.run.text("model") or self.run.id
        kv_heads = self.run.whole("kv_heads")
        if kind == "llama" and self.run.is_yes("gated") is False:
            _refuse("a llama whose feed-forward is not gated")
        if width % heads and head_dim is None:
            _refuse(f"{heads} heads do not divide a width of {width}")
        if kind == "gpt" and not self.run.is_yes("gated"):
            return GptStyle(
                name=name,
                layers=layers,
                width=width,
                heads=heads,
                kv_heads=kv_heads,
                hidden=hidden,
                vocab=vocab,
                positions=positions,
            ).build()
        return LlamaStyle(
            name=name,
            layers=layers,
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            hidden=hidden or self._assume("a gated feed-forward of 8/3 of the width", _multiple(8 * width // 3)),
            vocab=vocab,
            max_positions=positions,
        ).build()

    def _plan(self, model: ModelSpec, machines: ClusterSpec) -> Plan:
        run = self.run
        self._plain()
        tensor, pipeline = run.whole("tp") or 1, run.whole("pp") or 1
        devices = self._need("n_gpus")
        data = run.whole("dp") or devices // (tensor * pipeline)
        if tensor * pipeline * data != devices:
            _refuse(f"tp {tensor} x pp {pipeline} x dp {data} is not {devices} devices")
        microbatch, microbatches = self._batch(data)
        heads = self.run.whole("heads")
        if heads and heads % tensor:
            _refuse(f"{tensor} tensor ranks do not divide {heads} heads")
        kind, chunks = self._schedule(pipeline)
        problems = schedule.problems(kind, pipeline=pipeline, chunks=chunks, microbatches=microbatches)
        if problems:
            _refuse("; ".join(map(str, problems)))
        sharding, shard = self._sharding(data, machines)
        settings = BlockGroup(
            start=0,
            stop=1,
            tensor=tensor,
            sequence_parallel=tensor > 1 and self._sequence_parallel(),
            sharding=sharding,
            recompute=self._recompute(),
            precision=self._precision(machines),
        )
        edges = self._edges(len(model.layers), pipeline * chunks)
        sizes = {
            AxisName.PIPELINE: pipeline,
            AxisName.REPLICATE: data // shard,
            AxisName.SHARD: shard,
            AxisName.TENSOR: tensor,
        }
        return Plan(
            model=model.name,
            cluster=machines.name,
            axes=tuple(Axis(name=name, size=size) for name, size in sizes.items()),
            stages=_stages(edges, pipeline, settings),
            schedule=Schedule(kind=kind, microbatches=microbatches, chunks=chunks),
            sequence_length=self._need("seq"),
            microbatch=microbatch,
            gradients=GradientSync(precision=_gradients(settings.precision)),
        )

    def _plain(self) -> None:
        """Refuses what no plan of ours says yet."""
        run = self.run
        for name, what in (("cp", "context parallel"), ("ep", "expert parallel"), ("etp", "expert tensor parallel")):
            if (run.whole(name) or 1) > 1:
                _refuse(f"{what} plans cannot be said yet")
        if run.text("offload") not in ("", "no"):
            _refuse(f"offload ({run.text('offload')}) cannot be said yet")
        if run.text("precision") in ("mxfp8", "nvfp4", "fp8-blockwise128"):
            _refuse(f"the recipe {run.text('precision')} is not priced yet")

    def _batch(self, data: int) -> tuple[int, int]:
        """Sequences of a microbatch, and microbatches of a data rank."""
        batch, microbatch, steps = self._need("gbs"), self.run.whole("mbs"), self.run.whole("ga")
        if microbatch is None and steps is None:
            _refuse("neither microbatch nor accumulation is printed")
        if microbatch is None:
            microbatch = batch // (data * (steps or 1))
        if not microbatch or batch % (data * microbatch):
            _refuse(f"a batch of {batch} is not whole microbatches of {microbatch} on {data} data ranks")
        count = batch // (data * microbatch)
        if steps is not None and steps != count:
            _refuse(
                f"{steps} accumulation steps, and {batch} sequences on {data} data ranks by {microbatch} are {count}"
            )
        return microbatch, count

    def _schedule(self, pipeline: int) -> tuple[ScheduleKind, int]:
        name, chunks = self.run.text("schedule"), self.run.whole("vpp") or 1
        if name not in ("", "1f1b", "gpipe", "interleaved-1f1b"):
            _refuse(f"the schedule {name} is not played yet")
        if pipeline == 1:
            return ScheduleKind.ONE_F_ONE_B, 1
        if chunks > 1 and name == "gpipe":
            _refuse(f"gpipe of {chunks} chunks")
        if chunks > 1:
            return ScheduleKind.INTERLEAVED, chunks
        if name == "interleaved-1f1b":
            _refuse("an interleaved schedule without its number of chunks")
        return ScheduleKind.GPIPE if name == "gpipe" else ScheduleKind.ONE_F_ONE_B, 1

    def _sharding(self, data: int, machines: ClusterSpec) -> tuple[Sharding, int]:
        """What is sharded, and over how many of the data ranks."""
        text = self.run.text("zero")
        known = {"": Sharding.NONE, "0": Sharding.NONE, "1": Sharding.OPTIMIZER, "2": Sharding.GRADIENTS}
        known |= {"3": Sharding.PARAMETERS, "hsdp": Sharding.PARAMETERS}
        if text not in known:
            _refuse(f"zero {text} is not known")
        if known[text] is Sharding.NONE or data == 1:
            return Sharding.NONE, 1
        shard = data
        if text == "hsdp":
            shard = machines.groups[0].devices_per_node
        if group := re.search(r"zero1 group=([1-9]\d*)", self.run.text("extra")):
            shard = int(group[1])
        if data % shard:
            _refuse(f"{data} data ranks are not whole shard groups of {shard}")
        return known[text], shard

    def _sequence_parallel(self) -> bool:
        said = self.run.is_yes("sp")
        if said is not None:
            return said
        recent = self._framework_has(_RECENT)
        return self._assume("sequence parallel on" if recent else "sequence parallel off", recent)

    def _recompute(self) -> Recompute:
        text = self.run.text("recompute").split(" ")[0]
        if not text:
            return self._assume("no recompute", Recompute.NONE)
        if text not in set(Recompute):
            _refuse(f"recompute {text} is not known")
        return Recompute(text)

    def _precision(self, machines: ClusterSpec) -> Precision:
        text = self.run.text("precision")
        peaks = machines.groups[0].device.peak_flops
        if text in ("fp8", "fp8-cs"):
            return Precision.FP8
        if text:
            return Precision(text) if text in set(Precision) else _refuse(f"precision {text} is not known")
        recent = self._framework_has((*_RECENT, *_TORCH)) and Precision.BF16 in peaks
        found = Precision.BF16 if recent else Precision.FP16
        return self._assume(found.value, found)

    def _software(self) -> str:
        framework = self.run.text("framework").lower()
        for name, software in _TORCH.items():
            if name in framework:
                return software
        if not self._framework_has(_MEGATRON):
            _refuse(f"no model of the software {self.run.text('framework')}")
        flash = self.run.is_yes("flash")
        if flash is None:
            recent = self._framework_has(_RECENT)
            flash = self._assume("fused attention" if recent else "attention not fused", recent)
        if not flash:
            return "megatron-2021"
        return "megatron-core" if self._framework_has(_RECENT) else "megatron-flash"

    def _framework_has(self, names: Sequence[str]) -> bool:
        framework = self.run.text("framework").lower()
        return any(name in framework for name in names)

    def _edges(self, layers: int, stages: int) -> list[int]:
        """Bounds of the stages in blocks; layers as equal as can be where the source does not say."""
        extra = self.run.text("extra")
        fewer = stages > 1 and "first and last stage have one layer fewer" in extra
        if stages > layers + (2 if fewer else 0):
            _refuse(f"{layers} layers do not fill {stages} stages")
        if fewer:
            return _even(layers, stages, fewer_at_ends=True)
        if stages > 1 and layers % stages:
            self.assumed.append("layers as equal as can be over the stages")
        return _even(layers, stages, fewer_at_ends=False)

    def _need(self, name: str) -> int:
        return self.run.whole(name) or _refuse(f"{name} is not printed")

    def _assume(self, what: str, value: T) -> T:
        self.assumed.append(what)
        return value


def _even(layers: int, stages: int, *, fewer_at_ends: bool) -> list[int]:
    """Blocks before each stage: the embedding is of the first and the head of the last."""
    total = layers + (2 if fewer_at_ends else 0)
    bounds = [0]
    for stage in range(stages):
        held = total // stages + (stage < total % stages)
        held += 0 if fewer_at_ends else (stage == 0) + (stage == stages - 1)
        bounds.append(bounds[-1] + held)
    return bounds


def _stages(edges: Sequence[int], pipeline: int, settings: BlockGroup) -> tuple[Stage, ...]:
    return tuple(
        Stage(rank=index % pipeline, groups=(replace(settings, start=edges[index], stop=edges[index + 1]),))
        for index in range(len(edges) - 1)
    )


def _gradients(precision: Precision) -> Precision:
    """Stacks of fp16 add and reduce gradients as they are; those of bf16 and fp8 in fp32."""
    return Precision.FP16 if precision is Precision.FP16 else Precision.FP32


def _multiple(value: int, of: int = 256) -> int:
    return -(-value // of) * of


def _refuse(reason: str) -> NoReturn:
    raise InexpressibleError(reason)
