"""Rules of the order of mesh axes: which orders have a cost that is known, and which of them the runtime lays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from meshwright.cost.placement import site_edges
from meshwright.search.rules import Rule, Scope
from meshwright.spec.cluster import ClusterSpec, DeviceKind
from meshwright.spec.errors import Problem
from meshwright.spec.plan import AxisName, Design

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def axes_order(design: Design) -> Problem | None:
    """Pipeline is outermost and tensor innermost, or another order fills nodes so evenly that its cost is known."""
    plan = design.plan
    if plan.has_usual_order:
        return None
    sizes, steps, step = dict.fromkeys(AxisName, 1), dict.fromkeys(AxisName, 1), 1
    for axis in reversed(plan.axes):
        sizes[axis.name], steps[axis.name] = max(axis.size, 1), step
        step *= max(axis.size, 1)
    broken = uneven(
        {name: np.array([size]) for name, size in sizes.items()},
        {name: np.array([distance]) for name, distance in steps.items()},
        on_grid=np.array([plan.experts is not None]),
        cluster=design.cluster,
    )
    why = [reason for reason, rows in broken.items() if rows.any()]
    if not why:
        return None
    what = f"what the order {_named(design)} costs is not known"
    fix = f"order them {', '.join(name.value for name in AxisName)}"
    return Problem(where="plan.axes", what=what, why="; ".join(why), fix=fix)


def order_laid(design: Design) -> Problem | None:
    """The runtime lays the axes in this order."""
    if is_trained([axis.name for axis in design.plan.axes if axis.size > 1]):
        return None
    what = f"axes in the order {_named(design)} can be predicted and not trained yet"
    fix = "choose replicate, shard, context in this order; pipeline and tensor may be anywhere"
    return Problem(where="plan.axes", what=what, fix=fix)


def _named(design: Design) -> str:
    return ", ".join(axis.name.value for axis in design.plan.axes if axis.size > 1)


def is_trained(order: Sequence[AxisName]) -> bool:
    """Whether the runtime lays axes in `order`: those that parameters are the same or divided over as usual, since
    torch slices meshes in the order of their dims and numbers the ranks of a group in ascending order, others anywhere.
    """
    divided = (AxisName.REPLICATE, AxisName.SHARD, AxisName.CONTEXT)
    return [name for name in order if name in divided] == [name for name in divided if name in order]


def uneven(
    sizes: Mapping[AxisName, Ids], steps: Mapping[AxisName, Ids], *, on_grid: Mask, cluster: ClusterSpec
) -> dict[str, Mask]:
    """What stands against an order other than the usual one, each with the rows (rows,) that it stands against.

    `sizes` of axes and `steps` in devices between neighbours on them.
    """
    groups, size, step = cluster.groups, sizes[AxisName.PIPELINE], steps[AxisName.PIPELINE]
    world = np.prod([sizes[name] for name in AxisName], axis=0)
    inside = (size > 1) & (size * step != world)
    alike = len({(group.devices_per_node, group.rack_nodes) for group in groups}) == 1
    fills = [_fills(sizes[name], steps[name], room) for name in AxisName for room in rooms(cluster)]
    split = [edge % (size * step) != 0 for edge in site_edges(cluster).tolist()]
    cores = any(group.device.kind is DeviceKind.CPU for group in groups)
    return {
        "nodes of unlike sizes": np.full(world.shape, not alike),
        "an axis does not fill its nodes evenly": ~np.all(fills, axis=0),
        "a grid of experts under ranks of the pipeline": inside & on_grid,
        "a pipeline inside other axes that leaves its site": inside & np.any(split, axis=0),
        "a pipeline inside other axes on processors": inside & cores,
    }


def rooms(cluster: ClusterSpec) -> tuple[int, ...]:
    """Devices of a node and, where there are racks, of a rack: those of the first group."""
    group = cluster.groups[0]
    inside = group.devices_per_node
    return (inside, inside * group.rack_nodes) if group.rack_nodes else (inside,)


def _fills(size: Ids, step: Ids, room: int) -> Mask:
    """Whether groups of `size` ranks so many devices apart lie in every box of `room` devices alike."""
    span = size * step
    within, apart = room % span == 0, step % room == 0
    return np.asarray((size == 1) | within | apart | ((room % step == 0) & (span % room == 0)), dtype=np.bool_)


ORDER_RULES = (
    Rule(name="axes-order", scope=Scope.SEARCH, check=axes_order),
    Rule(name="runtime-order", scope=Scope.RUNTIME, check=order_laid),
)
