"""A plan in one line of words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.spec.exchange import exchange_words
from meshwright.spec.group_words import words_of
from meshwright.spec.placement_words import placement_words
from meshwright.spec.units import counted

if TYPE_CHECKING:
    from meshwright.spec.plan import Plan


def plan_words(plan: Plan) -> str:
    """`4 devices: pipeline 2 x shard 2 (zero3), 1f1b, 8 microbatches of 1`."""
    group = plan.first_group
    parts = [f"{axis.name.value} {axis.size}" for axis in plan.axes if axis.size > 1]
    extra = words_of(plan.groups, "sharding")
    extra += [f"tensor {plan.tensor_grid.value}"] if plan.tensor_grid != "line" else []
    extra += ["sequence parallel"] if group.sequence_parallel else []
    extra += [f"recompute {words}" for words in words_of(plan.groups, "recompute")]
    extra += [f"{group.offload.value} offloaded"] if group.offload != "none" else []
    extra += [group.precision.value]
    frozen = sum(group.stop - group.start for group in plan.groups if group.training == "frozen")
    extra += [f"{frozen} blocks frozen"] if frozen else []
    if plan.gradients.is_special:
        extra.append(plan.gradients.words)
    if plan.context > 1:
        extra.append(exchange_words(plan.exchange, plan.context))
    if plan.experts is not None:
        gathered = ", tokens gathered" if plan.experts.dispatch == "all_gather" else ""
        extra.append(f"experts {plan.experts.expert} x tensor {plan.experts.tensor}{gathered}")
    cut = plan.pipeline > 1 or plan.schedule.chunks > 1 or plan.schedule.slices > 1
    schedule = f"{plan.schedule.kind.value}, " if cut else ""
    chunks = f"{plan.schedule.chunks} chunks, " if plan.schedule.chunks > 1 else ""
    chunks += f"{plan.schedule.slices} slices, " if plan.schedule.slices > 1 else ""
    chunks += f"{100 * plan.skipped_share:.0f} % of the layers left out, " if plan.schedule.paths else ""
    layout = " x ".join(parts) or "one device"
    layout += "" if plan.has_usual_order else " from the outermost inwards"
    layout += f" on devices {placement_words(plan.placement)}" if plan.placement and plan.is_placed else ""
    devices = counted(plan.world_size, "device")
    count = plan.schedule.microbatches
    steps = f"{count} microbatch{'' if count == 1 else 'es'} of {plan.microbatch}"
    steps += f", {plan.empty_rows} row{'s' * (plan.empty_rows > 1)} empty" if plan.empty_rows else ""
    return f"{devices}: {layout} ({', '.join(extra)}), {schedule}{chunks}{steps}"
