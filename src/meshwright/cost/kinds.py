"""Seconds and bytes of every distinct block kind for every row: operators priced once per distinct combination."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from meshwright.cost.again import again, flops_again, products_again, scores
from meshwright.cost.block_bytes import FULL, SELECTIVE, BlockBytes, block_bytes, cast_bytes, recomputes
from meshwright.cost.compute import PassSeconds, part_seconds
from meshwright.cost.exchanges import Exchanges, LayerLinks, exchange_seconds
from meshwright.cost.grid_rows import grid_dims, held_on_grids
from meshwright.cost.host_time import host_extra
from meshwright.cost.layouts import Backward, Kind
from meshwright.cost.mixture_work import MIXTURE
from meshwright.cost.offload import carried
from meshwright.cost.operators import block_work
from meshwright.cost.overlap import Slack
from meshwright.cost.rates import Rates, rates
from meshwright.cost.repeated import Repeated
from meshwright.cost.sizes import operator_sizes
from meshwright.cost.slowest import slowest_share
from meshwright.cost.software import Software
from meshwright.cost.states import state_bytes
from meshwright.cost.table import EXCHANGES, PRECISIONS, SCHEDULES, SHARDINGS, BoolArray, PlanTable
from meshwright.cost.waits import Timed, Waited, waited
from meshwright.cost.work import FloatArray, PartWork, Sizes
from meshwright.schedule import written
from meshwright.schedule.build import SPLIT
from meshwright.spec.cluster import DeviceSpec, NodeGroup
from meshwright.spec.exchange import ExchangeKind
from meshwright.spec.job import JobSpec
from meshwright.spec.plan import Sharding

IndexArray = npt.NDArray[np.intp]

_ZERO1 = SHARDINGS.index(Sharding.OPTIMIZER)
_GATHER = EXCHANGES.index(ExchangeKind.GATHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSeconds:
    """Seconds of one block of a kind for one microbatch; arrays of shape (rows,).

    `forward` and `backward` are the device's and the host's own time, `recompute` what backward does again; `forth`
    and `back` what forward and backward wait for, those of a repeated forward with it. Where a schedule gives weights'
    gradients in a pass of their own, `weight` is that part of backward, `back` is of the rest, and `late` is what that
    pass leaves free. `tensor_bytes` are exchanged over tensor ranks. `expert_parameters` of `parameters` lie
    on the grid of experts; `flops` are those of both passes at the ranks with most, and `flops_again` of what
    backward does again. `parts` splits forward and
    backward by part name, one entry a combination; `part_seconds` by row.
    """

    forward: FloatArray
    backward: FloatArray
    recompute: FloatArray
    weight: FloatArray
    forth: Waited
    back: Waited
    late: Slack
    tensor_bytes: FloatArray
    flops: FloatArray
    flops_again: FloatArray
    parameters: FloatArray
    expert_parameters: FloatArray
    bytes: BlockBytes
    parts: Mapping[str, tuple[FloatArray, FloatArray]]
    inverse: IndexArray
    factor: FloatArray

    @property
    def whole_forward(self) -> FloatArray:
        """Work and every exchange inside the layer."""
        return self.forward + self.forth.seconds

    @property
    def whole_backward(self) -> FloatArray:
        return self.backward + self.recompute + self.back.seconds

    def part_seconds(self, name: str) -> tuple[FloatArray, FloatArray]:
        """Seconds forward and backward of the part called `name`, shape (rows,)."""
        forward, backward = self.parts[name]
        return forward[self.inverse] * self.factor, backward[self.inverse] * self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Distinct settings that operators depend on; `inverse` says which one a row has."""

    sizes: Sizes
    rates: Rates
    inverse: IndexArray

    def rows(self, values: Iterable[FloatArray | float]) -> FloatArray:
        """The sum of values by combination, row by row."""
        total: FloatArray = np.asarray(sum(values, self.sizes.zeros), dtype=np.float64)
        return total[self.inverse]


