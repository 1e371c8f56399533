"""What a rank holds whatever the moment, and moments that may be the peak of its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshwright.cost.block_bytes import Holds
from meshwright.cost.block_held import of_one
from meshwright.cost.layouts import Backward, LayoutArrays
from meshwright.cost.parameters import gathered_of
from meshwright.cost.pipeline import Shape, held
from meshwright.cost.pipeline_held import waiting, waits_last
from meshwright.cost.slices_held import Sliced, beside_mean
from meshwright.cost.stage_order import held_down, in_pairs, splits
from meshwright.cost.table import BoolArray, IntArray, PlanTable
from meshwright.cost.unlike import Shards, Unlike, of_blocks, shards
from meshwright.cost.work import FloatArray
from meshwright.schedule.moves import PATIENT_SENDS
from meshwright.spec.model import Head, Layer, ModelSpec

_SAME = 1.0 + 1e-9
_AMONG = 64.0  # times the logits, so that what is held is asked for at the moment with most of them
_SUMS = ("one_kept", "whole", "made", "experts", "units", "stays", "added", "layers")
_ONES = (
    "one_logits",
    "loss_logits",
    "largest_kept",
    "largest_waits",
    "head_kept",
    "head_waits",
    "working",
    "half",
    "ending",
    "giving",
    "given",
    "unit",
    "gathering",
    "making",
    "inside",
    "mixing",
    "head_working",
    "largest",
    "largest_made",
    "head",
    "head_made",
    "head_own",
    "embedding",
    "closing",
    "formed",
    "tied",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageHeld:
    """What the blocks of one stage hold, or those of all stages of a rank, shape (rows, ranks).

    Bytes of one pass, of a microbatch or a slice of one: `one_kept` on all blocks, `head_kept`, `one_logits`,
    `largest_kept` of a layer, `loss_logits` of the copy that the loss reads; between the halves of a split backward
    `head_waits` and `largest_waits` are left. Beside a layer's backward `working`, in the earlier half of a split one
    `half`, when its last product has both gradients `ending`, when its experts are `giving` the last gradient and have
    all `given`, when they are gathered `gathering`, when it comes to the mixer `mixing`, and in a layer's forward
    `making` at the most, and `inside` while experts multiply; beside the head's `head_working`. Parameters: of all
    blocks those `whole` and those `made` that have gradients, beside the `experts` with gradients that are apart and
    with the `units` of experts among them; `largest` layer, of which experts are a `unit` of their own, `behind_head`
    that of the head's own stage, `head`, and what of layer and head has gradients (`largest_made`, `head_made`),
    `embedding`, `closing` of a layer's last product, `formed` of them when its backward has most, `tied` of a head that
    multiplies with the table, and `head_own` beside it. Of those whole `stays` are sharded and yet freed by no pass,
    and of those made `added` are summed whole. `sends` bytes of gradients on their way to other stages and of room for
    what comes, and in the earlier half of a split backward `half_sends`. Of `layers` that keep what they keep in the
    host's memory the next one's comes back while one goes back: `ahead`. Until a stage's backward is done it has what
    it `sent`, and of what `entered` it or came of its table that or its gradient: `apart` from what layers keep where
    that is away.
    `unlike` is what blocks hold that are sharded in unlike ways, where rows have them.
    """

    one_kept: FloatArray
    head_kept: FloatArray
    one_logits: FloatArray
    loss_logits: FloatArray
    largest_kept: FloatArray
    largest_waits: FloatArray
    head_waits: FloatArray
    working: FloatArray
    half: FloatArray
    ending: FloatArray
    giving: FloatArray
    given: FloatArray
    gathering: FloatArray
    making: FloatArray
    inside: FloatArray
    mixing: FloatArray
    head_working: FloatArray
    whole: FloatArray
    made: FloatArray
    experts: FloatArray
    units: FloatArray
    largest: FloatArray
    unit: FloatArray
    behind_head: FloatArray
    largest_made: FloatArray
    head: FloatArray
    head_made: FloatArray
    head_own: FloatArray
    embedding: FloatArray
    closing: FloatArray
    formed: FloatArray
    tied: FloatArray
    sends: FloatArray
    half_sends: FloatArray
    layers: FloatArray
    ahead: FloatArray
    sent: FloatArray
    entered: FloatArray
    apart: FloatArray
    shared: FloatArray
    stays: FloatArray
    added: FloatArray
    unlike: Unlike | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a rank holds whatever the moment, shape (rows, ranks).

    Bytes of all microbatches in flight: `kept` and `logits` when they are most, and `alone` where a stage without a
    head keeps more at another time; `goes_on` where other microbatches come when it first holds so many. `all_stages`
    are its stages taken together, `first_kept` what a microbatch keeps on the first of them, `behind_head` the
    largest layer of the last one, `waits` what a microbatch leaves between the halves of a split backward, `waiting`
    what is kept where two stages split them when most microbatches wait so, on ranks of which it `waits_last` those
    that end their stage, and `fixed` bytes that stay. Slices have
    what is `sliced` beside.
    """

    kept: FloatArray
    alone: FloatArray
    logits: FloatArray
    goes_on: BoolArray
    all_stages: StageHeld
    first_kept: FloatArray
    behind_head: FloatArray
    waits: FloatArray
    waiting: FloatArray
    waits_last: BoolArray
    fixed: FloatArray
    sliced: Sliced | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A moment that may be the peak: bytes by part beside parameters and optimizer state, shape (rows, ranks); `freed`
    are those of whole parameters that are not there then. It is no moment of ranks where it is not `here`."""

    gradients: FloatArray
    activations: FloatArray
    logits: FloatArray
    buffers: FloatArray
    freed: FloatArray | float = 0.0
    here: BoolArray | bool = True

    @property
    def total(self) -> FloatArray:
        found = self.gradients + self.activations + self.logits + self.buffers
        return found if isinstance(self.freed, float) else found - self.freed


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """Where what stages hold is read: the blocks' bytes, `hidden` of a microbatch's residual stream, and of what the
    layers of a stage share in a pass what is `shared` until its backward where there is a layer of a kind. A rank that
    `turns` has two stages of which one hands its features to the other, (rows, ranks).

    Where operators run one by one (`eager`), stages keep what they send, and halves of backwards only what they read.
    """

    table: PlanTable
    blocks: Sequence[Holds]
    arrays: LayoutArrays
    model: ModelSpec
    hidden: FloatArray
    shared: Sequence[FloatArray]
    turns: BoolArray
    eager: bool

    @cached_property
    def _each(self) -> list[dict[str, FloatArray]]:
        pairs = zip(self.arrays.kinds, self.blocks, strict=True)
        return [of_one(kind, block, self.table, model=self.model) for kind, block in pairs]

    @cached_property
    def _units(self) -> list[FloatArray]:
        """Parameters of a block's experts that are a unit of their own, by kind."""
        return [each.get("unit", np.zeros(len(self.table))) for each in self._each]

    @cached_property
    def _gathered(self) -> list[Holds]:
        return gathered_of(self.blocks, kinds=self.arrays.kinds, table=self.table)

    @cached_property
    def _shards(self) -> list[Shards]:
        return shards(self.arrays.kinds, self.blocks, self.table)

    @cached_property
    def _slices(self) -> FloatArray:
        return self.table.slices.astype(np.float64)

    @cached_property
    def unlike(self) -> BoolArray:
        """Rows whose blocks are sharded in unlike ways."""
        return np.array([layout.shards_unlike for layout in self.table.layouts])[self.table.layout]

    def of(self, counts: FloatArray, rows: IntArray | None = None) -> StageHeld:
        """Of the blocks that are counted, (rows, ranks, kinds + 1); of the rows chosen, where some are."""
        zeros, slices = np.zeros(counts.shape[:2]), self._slices
        most, sums = dict.fromkeys(_ONES, zeros), dict.fromkeys(_SUMS, zeros)
        for index, (kind, block) in enumerate(zip(self.arrays.kinds, self.blocks, strict=True)):
            number = counts[..., index]
            here = number > 0
            if not here.any():
                continue
            for name, values in self._each[index].items():
                most[name] = np.where(here, np.maximum(most[name], _chosen(values, rows)), most[name])
            held, own = number * _chosen(block.bytes.kept / slices, rows), self._gathered[index].parameters
            parameters = number * _chosen(own, rows)
            apart = number * _chosen(block.parameters - own, rows)
            sums["one_kept"], way = sums["one_kept"] + held, self._shards[index]
            if isinstance(kind.block, Head):
                # A tied head away from its table has a copy of it.
                alone = here & (self.arrays.of(self.model.embedding, counts) == 0)
                parameters = parameters + np.where(alone, most["tied"], 0.0)
            trains = 1.0 * (kind.backward is Backward.WHOLE)
            made = trains * parameters
            units = trains * number * _chosen(self._units[index], rows)
            for name, more in (("whole", parameters), ("made", made), ("experts", trains * apart), ("units", units)):
                sums[name] = sums[name] + more
            sums["stays"] = sums["stays"] + parameters * _chosen(way.stays, rows)
            sums["added"] = sums["added"] + made * _chosen(way.sums, rows)
            if isinstance(kind.block, Layer):
                sums["layers"] = sums["layers"] + number
        if self.eager:
            sums["one_kept"] = sums["one_kept"] + self.passed_on(counts, rows) / _chosen(slices, rows)
        away = self._away(counts, rows)
        ahead = zeros if away is None else np.where(away[1] > 1.0, away[0], 0.0)
        (sends, half_sends), hidden = self._on_the_way(counts, rows), _chosen(self.hidden / slices * self.eager, rows)
        return StageHeld(
            **most,
            **sums,
            behind_head=most["largest"],
            sends=sends,
            half_sends=half_sends,
            ahead=ahead,
            sent=hidden * (self._sends(counts) > 0),
            entered=hidden + zeros,
            apart=zeros if away is None else hidden * (away[1] > 0.0),
            shared=self._in_common(counts, rows) / _chosen(slices, rows) * self.eager,
            unlike=self._unlike(counts, rows),
        )

    def _unlike(self, counts: FloatArray, rows: IntArray | None) -> Unlike | None:
        """What the blocks counted hold, where all rows shard them in unlike ways."""
        apart = self.unlike if rows is None else self.unlike[rows]
        if not (apart.any() and apart.all()):
            return None
        places = self.arrays.places[self.table.layout if rows is None else self.table.layout[rows]]
        return of_blocks(counts, kinds=self.arrays.kinds, places=places, each=self._each, ways=self._shards, rows=rows)

    def largest_layer(self, counts: FloatArray) -> FloatArray:
        """Parameters of the largest layer that is counted, but for experts apart, shape (rows, ranks)."""
        found = np.zeros(counts.shape[:2])
        for index, (kind, block) in enumerate(zip(self.arrays.kinds, self._gathered, strict=True)):
            if isinstance(kind.block, Layer):
                found = np.where(counts[..., index] > 0, np.maximum(found, block.parameters[:, None]), found)
        return found

    def passed_on(self, counts: FloatArray, rows: IntArray | None = None) -> FloatArray:
        """Bytes of what the stages counted send: each keeps it until its gradient is back, shape (rows, ranks); of
        what they are sent, where the layer that reads it keeps its own in the host's memory; and of what is shared."""
        number, away = self._sends(counts), self._away(counts, rows)
        if away is not None:
            number = number + np.minimum(self._receives(counts), away[1])
        return _chosen(self.hidden, rows) * np.maximum(number, 0.0) + self._in_common(counts, rows)

    def _in_common(self, counts: FloatArray, rows: IntArray | None) -> FloatArray:
        """Bytes of what the layers of the stages counted share, shape (rows, ranks)."""
        shared = np.zeros(counts.shape[:2])
        for index, each in self._sharing:
            shared = np.where(counts[..., index] > 0, np.maximum(shared, _chosen(each, rows)), shared)
        return np.asarray(shared * counts[..., -1], dtype=np.float64)

    @cached_property
    def _sharing(self) -> list[tuple[int, FloatArray]]:
        """The kinds whose layers share something, and how much."""
        return [(index, each) for index, each in enumerate(self.shared) if each.any()]

    def _sends(self, counts: FloatArray) -> FloatArray:
        """Of the stages counted those that send features on."""
        return np.asarray(counts[..., -1] - (self.arrays.of(self.model.head, counts) > 0))

    def _receives(self, counts: FloatArray) -> FloatArray:
        """And those that are sent them."""
        return np.asarray(counts[..., -1] - (self.arrays.of(self.model.embedding, counts) > 0))

    def _away(self, counts: FloatArray, rows: IntArray | None) -> tuple[FloatArray, FloatArray] | None:
        """The most that one of the blocks counted keeps in the host's memory, and how many of them do, both of shape
        (rows, ranks); None where none does."""
        if not self._leaves:
            return None
        zeros = np.zeros(counts.shape[:2])
        most, several = zeros, zeros
        for index, block in enumerate(self.blocks):
            away = _chosen(block.bytes.away + np.zeros(len(self.table)), rows)
            here = (counts[..., index] > 0) & (away > 0.0)
            most, several = np.where(here, np.maximum(most, away), most), several + counts[..., index] * here
        return most, several

    @cached_property
    def _leaves(self) -> bool:
        """Whether a block keeps something in the host's memory."""
        return any(np.any(block.bytes.away) for block in self.blocks)

    def _on_the_way(self, counts: FloatArray, rows: IntArray | None) -> tuple[FloatArray, FloatArray]:
        """Hidden features on their way at once: gradients that a stage has sent, and what it makes room for; and in the
        earlier half of a split backward, before which no room is made."""
        turns = self.turns if rows is None else self.turns[rows]
        hidden, passes = (
            _chosen(values, rows) for values in (self.hidden / self._slices, self.table.microbatches * self._slices)
        )
        receives = self._receives(counts) - (turns & (counts[..., -1] > 1.0))
        sent = receives * np.minimum(float(PATIENT_SENDS), passes - 1.0)
        return np.asarray(hidden * np.where(receives > 0, sent + 1.0, 0.0)), np.asarray(hidden * sent)


