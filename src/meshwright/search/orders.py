"""Plans with their mesh axes in another order than the usual one, where that is faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np
import numpy.typing as npt

from meshwright.cost import PlanTable
from meshwright.cost.placement import axis_sizes, strides
from meshwright.cost.table import DEFAULT_ORDER
from meshwright.search.alternatives import Alternatives
from meshwright.search.explore import Explorer
from meshwright.search.order_rules import is_trained, rooms, uneven
from meshwright.search.prices import price
from meshwright.spec.cluster import ClusterSpec, Link
from meshwright.spec.plan import AxisName

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Order = tuple[AxisName, ...]
ROWS = 2_000  # of the best in the usual order, that others are tried of
SLACK = 1.01  # over the score without travel: closed forms of sliced schedules may be as much too long there
WORTH = 1e-3  # of the score that another order must gain: the usual one is what all else knows


def reorder(found: Explorer, count: int, *, trainable: bool = False) -> None:
    """Adds to `found` its rows in the order of axes that is best for each, where that is not the usual one.

    Only of the ROWS best those that could be among the `count` best if no link took any time. `trainable` leaves out
    what this runtime cannot train.
    """
    if found.job.constraints.order != "any" or all_near(found.cluster):
        return
    fits = np.flatnonzero(found.prices.fits & found.prices.finite)
    if len(fits):
        scores = found.scores()
        fits = fits[np.argsort(scores[fits], kind="stable")]
        _turn(found, [(fits, float(scores[fits[min(count, len(fits)) - 1]]))], trainable=trainable)


def reorder_alternatives(found: Explorer, asked: Sequence[Alternatives], *, trainable: bool = False) -> None:
    """As `reorder`, of the rows of each of `asked` those that could be its best if no link took any time."""
    if found.job.constraints.order != "any" or all_near(found.cluster):
        return
    scores = found.scores()
    groups = [(one.rows[np.argsort(scores[one.rows], kind="stable")], one.score) for one in asked if len(one.rows)]
    _turn(found, groups, trainable=trainable)


def _turn(found: Explorer, groups: Sequence[tuple[Ids, float]], *, trainable: bool) -> None:
    """Adds rows in the order of axes that is best for each, of those of `groups`, best first with a limit, which could
    be below it; a row that was tried is not tried again."""
    table, scores = found.table, found.scores()
    limits, open_ = np.full(len(scores), -np.inf), (table.order == 0) & _several(table)
    open_[found.turned] = False
    for rows, limit in groups:
        some = rows[open_[rows]][:ROWS]
        limits[some] = np.maximum(limits[some], limit * SLACK)
    fits = np.flatnonzero(limits > -np.inf)
    if not len(fits):
        return
    free = _scored(found, table.take(fits), cluster=without_travel(found.cluster))
    fits = fits[free < limits[fits]]
    found.turned = np.concatenate([found.turned, fits])
    tried, at = other_orders(table, fits, cluster=found.cluster, trainable=trainable)
    if not len(tried):
        return
    tried = replace(tried, every=np.where(tried.learners > 1, found.job.synchronize.every, 0))
    prices = price(tried, model=found.model, cluster=found.cluster, job=found.job)
    tried = replace(tried, every=prices.every)
    reached = np.where(prices.fits, found.score(tried, prices), np.inf)
    first = np.lexsort((reached, at))
    first = first[np.append(True, np.diff(at[first]) != 0)]
    best = first[reached[first] < scores[at[first]] * (1.0 - WORTH)]
    if len(best):
        found.add(tried.take(best), prices.take(best))


def _scored(found: Explorer, table: PlanTable, *, cluster: ClusterSpec) -> npt.NDArray[np.float64]:
    """What the objective minimises of the rows of `table` on other machines."""
    return found.score(table, price(table, model=found.model, cluster=cluster, job=found.job))


def all_near(cluster: ClusterSpec) -> bool:
    """Whether all devices are in one node, where no order of axes is nearer than another."""
    return len(cluster.groups) == 1 and cluster.groups[0].num_nodes == 1


def without_travel(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with links that take no time: in no order of axes is a plan faster than there."""

    def free(link: Link) -> Link:
        return replace(link, bandwidth=1e30, latency_seconds=0.0, across_sockets=None, fits=())

    groups = tuple(
        replace(group, inside=free(group.inside), nic=free(group.nic), rack=free(group.rack) if group.rack else None)
        for group in cluster.groups
    )
    return replace(cluster, groups=groups).with_uplinks(free)


def _several(table: PlanTable) -> Mask:
    """Rows with two axes or more that have more than one rank."""
    return np.asarray(np.sum([size > 1 for size in axis_sizes(table).values()], axis=0) > 1, dtype=np.bool_)


def other_orders(
    table: PlanTable, rows: Ids, *, cluster: ClusterSpec, trainable: bool = False
) -> tuple[PlanTable, Ids]:
    """`rows` with their axes in every order but the usual one that is known, and which row each of them is of.

    Of orders that put as many ranks of every axis in one node, which cost the same, the first.
    """
    sizes = axis_sizes(table)
    large = np.stack([sizes[name][rows] > 1 for name in DEFAULT_ORDER])
    codes = np.left_shift(1, np.arange(len(DEFAULT_ORDER)))[:, None] * large
    kinds = codes.sum(axis=0)
    orders: list[Order] = [DEFAULT_ORDER]
    picked, chosen = [], []
    for kind in np.unique(kinds):
        mine = rows[kinds == kind]
        for order in _permuted([name for bit, name in enumerate(DEFAULT_ORDER) if int(kind) >> bit & 1]):
            if trainable and not is_trained(order):
                continue
            picked.append(mine)
            chosen.append(np.full(len(mine), len(orders)))
            orders.append(order)
    at = np.concatenate(picked) if picked else rows[:0]
    ordered = replace(table.take(at), order=np.concatenate(chosen) if chosen else at, orders=tuple(orders))
    own = _lies(table.take(at), cluster=cluster)
    own[:, ~evenly(table.take(at), cluster=cluster)] = 0
    lies = _lies(ordered, cluster=cluster)
    known = np.flatnonzero(evenly(ordered, cluster=cluster) & (lies != own).any(axis=0))
    _, first = np.unique(np.concatenate([at[None], lies])[:, known], axis=1, return_index=True)
    kept = np.sort(known[first])
    return ordered.take(kept), at[kept]


def _lies(table: PlanTable, *, cluster: ClusterSpec) -> Ids:
    """Ranks of every axis that one node holds, and one rack, shape (figures, rows): rows with the same cost the same.

    Between sites it is also the order itself that counts.
    """
    sizes, steps = axis_sizes(table), strides(table)
    held = [np.clip(room // steps[name], 1, sizes[name]) for room in rooms(cluster) for name in sizes]
    return np.stack([*held, table.order + 1] if len(cluster.sites) > 1 else held)


def _permuted(large: Sequence[AxisName]) -> Iterator[Order]:
    """Every order of the axes `large` but the usual one; those of one rank come last."""
    alone = tuple(name for name in DEFAULT_ORDER if name not in large)
    usual = tuple(name for name in DEFAULT_ORDER if name in large)
    return ((*order, *alone) for order in permutations(large) if order != usual)


def evenly(table: PlanTable, *, cluster: ClusterSpec) -> Mask:
    """Rows whose axes lie in nodes so evenly that the cost is known in any order, shape (rows,)."""
    broken = uneven(axis_sizes(table), strides(table), on_grid=table.on_grid, cluster=cluster)
    return np.asarray(~np.any(list(broken.values()), axis=0), dtype=np.bool_)
