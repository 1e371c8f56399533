"""From a published run to the Design that it was, with what had to be assumed; or why there is none."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NoReturn, TypeVar

from meshwright import catalog, schedule
from meshwright.replay import words
from meshwright.replay.alternatives import alternatives, smaller
from meshwright.replay.exchanges import exchange_of
from meshwright.replay.machines import Machines, machines_of, multiplying_int8
from meshwright.replay.models import InexpressibleError, model_of, predicts_two
from meshwright.replay.runs import Run
from meshwright.replay.stacks import EIGHT_BIT, Stack
from meshwright.replay.stages import between, even, filled, stages
from meshwright.spec.cluster import ClusterSpec, DeviceKind, Precision
from meshwright.spec.codec import nearest
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import DataSpec, JobSpec, Switch
from meshwright.spec.model import Mixture, ModelSpec
from meshwright.spec.plan import (
    Axis,
    AxisName,
    BlockGroup,
    Design,
    ExpertGrid,
    Offload,
    Plan,
    Recompute,
    Schedule,
    ScheduleKind,
    Sharding,
)
from meshwright.spec.synchronize import GradientSync

T = TypeVar("T")
_STAGE_LAYERS = re.compile(r"(?:stage_layers|pp_layers|layers per stage)\s*[=:]?\s*\[?\s*(\d+(?:\s*[+,]\s*\d+)+)")
_LAYERS_AGAIN = re.compile(r"\b(\d+)(?:\s*(?:of|/)\s*\d+)?\s*layers?\b|\bblock\D{0,3}(\d+)")
_FREE = frozenset({"layernorm", "moe_act"})  # whose second run takes no product
_MODULES = re.compile(r"layer boundaries\s*=\s*\[\s*(\d+(?:\s*,\s*\d+)+)\s*\]")
_SCHEDULES = {
    "": ScheduleKind.ONE_F_ONE_B,
    "1f1b": ScheduleKind.ONE_F_ONE_B,
    "interleaved-1f1b": ScheduleKind.INTERLEAVED,
    "zb-1p": ScheduleKind.ZERO_BUBBLE_H1,
    "zb-2p": ScheduleKind.ZERO_BUBBLE_H2,
    "zbv": ScheduleKind.ZERO_BUBBLE_V,
    "dualpipev": ScheduleKind.DUAL_PIPE_V,
    "dualpipe": ScheduleKind.DUAL_PIPE_V,
    **{kind.value: kind for kind in schedule.NAMED},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expressed:
    """The design of one run, and in words what its source left open.

    `others` are the same with other microbatches and stages on a rank, where none are printed, and `smaller` all of
    them with less in the device's memory, where recompute is not.
    """

    design: Design
    assumed: tuple[str, ...]
    others: tuple[Design, ...] = ()
    smaller: tuple[Design, ...] = ()


def express(run: Run) -> Expressed:
    """The design that `run` was. Raises InexpressibleError."""
    return _Reader(run).expressed()


@dataclass(slots=True)
class _Reader:
    run: Run
    assumed: list[str] = field(default_factory=list)
    open: bool = False
    loops: bool = False
    stack: Stack = field(init=False)

    def expressed(self) -> Expressed:
        if self.run.faults:
            _refuse("; ".join(self.run.faults))
        if "task=lora" in self.run.text("extra"):
            _refuse("adapters alone were trained (LoRA)")
        machines = machines_of(self.run, assumed=self.assumed)
        if not isinstance(machines, str) and words.precision(self.run.text("precision")) == Precision.INT8:
            machines = multiplying_int8(machines, assumed=self.assumed)
        if isinstance(machines, str):
            _refuse(machines)
        self.stack = Stack(self.run, machines.spec.groups[0].device, assumed=self.assumed)
        try:
            model = self._padded(model_of(self.run, assumed=self.assumed))
            plan, software = self._exchanged(self._plan(model, machines), model), self.stack.name()
        except ConfigError as error:
            _refuse("; ".join(map(str, error.problems)))
        job = JobSpec(
            sequence_length=plan.sequence_length,
            batch_tokens=plan.batch_tokens,
            precision=plan.first_group.precision,
            data=DataSpec(document_mask=False),
            software=software,
            optimizer=self.stack.optimizer(),
            compile=Switch.ON if self.stack.compiles() else Switch.OFF,
        )
        design = Design(model=model, cluster=machines.spec, job=job, plan=plan)
        others = alternatives(design, microbatches=self.open, chunks=self._unsaid_chunks())
        return Expressed(
            design=design,
            assumed=tuple(self.assumed),
            others=others,
            smaller=() if self.run.text("recompute") else smaller((design, *others), some=self.stack.counts_again),
        )

    def _padded(self, model: ModelSpec) -> ModelSpec:
        """With the rows that the stack adds to the vocabulary, so that tensor ranks share it in whole cache lines."""
        rows = self.stack.vocabulary_rows * (self.run.whole("tp") or 1)
        return catalog.with_vocab(model, vocab=-(-model.vocab // rows) * rows)

    def _plan(self, model: ModelSpec, used: Machines) -> Plan:
        run = self.run
        tensor, pipeline, context = (run.whole(name) or 1 for name in ("tp", "pp", "cp"))
        devices, machines = used.devices, used.spec
        data = run.whole("dp") or devices // (tensor * pipeline * context)
        if tensor * pipeline * context * data != devices:
            said = f"tp {tensor} x pp {pipeline} x cp {context}"
            of_data = f" x dp {data} is not" if run.whole("dp") else " does not divide"
            _refuse(f"{said}{of_data} {devices} devices")
        microbatch, microbatches = self._batch(data)
        heads = self.run.whole("heads")
        if heads and heads % tensor:
            _refuse(f"{tensor} tensor ranks do not divide {heads} heads")
        kind, chunks = self._schedule(pipeline)
        problems = schedule.problems(kind, pipeline=pipeline, chunks=chunks, microbatches=microbatches)
        if problems:
            _refuse("; ".join(map(str, problems)))
        sharding, shard = self._sharding(data, context, machines)
        if sharding in (Sharding.GRADIENTS, Sharding.PARAMETERS) and pipeline > 1:
            # torchtitan (reshard_after_forward in its models/llama3/infra/parallelize.py), NeMo AutoModel and Llama 3
            # (2407.21783, 3.3.2) do so; DeepSpeed has no pipelines with these. A gather a microbatch has no use there.
            sharding = self._assume("parameters gathered and gradients reduced once a step", Sharding.OPTIMIZER)
        settings = BlockGroup(
            start=0,
            stop=1,
            tensor=tensor,
            sequence_parallel=tensor > 1 and self._sequence_parallel(),
            sharding=sharding,
            recompute=self._recompute(),
            offload=self._offload(),
            precision=self._precision(),
        )
        edges = self._edges(len(model.layers), pipeline * chunks)
        ranks = [schedule.stage_rank(kind, i, pipeline=pipeline, chunks=chunks) for i in range(pipeline * chunks)]
        sizes = {
            AxisName.PIPELINE: pipeline,
            AxisName.REPLICATE: data // shard,
            AxisName.SHARD: shard,
            AxisName.CONTEXT: context,
            AxisName.TENSOR: tensor,
        }
        return Plan(
            model=model.name,
            cluster=machines.name,
            axes=tuple(Axis(name=name, size=size) for name, size in sizes.items()),
            stages=stages(edges, settings, ranks=ranks, layers_away=self._layers_away(), again=self._layers_again()),
            experts=self._experts(model, tensor=tensor, ranks=devices // pipeline),
            schedule=Schedule(kind=kind, microbatches=microbatches, chunks=chunks),
            sequence_length=self.run.lengths.encoder or _refuse("seq is not printed"),
            microbatch=microbatch,
            gradients=GradientSync(precision=self.stack.gradients(settings.precision)),
        )

    def _exchanged(self, plan: Plan, model: ModelSpec) -> Plan:
        """With the way in which its context ranks meet each other's keys and values."""
        found = exchange_of(self.run, model, context=plan.context, tensor=plan.tensor, assumed=self.assumed)
        return replace(plan, exchange=found)

    def _experts(self, model: ModelSpec, *, tensor: int, ranks: int) -> ExpertGrid | None:
        """The grid of experts; None where every tensor rank holds a slice of every expert."""
        mixture = next((layer.transform for layer in model.layers if isinstance(layer.transform, Mixture)), None)
        expert, slices = self.run.whole("ep") or 1, self.run.whole("etp")
        if mixture is None and expert > 1:
            _refuse(f"ep {expert} of a model without experts; print n_experts, or leave ep blank")
        if mixture is None or (expert == 1 and slices in (None, tensor)):
            return None
        if slices is None and tensor > 1 and self.stack.is_tuned:
            slices = self._assume("experts not divided over tensor ranks, as in the stack's own recipes", 1)
        elif slices is None:
            slices = self._assume("experts divided as the rest is, Megatron's default", tensor) if tensor > 1 else 1
        if ranks % (expert * slices) or mixture.experts % expert:
            _refuse(
                f"ep {expert} x etp {slices} does not divide {ranks} ranks of a stage and {mixture.experts} experts"
            )
        return ExpertGrid(expert=expert, tensor=slices)

    def _offload(self) -> Offload:
        text = self.run.text("offload")
        said, *besides = words.offloads(text)
        if said not in set(Offload):
            _refuse(f"offload {text} is not known; {nearest(said, (kind.value for kind in Offload))}")
        if besides:
            self.assumed.append(f"{said} alone in the host's memory: a plan holds no {' and '.join(besides)} there too")
        again = words.recompute(self.run.text("recompute")) == Recompute.FULL
        if Offload(said) is Offload.NONE and self.stack.keeps_checkpoints_away and again:
            return self._assume(
                "what enters layers in the host's memory, as in the stack's own scripts", Offload.ACTIVATIONS
            )
        return Offload(said)

    def _layers_away(self) -> int | None:
        """Of how many layers of a stage, the first ones, activations are offloaded; None where it is all of them."""
        if words.offloads(self.run.text("offload"))[0] != Offload.ACTIVATIONS:
            return None
        said = re.search(r"act\D*(\d+)\D*layer", self.run.text("offload").lower())
        return int(said[1]) if said else None

    def _layers_again(self) -> int | None:
        """How many layers of a stage, the first ones, are computed again; None where it is all of them."""
        said = _LAYERS_AGAIN.search(self.run.text("recompute").lower())
        return int(said[1] or said[2]) if said else None

    def _batch(self, data: int) -> tuple[int, int]:
        """Sequences of a microbatch, and microbatches of a data rank."""
        microbatch, steps = self.run.whole("mbs"), self.run.whole("ga")
        batch = self.run.batch or _refuse("gbs is not printed")
        if self.run.steps_once:
            self.assumed.append("one microbatch a step: neither gbs nor ga is printed")
        if microbatch is None and steps is None:
            self.open = True
            microbatch = self._assume("the microbatch that is predicted fastest", 1)
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
        chunks = self.run.whole("vpp") or 1
        name = words.pipeline_schedule(self.run.text("schedule")) or self.stack.usual_schedule
        if name not in _SCHEDULES:
            _refuse(f"the schedule {name} is not known; {nearest(name, filter(None, _SCHEDULES))}")
        if name == "dualpipe":
            self.assumed.append("DualPipe taken to be DualPipeV, which holds parameters once")
        kind = _SCHEDULES[name]
        if pipeline == 1:
            return ScheduleKind.ONE_F_ONE_B, 1
        if self.open and not name and self.run.whole("vpp") is None and self.stack.interleaves:
            self.assumed.append("one stage on a rank or several, whatever is predicted fastest")
            self.loops = True
        if kind is ScheduleKind.INTERLEAVED and chunks == 1:
            kind = self._assume("as many stages on a rank as are predicted fastest", ScheduleKind.ONE_F_ONE_B)
            self.loops = True
        if chunks > 1 and kind is ScheduleKind.ONE_F_ONE_B:
            return ScheduleKind.INTERLEAVED, chunks
        return kind, 2 if kind in (ScheduleKind.ZERO_BUBBLE_V, ScheduleKind.DUAL_PIPE_V) else chunks

    def _unsaid_chunks(self) -> bool:
        """Whether the table says that its source keeps the number of stages on a rank to itself."""
        told = f"{self.run.text('extra')}; {self.run.text('notes')}"
        return self.loops or bool(re.search(r"\bvpp\b[^;]*not printed", told))

    def _sharding(self, data: int, context: int, machines: ClusterSpec) -> tuple[Sharding, int]:
        """What is sharded, and over how many of the data ranks, each with its `context` ranks."""
        text = words.sharding(self.run.text("zero"))
        if not text and re.search(r"\bfsdp=\d", self.run.text("extra").lower()):
            text = "3"
        framework = self.run.text("framework")
        if not text and data * context > 1 and (named := words.named_sharding(framework)):
            text = self._assume(f"zero {named}, as zero is blank and the framework is called {framework}", named)
        if not text and data * context > 1 and self.stack.is_recent:
            text = self._assume("optimizer state sharded", "1")
        known = {"": Sharding.NONE, "0": Sharding.NONE, "1": Sharding.OPTIMIZER, "2": Sharding.GRADIENTS}
        known |= {"3": Sharding.PARAMETERS, "hsdp": Sharding.PARAMETERS}
        if text not in known:
            _refuse(f"zero {text} is not known; {nearest(text, filter(None, known))}")
        if known[text] is Sharding.NONE or data * context == 1:
            return Sharding.NONE, 1
        shard = data
        if text == "3" and self.stack.copies_slices and _slice_of(machines) < machines.groups[0].num_devices:
            text = self._assume("parameters divided in a slice and whole in every other, as MaxText has it", "hsdp")
        if text == "hsdp":
            shard = self._shard_in_domain(machines)
        if group := re.search(r"(?:zero1 group|\bfsdp)=([1-9]\d*)", self.run.text("extra").lower()):
            shard = int(group[1])
        if data % shard:
            _refuse(f"{data} data ranks are not whole shard groups of {shard}")
        return known[text], shard

    def _shard_in_domain(self, machines: ClusterSpec) -> int:
        """Data ranks over which hybrid sharding divides: those of a node, and of a whole slice of TPUs."""
        if machines.groups[0].device.kind is not DeviceKind.TPU:
            return machines.groups[0].devices_per_node
        others = (self.run.whole("tp") or 1) * (self.run.whole("cp") or 1) * (self.run.whole("pp") or 1)
        return max(1, _slice_of(machines) // others)

    def _sequence_parallel(self) -> bool:
        said = self.run.is_yes("sp")
        if said is not None:
            return said
        divides = self.stack.divides_sequences
        return self._assume("sequence parallel on" if divides else "sequence parallel off", divides)

    def _recompute(self) -> Recompute:
        text = words.recompute(self.run.text("recompute"))
        modules = self.stack.modules.split("+") if self.stack.modules else []
        if modules and "core_attn" not in modules:
            if not _FREE.isdisjoint(modules):
                self.assumed.append("norms and activations computed again for nothing")
            return Recompute.SELECTIVE
        if not text and self.stack.recomputes:
            return self._assume("every layer computed again, as in the stack's own scripts", Recompute.FULL)
        if not text:
            return self._assume("no recompute where that can fit", Recompute.NONE)
        if text not in set(Recompute):
            _refuse(f"recompute {text} is not known; {nearest(text, (kind.value for kind in Recompute))}")
        return Recompute(text)

    def _precision(self) -> Precision:
        text = words.precision(self.run.text("precision"))
        if text == Precision.FP8 and "rowwise" in self.run.text("extra").lower():
            return Precision.FP8_ROW
        if text == Precision.INT8:
            return Precision.FP8_ROW
        if text in EIGHT_BIT:
            return EIGHT_BIT[text]
        if text:
            if text not in set(Precision):
                _refuse(
                    f"precision {text} is not known; {nearest(text, (*(kind.value for kind in Precision), *EIGHT_BIT))}"
                )
            return Precision(text)
        found = Precision.BF16 if self.stack.defaults_to_bf16 else Precision.FP16
        return self._assume(found.value, found)

    def _edges(self, layers: int, stages: int) -> list[int]:
        """Bounds of the stages in blocks; layers as equal as can be where the source does not say."""
        extra = self.run.text("extra")
        if said := _STAGE_LAYERS.search(extra):
            return self._said_edges([int(count) for count in re.split(r"\s*[+,]\s*", said[1])], layers, stages)
        if said := _MODULES.search(extra):
            return self._said_edges(between([int(bound) for bound in said[1].split(",")], layers), layers, stages)
        if predicts_two(self.run) and stages > 1:
            return self._assume("full stages first, as in recipes with multi-token prediction", filled(layers, stages))
        fewer = stages > 1 and "first and last stage have one layer fewer" in extra
        alike = layers % stages > 0 and (layers + 2) % stages == 0
        if stages > 2 and (layers < stages <= layers + 2 or alike):
            fewer = self._assume("one layer fewer in the first stage and the last", True)
        if stages > layers + (2 if fewer else 0):
            _refuse(f"{layers} layers do not fill {stages} stages")
        if fewer:
            return even(layers, stages, fewer_at_ends=True)
        if stages > 1 and layers % stages:
            self.assumed.append("layers as equal as can be over the stages")
        return even(layers, stages, fewer_at_ends=False)

    def _said_edges(self, each: list[int], layers: int, stages: int) -> list[int]:
        """As `_edges`, with so many layers in `each` stage, beside those of a module that predicts one token more."""
        each = [*each[:-1], each[-1] + predicts_two(self.run)]
        if len(each) != stages or sum(each) != layers:
            _refuse(f"{' + '.join(map(str, each))} layers are not {layers} in {stages} stages")
        bounds = [0, *(1 + upto for upto in accumulate(each))]
        return [*bounds[:-1], bounds[-1] + 1]

    def _need(self, name: str) -> int:
        return self.run.whole(name) or _refuse(f"{name} is not printed")

    def _assume(self, what: str, value: T) -> T:
        self.assumed.append(what)
        return value


def _slice_of(machines: ClusterSpec) -> int:
    """Devices that one torus joins, as far as there are so many."""
    group = machines.groups[0]
    return min(group.rack_nodes or group.num_nodes, group.num_nodes) * group.devices_per_node


def _refuse(reason: str) -> NoReturn:
    raise InexpressibleError(reason)