def combine(table: PlanTable, *, device: DeviceSpec, job: JobSpec, software: Software) -> Combination:
    """The distinct combinations of `table` on `device`; raises ConfigError where it has no peak for a precision."""
    waiting = table.world / table.pipeline
    first, inverse = _distinct(table, waiting if device.spread else None)
    figures = rates(device, precision=table.precision[first], length=job.sequence_length, software=software).slowed(
        slowest_share(waiting[first], spread=device.spread)
    )
    dims, side = grid_dims(table)[first], table.side[first].astype(np.float64)
    sizes = operator_sizes(
        batch=table.microbatch[first] / side ** (dims - 1.0),
        tensor=side,
        split=np.where(table.sequence_parallel[first] | (dims > 1.0), side, 1.0),
        context=table.context[first].astype(np.float64),
        inner=table.inner[first].astype(np.float64),
        gathers=_gathers_keys(table)[first],
        token_layout=table.token_layout[first],
        expert=table.expert[first].astype(np.float64),
        expert_tensor=table.expert_tensor[first].astype(np.float64),
        slices=table.slices[first].astype(np.float64),
        grid_dims=dims,
        itemsize=figures.itemsize,
        product_itemsize=_product_itemsize(table, first, figures.itemsize, software=software),
        device=device,
        job=job,
        software=software,
    )
    return Combination(sizes=sizes, rates=figures, inverse=inverse)


def _gathers_keys(table: PlanTable) -> BoolArray:
    """Rows in which several runs of context ranks gather keys and values."""
    return np.asarray((table.context > table.inner) & (table.exchange == _GATHER))


def _distinct(table: PlanTable, waiting: FloatArray | None) -> tuple[IndexArray, IndexArray]:
    """Rows that stand for each distinct setting of operators, and which of them every row has; so many ranks as are
    `waiting` for each other differ where that slows them."""
    key = np.zeros(len(table), dtype=np.int64)
    columns = (
        table.tensor,
        table.sequence_parallel,
        table.microbatch,
        table.precision,
        table.context,
        table.inner,
        _gathers_keys(table),
        table.token_layout,
        table.expert,
        table.expert_tensor,
        table.slices,
        table.tensor_grid,
        *(() if waiting is None else (waiting,)),
    )
    for column in columns:
        known, codes = np.unique(column, return_inverse=True)
        key = key * len(known) + codes.reshape(-1)
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse.reshape(-1)


def _product_itemsize(table: PlanTable, first: IndexArray, itemsize: FloatArray, *, software: Software) -> FloatArray:
    """Eight-bit recipes keep the inputs of products as they were multiplied."""
    narrow = np.asarray([entry.quantized for entry in PRECISIONS])[table.precision[first]]
    return np.where(narrow & (not software.eager), 1.0, itemsize)


def price_block(
    kind: Kind,
    table: PlanTable,
    combination: Combination,
    *,
    group: NodeGroup,
    software: Software,
    links: LayerLinks,
    slow: FloatArray,
    speed: FloatArray,
) -> BlockSeconds:
    """What one block of `kind` costs on every row of `table`.

    Work runs `speed` times as fast as on one core and `slow` times as long because ranks share cores.
    """
    sizes, figures = combination.sizes.times(kind.block.tokens), combination.rates.times(kind.block.tokens)
    works = block_work(kind.block, combination.sizes)
    seconds = partial(part_seconds, device=group.device, rates=figures, software=software)
    passes = [seconds(part) for part in works]
    exchange = exchange_seconds(
        kind.block,
        works,
        passes,
        table,
        sizes=sizes,
        inverse=combination.inverse,
        links=links,
        software=software,
        hides=slow / speed,
        comes_back=kind.backward is not Backward.NONE,
    )
    parameters = held_on_grids(kind.block, table, combination.rows(part.parameters for part in works))
    priced = _Priced(works=works, passes=passes, exchange=exchange, parameters=parameters)
    forward, whole, backward, late = _pass_seconds(kind, priced, table, combination, group.device, software, speed)
    full, selective = (recomputes(kind, table, policy) for policy in (FULL, SELECTIVE))
    held = block_bytes(kind, table, combination.sizes, combination.inverse, works=works, software=software)
    exchange = exchange.repeated(full=full, scores=selective & (Repeated.SCORES in software.repeats))
    chosen = _chosen(works, passes, seconds, combination, speed=speed, software=software)
    repeated = again(whole, chosen, full=full, selective=selective)
    copies = carried(held.away + np.zeros(len(table)), table, group=group)
    waits = partial(waited, copies=copies, contention=links.contention, hides_experts=software.hides_experts)
    return BlockSeconds(
        forward=forward.whole * slow,
        backward=(backward + late).whole * slow,
        recompute=repeated.whole * slow,
        weight=late.whole * slow,
        forth=waits(forward.times(slow), exchange.forward),
        back=waits((backward + repeated).times(slow), exchange.backward),
        late=Slack.beside(late.work * slow, late.stall * slow, links.contention),
        tensor_bytes=exchange.tensor_bytes,
        flops=combination.rows([*_flops(works, kind.backward)]),
        flops_again=_flops_again(works, table, combination, software, full=full, selective=selective),
        parameters=parameters,
        expert_parameters=combination.rows(part.expert_parameters for part in works),
        bytes=held,
        parts=_parts(works, passes),
        inverse=combination.inverse,
        factor=slow / speed,
    )


