"""Small designs for dry runs, and what a fresh process or a real rank counts of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from meshwright.run.dry.count import RankCount
from meshwright.spec.cluster import DeviceKind, Precision
from meshwright.spec.job import OptimizerSpec
from meshwright.spec.plan import Design
from tests.support import kept, models
from tests.support.designs import Layout, design

if TYPE_CHECKING:
    from meshwright.run.dry.recipes import Recipes


def apart(function: Callable[..., Any], /, **given: Any) -> Any:
    """What `function` gives back in the process that counts for all tests."""
    return kept.run(function, **given)


def in_turn(function: Callable[..., Any], arguments: Sequence[Mapping[str, Any]], **_options: Any) -> tuple[Any, ...]:
    """As in_children, one after another in the process that counts for all tests; what they say is not told."""
    return tuple(apart(_quietly, function=function, given=dict(given)) for given in arguments)


def _quietly(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    return function(**given, say=lambda _line: None)


@cache
def known() -> Recipes:
    """What operators give back, worked out once for all designs that this process counts."""
    from meshwright.run.dry.recipes import Recipes

    return Recipes()


def case(layout: Layout, *, kind: str = "tiny", layers: int = 8, accelerator: bool = True) -> Design:
    """A design in bf16 of one of the small models with so many layers."""
    model = models.all_models()[kind]
    model = replace(model, layers=(model.layers[0],) * layers)
    found = design(model, replace(layout, precision=Precision.BF16), optimizer=OptimizerSpec(clip_norm=1e-3))
    if not accelerator:
        return found
    group = found.cluster.groups[0]
    device = replace(group.device, kind=DeviceKind.CUDA, peak_flops={Precision.BF16: 1e12})
    return replace(found, cluster=replace(found.cluster, groups=(replace(group, device=device),)))


def count_both(designs: list[Design], ranks: list[int] | None = None) -> list[list[tuple[RankCount, RankCount]]]:
    """These pipeline ranks of each design, or all of them, whole and from probes."""
    from meshwright.run.dry.rank import Counter

    found = []
    for entry in designs:
        whole = Counter(design=entry, whole=True, recipes=known())
        probed = Counter(design=entry, recipes=known())
        chosen = range(entry.plan.pipeline) if ranks is None else ranks
        found.append([(whole.count(rank), probed.count(rank)) for rank in chosen])
    return found


def count_fake(designs: list[Design], rank: int) -> list[RankCount]:
    """Global rank `rank` of each design under a fake process group."""
    return _counted(designs, [(rank, rank) for _ in designs])


def count_ranks(designs: list[Design], ranks: list[int]) -> list[RankCount]:
    """One pipeline rank of each design under a fake process group, at the first of its other ranks."""
    pairs = zip(designs, ranks, strict=True)
    return _counted(designs, [(entry.plan.first_rank_of(rank), rank) for entry, rank in pairs])


def _counted(designs: list[Design], ranks: list[tuple[int, int]]) -> list[RankCount]:
    """Of each design the first of its two ranks, told as the second."""
    from meshwright.run.dry.tally import tally
    from meshwright.run.dry.trace import traced

    pairs = zip(designs, ranks, strict=True)
    return [_told(tally(traced(entry, rank=rank, recipes=known())), told) for entry, (rank, told) in pairs]


def count_with_and_without_recipes(entry: Design) -> tuple[RankCount, RankCount]:
    """Global rank 0, where results of operators are remembered and where torch works each out."""
    from meshwright.run.dry.recipes import Recipes
    from meshwright.run.dry.tally import tally
    from meshwright.run.dry.trace import traced

    class Forgetful(Recipes):
        def run(self, mode: object, func: object, args: object, options: object, otherwise: object) -> object:
            assert callable(otherwise)
            return otherwise()

    one, other = (_told(tally(traced(entry, rank=0, recipes=recipes)), 0) for recipes in (Recipes(), Forgetful()))
    return one, other


def count_probed(designs: list[Design], rank: int) -> list[RankCount]:
    """Pipeline rank `rank` of each design, from probes where they tell it."""
    from meshwright.run.dry.rank import Counter

    return [Counter(design=entry, recipes=known()).count(rank) for entry in designs]


def count_real(entry: Design) -> RankCount:
    """This rank of the default process group, whose peers are real."""
    import torch.distributed as dist

    from meshwright.run.dry.tally import tally
    from meshwright.run.dry.trace import counted_step

    return _told(tally(counted_step(entry, device="cpu")), dist.get_rank())


def _told(step: object, rank: int) -> RankCount:
    from meshwright.run.dry.tally import Tally

    assert isinstance(step, Tally)
    return RankCount(rank=rank, memory=step.top, flops=step.flops, calls=step.calls, bytes=step.bytes)


def count_whole(designs: list[Design]) -> list[list[RankCount]]:
    """Every pipeline rank of each design, whole."""
    from meshwright.run.dry.rank import Counter

    return [
        [counter.count(rank) for rank in range(counter.design.plan.pipeline)]
        for counter in (Counter(design=entry, whole=True, recipes=known()) for entry in designs)
    ]


def told_and_performed(entry: Design, rank: int) -> tuple[list[str], list[str]]:
    """What pipeline rank `rank` receives and runs in the order that is told, and in that of its real step."""
    from meshwright.run.dry.events import Kind
    from meshwright.run.dry.names import RECEIVE
    from meshwright.run.dry.order import Orders
    from meshwright.run.dry.trace import traced

    performed = []
    for event in traced(entry, rank=entry.plan.first_rank_of(rank), recipes=known()):
        if event.kind is Kind.RECEIVE:
            performed.append(RECEIVE)
        elif event.kind is Kind.MARK and "|" in event.what and not event.what.startswith("after "):
            performed.append(event.what)
    told = list(Orders(plan=entry.plan).of(rank))
    return told, [name for name in performed if name in {RECEIVE, *told}]


def passes_told(entry: Design, rank: int) -> list[int]:
    """The numbers of passes that are told of while pipeline rank `rank` is traced, in the counted step."""
    from meshwright.run.dry.trace import traced

    told: list[int] = []
    traced(entry, rank=entry.plan.first_rank_of(rank), recipes=known(), passed=told.append)
    last = len(told) - told[::-1].index(1) - 1
    return sorted(set(told[last:]))


def count_in_small_buckets(designs: list[Design], most: int) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Bytes predicted and counted of the last pipeline rank of each design, whose buckets hold `most` bytes."""
    from unittest.mock import patch

    from meshwright.cost import traffic
    from meshwright.parallel.shard_buckets import ShardBuckets

    defaults = {"bucket_bytes": most}
    last = [entry.plan.pipeline - 1 for entry in designs]
    with (
        patch("meshwright.cost.traffic.BUCKET_BYTES", most),
        patch.object(ShardBuckets.__init__, "__kwdefaults__", defaults),
    ):
        counted = count_ranks(designs, last)
        told = [traffic(entry, rank=rank) for entry, rank in zip(designs, last, strict=True)]
    return [(dict(one.bytes), dict(other.bytes)) for one, other in zip(told, counted, strict=True)]