def _chosen(values: FloatArray, rows: IntArray | None) -> FloatArray:
    """Those of the rows chosen, shape (rows, 1)."""
    return (values if rows is None else values[rows])[:, None]


def collect(source: Holdings, counts: Mapping[str, FloatArray], *, shape: Shape, fixed: FloatArray) -> Held:
    """What every rank holds of the blocks that `counts` tells; those of its stages apart where they run one by one."""
    total = counts["total"]
    zeros = np.zeros(total.shape[:2])
    kept = dict.fromkeys(("first", "last", "total"), zeros)
    logits, each_waits = dict(kept), dict(kept)
    for index, block in enumerate(source.blocks):
        for name in kept:
            number = counts[name][..., index]
            kept[name] = kept[name] + number * block.bytes.kept[:, None]
            logits[name] = logits[name] + number * block.bytes.logits[:, None]
            each_waits[name] = each_waits[name] + number * np.asarray(block.bytes.waits)[..., None]
    for name in kept if source.eager else ():
        kept[name] = kept[name] + source.passed_on(counts[name])
    each_waits = each_waits if source.eager else kept
    waits = each_waits["total"]
    whole = held(shape, first=kept["first"], last=kept["last"], total=kept["total"], waits=waits)
    scored, both = zeros, whole
    if logits["total"].any():
        scored = held(shape, **logits)
        among = {name: kept[name] + _AMONG * logits[name] for name in kept}
        both = held(shape, **among, waits=waits + _AMONG * logits["total"]) - (_AMONG - 1.0) * scored
    stages = {name: counts[name][..., -1] for name in kept}
    return Held(
        kept=both - scored,
        alone=np.where(whole > (both - scored) * _SAME, whole, 0.0),
        logits=scored,
        goes_on=_goes_on(shape, stages, paired=in_pairs(source.table, shape)),
        all_stages=source.of(total),
        first_kept=kept["first"],
        behind_head=source.largest_layer(counts["last"]),
        waits=np.where(splits(source.table)[:, None], waits, 0.0),
        waiting=waiting(
            shape,
            first=kept["first"],
            last=kept["last"],
            first_waits=each_waits["first"],
            last_waits=each_waits["last"],
        ),
        waits_last=waits_last(shape),
        fixed=fixed,
        sliced=beside_mean(source.blocks, total, shape=shape),
    )


def _goes_on(shape: Shape, stages: Mapping[str, FloatArray], *, paired: BoolArray) -> BoolArray:
    """Ranks that go forward again when they first hold as much as ever; of interleaved ones those that do when all of
    their stages have gone back, and of `paired` ones those on which not all have gone down a V by then."""
    found = held(shape, **stages) < shape.microbatches[:, None] * stages["total"]
    rows = shape.interleaved
    pipeline, chunks = shape.pipeline[rows, None], shape.chunks[rows, None]
    ahead = 2.0 * (pipeline - 1.0 - shape.rank[rows]) + 2.0 * (chunks - 1.0) * pipeline + 1.0
    found[rows] &= ahead < chunks * shape.microbatches[rows, None]
    return np.where(paired[:, None], found & (held_down(shape) < shape.microbatches[:, None]), found)