_PASSES = {Backward.WHOLE: 3.0, Backward.INPUT: 2.0, Backward.NONE: 1.0}


def _flops(works: tuple[PartWork, ...], backward: Backward) -> Iterator[FloatArray | float]:
    """FLOPs of both passes, product by product: one product forward, and backward one for each gradient it gives."""
    for part in works:
        both = backward is Backward.WHOLE
        yield from (product.most_flops * (_PASSES[backward] - (both and product.given)) for product in part.products)
        yield part.score_flops * part.heaviest * (1.0 if backward is Backward.NONE else 3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """The parts of a block with their seconds, what they exchange, and their parameters on every row."""

    works: tuple[PartWork, ...]
    passes: list[PassSeconds]
    exchange: Exchanges
    parameters: FloatArray


def _pass_seconds(
    kind: Kind,
    priced: _Priced,
    table: PlanTable,
    combination: Combination,
    device: DeviceSpec,
    software: Software,
    speed: FloatArray,
) -> tuple[Timed, Timed, Timed, Timed]:
    """Seconds of a block forward, of a forward that is repeated, backward, and of what gives its weights' gradients.

    The host's work and copies of weights that are cast are in them. The last is a pass of its own, or none. What is not
    trained has no gradients of weights, and backward need not come to it at all.
    """
    row, block, trains = combination.rows, kind.block, kind.backward is Backward.WHOLE
    works, passes, exchange, parameters = priced.works, priced.passes, priced.exchange, priced.parameters
    casts = np.where(table.sharding == 0, parameters * cast_bytes(table, software=software), 0.0)
    extra = host_extra(block, table, device=device, software=software)
    cast = 3.0 * casts / (device.memory_bandwidth * device.memory_fraction)
    in_turn = software.host_in_turn(device.kind)
    starts = _matrices(works, combination.sizes.slices) * device.launch_seconds
    apart = 0.0 if software.fused_accumulation or not trains else 1.0
    added = accumulation_seconds(parameters * trains, table, device=device, software=software)
    work = (row(p.forward for p in passes) + cast) / speed
    host = row(p.host_forward for p in passes) + extra + np.where(casts > 0.0, starts, 0.0)
    left_out = np.where(_stops_early(works, table, software), row([passes[-1].products.leaving]) / speed, 0.0)
    forward = _with_host(work, host, exchange.forward.tensor.whole, in_turn=in_turn)
    again = _with_host(work - left_out, host, exchange.again.tensor.whole, in_turn=in_turn)
    if kind.backward is Backward.NONE:
        nothing = Timed(work=0.0 * work, stall=0.0 * work)
        return forward, again, nothing, nothing
    split = _splits(table) & trains
    formed = row(p.weight for p in passes)
    weight = np.where(split, formed + added, 0.0) if trains else formed
    weight_host = np.where(split, row(p.host_forward - p.host_core for p in passes) + apart * starts, 0.0)
    host = row(p.host_backward for p in passes) + extra + apart * starts + np.where(casts > 0.0, starts, 0.0)
    backward = _with_host(
        (row(p.backward for p in passes) + cast + added - weight) / speed,
        host - weight_host,
        exchange.backward.tensor.whole,
        in_turn=in_turn,
    )
    late = (weight if trains else 0.0 * weight) / speed
    return forward, again, backward, _with_host(late, weight_host, 0.0 * weight, in_turn=in_turn)


def _splits(table: PlanTable) -> BoolArray:
    """Rows whose schedule runs products that give gradients of weights as a pass of their own."""
    named = np.array([kind in SPLIT for kind in SCHEDULES])
    told = np.array([written.splits(layout.table) for layout in table.layouts])
    return np.asarray(named[table.schedule] | told[table.layout], dtype=np.bool_)


def _stops_early(works: tuple[PartWork, ...], table: PlanTable, software: Software) -> BoolArray:
    """Rows whose block, computed again, leaves out its last product: not where halves of its backward read all."""
    return ~_splits(table) & bool(software.stops_early and works[-1].closes)


def _flops_again(
    works: tuple[PartWork, ...],
    table: PlanTable,
    combination: Combination,
    software: Software,
    *,
    full: BoolArray,
    selective: BoolArray,
) -> FloatArray:
    """FLOPs of what backward does again."""
    whole, last, chosen = (combination.rows(flops) for flops in flops_again(works, software))
    entire = whole - np.where(_stops_early(works, table, software), last, 0.0)
    return np.where(full, entire, np.where(selective, chosen, 0.0))


def _chosen(
    works: tuple[PartWork, ...],
    passes: list[PassSeconds],
    seconds: Callable[[PartWork], PassSeconds],
    combination: Combination,
    *,
    speed: FloatArray,
    software: Software,
) -> FloatArray:
    """Seconds of what selective recompute runs again; a processor starts the kernels of the scores itself."""
    host = combination.rows(p.host_core for p in passes) * combination.sizes.processor
    return combination.rows((*scores(passes, software), *products_again(works, seconds, software))) / speed + host


def _parts(works: tuple[PartWork, ...], passes: list[PassSeconds]) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Seconds forward and backward by part name, parts of one name added, one entry a combination."""
    parts: dict[str, tuple[FloatArray, FloatArray]] = {}
    for part, seconds in zip(works, passes, strict=True):
        before = parts.get(part.name, (0.0 * seconds.forward, 0.0 * seconds.forward))
        parts[part.name] = (before[0] + seconds.forward, before[1] + seconds.backward)
    return parts


def _matrices(works: tuple[PartWork, ...], slices: FloatArray | float) -> float:
    """How many weights are cast and accumulated one by one; those of experts are in few tensors."""
    return float(sum(len(part.products) if part.name == MIXTURE else _count(part, slices) for part in works))


def _count(part: PartWork, slices: FloatArray | float) -> float:
    return sum(float(np.max(product.count / slices)) for product in part.products)


def accumulation_seconds(
    parameters: FloatArray, table: PlanTable, *, device: DeviceSpec, software: Software
) -> FloatArray:
    """Seconds to add one microbatch's gradient of `parameters`, (rows,) or (rows, ranks), to the sum of those before.

    The first is the sum itself, but where gradients live in buckets it is added to zeros. Nothing where products add
    to the sum themselves.
    """
    if software.fused_accumulation:
        return np.zeros_like(parameters)
    sizes = state_bytes(table)
    divided = np.where(table.sharding > _ZERO1, table.divided, 1)
    bucketed = (table.sharding == 0) & (table.meeting * table.context > 1)
    share = np.where(bucketed, 1.0, 1.0 - 1.0 / table.microbatches)
    total = sizes.compute if software.adds_narrow else sizes.master
    one = np.where((table.sharding > 0) | software.adds_narrow, sizes.compute, sizes.master)
    each = one + 2.0 * total
    if np.ndim(parameters) == 2:
        divided, each, share = divided[:, None], each[:, None], share[:, None]
    moved = parameters / divided * each * share
    return np.asarray(moved / (device.memory_bandwidth * device.memory_fraction), dtype=np.float64)


def _with_host(work: FloatArray, host: FloatArray, tensor: FloatArray, *, in_turn: bool) -> Timed:
    """A pass's own seconds beside its collectives: host work is done `in_turn`, or the device runs behind its host."""
    if in_turn:
        return Timed(work=work + host, stall=np.zeros_like(work + host))
    stall = np.maximum(host - tensor - work, 0.0)
    return Timed(work=work + np.zeros_like(stall), stall=stall)
