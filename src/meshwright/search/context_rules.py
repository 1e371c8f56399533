"""Rules of the context axis and of the grid of experts: what they divide must divide."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.schedule.build import SLICED
from meshwright.search.rules import Rule, Scope, choices, divisors, groups_of
from meshwright.search.tensor_degrees import tensor_heads
from meshwright.spec.errors import Problem
from meshwright.spec.model import Mixture, ModelSpec, Recurrence
from meshwright.spec.plan import Design, Offload, Sharding


def mixtures(model: ModelSpec) -> Iterator[Mixture]:
    """The mixtures of experts, a distinct one once."""
    seen = dict.fromkeys(layer.transform for layer in model.layers if isinstance(layer.transform, Mixture))
    yield from seen


def context_divides(design: Design) -> Problem | None:
    """Two runs of tokens for every context rank (one from either end balances a causal mask) make up the sequence."""
    context, length = design.plan.context, design.plan.sequence_length
    if context == 1 or length % (2 * context) == 0:
        return None
    legal = [size for size in divisors(length) if length % (2 * size) == 0 and size <= design.cluster.num_devices]
    what = f"2 x context {context} does not divide the sequence length {length:,}"
    return Problem(where="plan.axes", what=what, fix=choices(legal))


def exchange_divides(design: Design) -> Problem | None:
    """Ranks that trade tokens for heads divide the context axis, and the heads that the tensor axis leaves them."""
    plan, inner = design.plan, design.plan.exchange.inner
    if inner < 1 or plan.context % inner:
        what = f"{inner} ranks that trade heads do not divide a context axis of {plan.context}"
        return Problem(where="plan.exchange.inner", what=what, fix=choices(divisors(plan.context)))
    for heads in tensor_heads(design.model):
        left = heads // plan.tensor
        if left % inner:
            what = f"{inner} ranks that trade heads do not divide the {left} heads of a tensor rank"
            fix = choices(_divide_heads(design))
            if any(isinstance(layer.mixer, Recurrence) for layer in design.model.layers):
                fix += ", and a context axis of as many, which a recurrence needs"
            return Problem(where="plan.exchange.inner", what=what, fix=fix)
    return None


def _divide_heads(design: Design) -> list[int]:
    """Divisors of the context axis that divide the heads of a tensor rank in every layer."""
    heads = [count // design.plan.tensor for count in tensor_heads(design.model)]
    return [size for size in divisors(design.plan.context) if all(left % size == 0 for left in heads)]


def context_attends(design: Design) -> Problem | None:
    """Every layer can be divided along the sequence in the way that the plan exchanges it."""
    if design.plan.context == 1:
        return None
    for index, layer in enumerate(design.model.layers):
        if isinstance(layer.mixer, Recurrence) and design.plan.exchange.inner != design.plan.context:
            what = "a recurrence runs along the whole sequence, so context ranks must trade heads for it"
            context, legal = design.plan.context, _divide_heads(design)
            if context in legal:
                fix = f"choose {context}"
            else:
                what += f", and {context} of them do not divide the heads"
                fix = f"{choices(legal)}, and a context axis of as many"
            return Problem(where="plan.exchange.inner", what=what, why=f"model.layers[{index}].mixer", fix=fix)
    return None


def experts_divide(design: Design) -> Problem | None:
    """The grid of experts fits the ranks of a stage, and divides the experts and their features."""
    plan, grid = design.plan, design.plan.experts
    if grid is None:
        return None
    found = tuple(mixtures(design.model))
    if not found:
        return Problem(where="plan.experts", what="the model has no experts", fix="leave it out")
    ranks = plan.world_size // plan.pipeline
    if grid.expert < 1 or grid.tensor < 1 or ranks % (grid.expert * grid.tensor):
        what = f"expert {grid.expert} x tensor {grid.tensor} does not divide the {ranks} ranks of a stage"
        return Problem(where="plan.experts", what=what, fix=f"{choices(divisors(ranks))} in all")
    if plan.tensor > 1 and not all(group.sequence_parallel for _, group in groups_of(plan)):
        what = "tensor ranks hold the same tokens, and a grid of experts is sent different ones by each"
        return Problem(where="plan.experts", what=what, fix="choose sequence parallel")
    for part in found:
        if part.experts % grid.expert:
            what = f"{grid.expert} ranks do not divide {part.experts} experts"
            return Problem(where="plan.experts.expert", what=what, fix=choices(divisors(part.experts)))
        if part.hidden % grid.tensor:
            what = f"{grid.tensor} ranks do not divide the {part.hidden:,} features of an expert"
            return Problem(where="plan.experts.tensor", what=what, fix=choices(divisors(part.hidden)[:8]))
    return None


def offload_has_host(design: Design) -> Problem | None:
    """What is offloaded has a link to a host's memory that is known."""
    for where, group in groups_of(design.plan):
        for machines in design.cluster.groups:
            if group.offload is not Offload.NONE and machines.host is None:
                what = f"nothing is known of the link from {machines.name} to its host's memory"
                return Problem(where=f"{where}.offload", what=what, fix="choose none, or give cluster.groups.host")
    return None


def offload_has_shards(design: Design) -> Problem | None:
    """Parameters lie in the host's memory as the shards of zero3, all of them or none."""
    found = list(groups_of(design.plan))
    away = [group.offload is Offload.PARAMETERS for _, group in found]
    if not any(away):
        return None
    shared = design.plan.shard * design.plan.context > 1
    for where, group in found:
        if group.sharding is not Sharding.PARAMETERS or not shared or not all(away):
            what = "parameters in the host's memory that are not shards of zero3, in every block"
            return Problem(
                where=f"{where}.offload", what=what, fix="choose zero3 over more than one rank, or optimizer"
            )
    return None


def slices_divide(design: Design) -> Problem | None:
    """Slices of a microbatch are whole runs of tokens, and belong to the schedules that know them."""
    plan, schedule = design.plan, design.plan.schedule
    if schedule.slices < 1 or (schedule.slices > 1 and schedule.kind not in SLICED):
        what = f"{schedule.slices} slices under {schedule.kind.value}"
        return Problem(where="plan.schedule.slices", what=what, fix=f"choose 1, or {' or '.join(sorted(SLICED))}")
    if plan.sequence_length % schedule.slices:
        what = f"{schedule.slices} slices do not divide {plan.sequence_length:,} tokens"
        return Problem(where="plan.schedule.slices", what=what, fix=choices(divisors(plan.sequence_length)[:8]))
    return None


CONTEXT_RULES = (
    Rule(name="context-divides", scope=Scope.PLAN, check=context_divides),
    Rule(name="context-attends", scope=Scope.PLAN, check=context_attends),
    Rule(name="exchange-divides", scope=Scope.PLAN, check=exchange_divides),
    Rule(name="experts-divide", scope=Scope.PLAN, check=experts_divide),
    Rule(name="offload-has-host", scope=Scope.PLAN, check=offload_has_host),
    Rule(name="offload-has-shards", scope=Scope.PLAN, check=offload_has_shards),
    Rule(name="slices-divide", scope=Scope.PLAN, check=slices_divide),
)
