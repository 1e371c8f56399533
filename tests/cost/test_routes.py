"""What is sent between two plans: the least there is, each byte once from each sender, chains by node, in rounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from meshwright.cost.holdings import Box, Contents, Holding, digest, holdings
from meshwright.cost.moved import least_bytes, least_crossing_bytes, unfit
from meshwright.cost.routes import Route, rounds, routes
from meshwright.spec.optimizer import Adafactor, Sgd
from meshwright.spec.plan import ExpertGrid, ScheduleKind, Sharding
from tests.support.designs import Layout, design
from tests.support.models import all_models

TINY = all_models()["tiny"]
MIXTURE = all_models()["mixture_full"]
ZERO3 = Sharding.PARAMETERS
LAYOUTS = (
    Layout(),
    Layout(replicate=4),
    Layout(shard=4, sharding=Sharding.OPTIMIZER),
    Layout(replicate=2, shard=2, sharding=ZERO3),
    Layout(tensor=2, shard=2, sharding=ZERO3, sequence_parallel=True),
    Layout(pipeline=2, chunks=2, kind=ScheduleKind.INTERLEAVED, tensor=2),
    Layout(pipeline=2, shard=2, tensor=2, sharding=ZERO3),
    Layout(shard=3, sharding=ZERO3, batch=12),
)
GRID = Layout(tensor=2, shard=4, sharding=ZERO3, sequence_parallel=True, experts=ExpertGrid(expert=2, tensor=2))
Held = dict[str, Holding]


def of(layout: Layout, processes: tuple[int, ...] | None = None) -> Held:
    return holdings(design(MIXTURE, layout), processes=processes)


def drawn(random: Random) -> tuple[Held, Held]:
    """Two layouts on some of eight processes each."""
    one, other = random.choice((*LAYOUTS, GRID)), random.choice((*LAYOUTS, GRID))
    sides = [tuple(sorted(random.sample(range(8), layout.ranks))) for layout in (one, other)]
    return of(one, sides[0]), of(other, sides[1])


def filled(held: Held, process: int) -> dict[str, np.ndarray]:
    """Which elements of every tensor a process can give."""
    found = {}
    for name, one in held.items():
        found[name] = np.zeros(one.shape, dtype=bool)
        box = one.parts.get(process)
        if box is not None:
            found[name][slices(box)] = True
    return found


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, last) for first, last in zip(box.starts, box.stops, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_every_byte_comes_once_and_nobody_sends_it_twice(seed: int) -> None:
    """Sent element by element, from processes that have it by then, in as many bytes as the least."""
    source, target = drawn(Random(seed))
    assert unfit(source, target) == ()
    has = [filled(source, process) for process in range(8)]
    gave = [{name: np.zeros(one.shape, dtype=bool) for name, one in source.items()} for _ in range(8)]
    received = Counter[int]()
    for hops in rounds(routes(source, target), staging_bytes=2000):
        for hop in hops:
            part = slices(hop.box)
            assert has[hop.sender][hop.name][part].all(), "it has what it sends, from a round before"
            assert not gave[hop.sender][hop.name][part].any(), "it never sent that"
            assert not has[hop.receiver][hop.name][part].any(), "it is new to who gets it"
            gave[hop.sender][hop.name][part] = True
            received[hop.receiver] += hop.bytes
        for hop in hops:
            has[hop.receiver][hop.name][slices(hop.box)] = True
    for name, one in target.items():
        for process, box in one.parts.items():
            assert has[process][name][slices(box)].all()
    assert dict(received) == least_bytes(source, target)


@pytest.mark.parametrize("seed", range(6))
def test_no_byte_enters_a_node_twice_or_one_that_has_it(seed: int) -> None:
    source, target = drawn(Random(100 + seed))
    nodes = (0, 0, 0, 1, 1, 2, 2, 2)
    found = routes(source, target, nodes=nodes)
    crossing = sum(hop.bytes for hop in flat(found) if nodes[hop.sender] != nodes[hop.receiver])
    assert crossing == least_crossing_bytes(source, target, nodes=nodes)
    assert sum(hop.bytes for hop in flat(found)) == sum(least_bytes(source, target).values())


def flat(found: list[Route]) -> list:
    return [hop for hops in rounds(found, staging_bytes=10**9) for hop in hops]


def test_copies_share_what_is_sent_and_one_copy_sends_once() -> None:
    ours, theirs = Layout(replicate=4), Layout(replicate=8, batch=16)
    source, target = of(ours), of(theirs)
    sent = Counter[int]()
    for hop in flat(routes(source, target)):
        sent[hop.sender] += hop.bytes
    assert max(sent.values()) <= 1.01 * min(sent.values()), "four copies give to four"
    alone = of(Layout())
    sent = Counter()
    for hop in flat(routes(alone, target)):
        sent[hop.sender] += hop.bytes
    state = sum(np.prod(one.shape, dtype=int) * one.item_bytes for one in alone.values())
    assert sent[0] == state, "the only one that has it gives it once, and others pass it on"
    assert sum(sent.values()) == 7 * state


@pytest.mark.slow
def test_rounds_are_bounded_and_pass_on_in_turn() -> None:
    found = routes(of(Layout()), of(Layout(replicate=8, batch=16)))
    made = rounds(found, staging_bytes=5000)
    for hops in made:
        for side in ("sender", "receiver"):
            sizes = Counter[int]()
            for hop in hops:
                sizes[getattr(hop, side)] += hop.bytes
            assert max(sizes.values()) <= 5000
    whole = sum(route.bytes for route in found)
    assert len(made) < whole / 5000 * 1.25 + 8, "a chain is filled while it empties"
    assert len(rounds(found, staging_bytes=1)) > 0, "no item is smaller than itself"


def test_a_plan_moved_to_itself_sends_nothing() -> None:
    for layout in (*LAYOUTS, GRID):
        assert routes(of(layout), of(layout)) == []
        assert least_bytes(of(layout), of(layout)) == {}


def test_parts_make_the_whole_and_optimizers_keep_their_own() -> None:
    for spec in (None, Sgd(), Adafactor()):
        entry = design(MIXTURE, GRID)
        entry = entry if spec is None else replace(entry, job=replace(entry.job, optimizer=spec))
        held = holdings(entry)
        for name, one in held.items():
            cover = np.zeros(one.shape, dtype=bool)
            for box in one.parts.values():
                cover[slices(box)] = True
            assert cover.all(), name
        alone = holdings(entry, contents=Contents.PARAMETERS)
        assert alone == {name: one for name, one in held.items() if name.startswith("model.")}


def test_what_cannot_be_moved_is_told_in_words() -> None:
    full = holdings(design(TINY, Layout(shard=2, sharding=ZERO3)))
    bare = holdings(design(TINY, Layout()), contents=Contents.PARAMETERS)
    other = design(TINY, Layout())
    sgd = holdings(replace(other, job=replace(other.job, optimizer=Sgd())))
    assert unfit(full, bare) == ()
    assert told(bare, full) == ["state: the source has no optimizer state"]
    (words,) = told(sgd, full)
    assert "keeps momentum of embedding.tokens.weight, the target's step, exp_avg, exp_avg_sq" in words
    mixture = of(Layout())
    assert [line.split(" and ")[0] for line in told(full, mixture)] == [
        "state: the source has no layers.0.transform.router.weight",
        "state: the target has no layers.0.transform.gate.weight",
    ]
    name = "model.head.norm.weight"
    small = {**full, name: replace(full[name], shape=(16,))}
    assert told(small, full) == ["state: head.norm.weight is (16,), the target has (32,)"]


def test_what_nobody_holds_any_more_is_told() -> None:
    """A process of the source is gone, as after a failure: what it alone held is lost, and copies are not."""
    copies, shards = of(Layout(replicate=4)), of(Layout(shard=4, sharding=ZERO3))
    for held, lost in ((copies, False), (shards, True)):
        left = {
            name: replace(one, parts={process: box for process, box in one.parts.items() if process != 2})
            for name, one in held.items()
        }
        assert bool(unfit(left, of(Layout(replicate=2)))) == lost
        assert digest(left) != digest(held)


def told(source: Held, target: Held) -> list[str]:
    return [str(problem).split(";")[0] for problem in unfit(source, target)]
