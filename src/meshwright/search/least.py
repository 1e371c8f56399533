"""What blocks cost and keep under each setting, priced once where first asked for: what bounds are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, reduce

import numpy as np
import numpy.typing as npt

from meshwright.cost import Layout, PlanTable
from meshwright.cost.block_bytes import AMOUNTS
from meshwright.cost.kinds import accumulation_seconds
from meshwright.cost.layouts import Kind
from meshwright.cost.machine import Blocks, price_blocks
from meshwright.cost.overlap import Contention
from meshwright.cost.stacks import software_of
from meshwright.cost.table import OFFLOADS, RECOMPUTES, SHARDINGS
from meshwright.search.rules import divisors
from meshwright.search.space import Space
from meshwright.spec.cluster import ClusterSpec, DeviceKind
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Offload, Sharding

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
SETTINGS = (
    *("tensor", "sequence_parallel", "context", "inner", "exchange", "token_layout", "expert", "expert_tensor"),
    "precision",
)
_KEPT_AWAY = OFFLOADS.index(Offload.ACTIVATIONS)
_WAYS = len(RECOMPUTES) * 4
_MANY = 1 << 20  # sequences of a microbatch beside which no launch and no latency counts
_ROUNDED = 1.0 - 1e-5  # of such a microbatch: its products end in tiles that are not full


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLeast:
    """Of one block and microbatch by kind, shape (rows, kinds): the least seconds of both passes with what they wait
    for, and for how long work, links in the node and adapters are busy; the least bytes; parameters on one device, of
    which `apart` lie on a grid of experts."""

    forward: Floats
    forward_work: Floats
    forward_near: Floats
    forward_far: Floats
    backward: Floats
    backward_work: Floats
    backward_near: Floats
    backward_far: Floats
    kept: Floats
    away: Floats
    working: Floats
    half: Floats
    ending: Floats
    giving: Floats
    given: Floats
    mixing: Floats
    opening: Floats
    waits: Floats
    logits: Floats
    cast: Floats
    gathering: Floats
    making: Floats
    inside: Floats
    parameters: Floats
    apart: Floats

    def take(self, rows: Ids) -> BlockLeast:
        return BlockLeast(**{field.name: getattr(self, field.name).take(rows, axis=0) for field in fields(self)})

    def joined(self, other: BlockLeast) -> BlockLeast:
        names = [field.name for field in fields(self)]
        return BlockLeast(**{name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in names})

    def least(self, other: BlockLeast) -> BlockLeast:
        names = [field.name for field in fields(self)]
        return BlockLeast(**{name: np.minimum(getattr(self, name), getattr(other, name)) for name in names})


class Least:
    """Blocks of `kinds` under every setting of a space: how a layer is divided, the precision, the microbatch, what is
    computed again, whether activations are away, whether anything is sharded, and whether it is done in slices.

    Of unlike machines the least of each figure, on as few devices as hold one microbatch: more are never faster.
    """

    def __init__(
        self, space: Space, *, kinds: Sequence[Kind], model: ModelSpec, cluster: ClusterSpec, job: JobSpec
    ) -> None:
        codes = np.stack([space.frames[name] for name in SETTINGS], axis=1)
        self._settings, which = np.unique(codes, axis=0, return_inverse=True)
        self.setting: Ids = which.reshape(-1)
        self._sizes = np.array(divisors(job.batch_sequences))
        self._kinds = kinds
        self._model, self._cluster, self._job = model, cluster, job
        again, away = space.rungs
        leaves = sorted({int(value == _KEPT_AWAY) for value in away})
        ways = [(r * 2 + a) * 2 + s for r in again for a in leaves for s in (0, 1)]
        self._ways, self._first = np.array(ways, dtype=np.int64), np.array(ways[:2], dtype=np.int64)
        # A slice's queries meet no keys behind it, whatever the mask.
        self.cuts = (False, True) if max(space.values("slices"), default=1) > 1 else (False,)
        # One more than the place of each setting among those known: 0 of the others, which are most.
        self._at = np.zeros(len(self._settings) * len(self._sizes) * 2 * _WAYS, dtype=np.int32)
        self._known: BlockLeast | None = None
        self._each: list[BlockLeast] = []
        self.contention: dict[str, Contention | None] = {}

    def of(self, table: PlanTable, *, frames: Ids, sharded: Mask, cut: Mask) -> tuple[BlockLeast, Ids]:
        """Blocks of all settings known, and which of them each row of `table`, of the frame in `frames`, has."""
        size, away = np.searchsorted(self._sizes, table.microbatch), table.offload == _KEPT_AWAY
        key = ((self.setting[frames] * len(self._sizes) + size) * 2 + cut) * len(RECOMPUTES) + table.recompute
        key = 4 * key + 2 * away + sharded
        at = self._at[key]
        if self._known is None or (at == 0).any():
            self._add(np.unique(key[at == 0]))
            at = self._at[key]
        assert self._known is not None
        return self._known, at - 1

    def on_each(self, at: Ids) -> list[BlockLeast]:
        """The same blocks on the machines of each of several node groups, where `of` has found them at `at`."""
        return [blocks.take(at) for blocks in self._each]

    def passes_on_each(self, at: Ids) -> Floats:
        """Seconds of both passes of the same blocks on the machines of each node group, shape (groups, rows, kinds)."""
        assert self._known is not None
        return np.stack([(one.forward + one.backward).take(at, axis=0) for one in self._each or [self._known]])

    def endless(self) -> Floats:
        """Seconds of a sequence forward and backward by node group, setting and kind, of microbatches so large that
        nothing but the work counts: none of any size takes less."""
        ones = np.ones(len(self._settings), dtype=np.int64)
        found = self._priced(
            self._settings, _MANY * ones, recompute=0 * ones, away=0 * ones, sharded=ones, cut=self.cuts[-1]
        )
        return np.stack([blocks.forward + blocks.backward for blocks in found]) / _MANY * _ROUNDED

    def _add(self, missing: Ids) -> None:
        """Prices `missing` settings sharded and not, and where one is not of the first rung those of every rung: it is
        their number and not that of calls that should count."""
        pairs, ways = np.divmod(missing, _WAYS)
        wanted = self._ways if np.isin(ways, self._ways[2:]).any() else self._first
        keys = (np.unique(pairs)[:, None] * _WAYS + wanted).reshape(-1)
        keys = keys[self._at[keys] == 0]
        rest, ways = np.divmod(keys, _WAYS)
        for cut in (False, True):
            those = rest % 2 == cut
            if those.any():
                self._keep(keys[those], rest[those] // 2, ways[those], cut=cut)

    def _keep(self, keys: Ids, pairs: Ids, ways: Ids, *, cut: bool) -> None:
        setting, size = np.divmod(pairs, len(self._sizes))
        each = self._priced(
            self._settings[setting],
            self._sizes[size],
            recompute=ways // 4,
            away=ways // 2 % 2,
            sharded=ways % 2,
            cut=cut,
        )
        found = _least_of_all(each)
        known = 0 if self._known is None else len(self._known.kept)
        self._known = found if self._known is None else self._known.joined(found)
        if len(each) > 1:
            before = self._each
            self._each = [one.joined(more) for one, more in zip(before, each, strict=True)] if before else each
        self._at[keys] = known + 1 + np.arange(len(keys))

    def _priced(
        self, settings: Ids, microbatch: Ids, *, recompute: Ids, away: Ids, sharded: Ids, cut: bool
    ) -> list[BlockLeast]:
        """On the machines of every node group. What is `cut` into slices works out no scores behind one, and has no
        mask of all of them here and no scores that are written out: how many slices it has is not known."""
        columns: dict[str, npt.ArrayLike] = {name: settings[:, index] for index, name in enumerate(SETTINGS)}
        inside = np.maximum(np.asarray(columns["expert"]) * np.asarray(columns["expert_tensor"]), 1)
        stage = np.asarray(columns["tensor"]) * np.asarray(columns["context"])
        columns |= {
            "microbatch": microbatch,
            "recompute": recompute,
            "offload": away * _KEPT_AWAY,
            "replicate": np.lcm(stage, inside) // stage,
            "sharding": sharded * SHARDINGS.index(Sharding.PARAMETERS),
        }
        table = PlanTable.build(columns, layouts=(Layout((0, len(self._model.blocks)), (0,)),)).of_job(self._job)
        features, found = software_of(self._job, self._cluster), []
        features = replace(features, dense_masks=False, scores_at_once=0) if cut else features
        for group in self._cluster.groups:
            priced = price_blocks(group, table, self._kinds, cluster=self._cluster, job=self._job, software=features)
            self.contention[group.name] = priced.contention
            sums = partial(accumulation_seconds, table=table, device=group.device, software=features)
            apart = group.device.kind is not DeviceKind.CPU
            added = [sums(block.parameters) if apart else 0.0 for block in priced.blocks]
            found.append(_least_of(priced, added=added))
        return found


def _least_of_all(each: Sequence[BlockLeast]) -> BlockLeast:
    return reduce(BlockLeast.least, each)


def _least_of(priced: Blocks, *, added: Sequence[Floats | float]) -> BlockLeast:
    """The figures of blocks, whose seconds are told where ranks share cores that make them slower, without those in
    which gradients are `added` up, which more than a setting decides."""
    blocks, slower = priced.blocks, priced.sharing.lockstep
    rows = len(slower)

    def every(values: Iterable[Floats | float]) -> Floats:
        return np.stack([value + np.zeros(rows) for value in values], axis=1)

    forward = every(block.whole_forward / slower for block in blocks)
    whole, summing = every(block.whole_backward / slower for block in blocks), every(added)
    idle = {"work": 1.0, "near": 0.0, "far": 0.0}
    if priced.contention is not None:
        idle |= {"near": priced.contention.near.idle, "far": priced.contention.far.idle}
    busy: dict[str, Floats] = {}
    for name, share in idle.items():
        busy[f"forward_{name}"] = forward - every(getattr(block.forth.slack, name) for block in blocks)
        free = every(getattr(block.back.slack, name) for block in blocks)
        busy[f"backward_{name}"] = whole - free - share * summing
    return BlockLeast(
        forward=forward,
        backward=whole - summing,
        **busy,
        **{name: every(getattr(block.bytes, name) for block in blocks) for name in AMOUNTS},
        parameters=every(block.parameters for block in blocks),
        apart=every(block.expert_parameters for block in blocks),
    )
