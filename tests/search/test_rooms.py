"""What fills smaller devices of unlike machines is known before it is priced."""

from __future__ import annotations

import numpy as np

from meshwright.search.bound import Bounds
from meshwright.search.decide import legal_space
from meshwright.search.floors import Floors
from meshwright.search.prices import price
from meshwright.search.rooms import largest_room, scarcity
from meshwright.spec.job import Constraints
from tests.search import search_samples as samples

SMALL = samples.nodes(devices_per_node=2, of=samples.device(memory_bytes=1e7, name="small"))
MODEL, JOB = samples.model(layers=4), samples.job(sequences=8, constraints=Constraints(devices="any"))


def test_ranks_with_less_room_than_the_largest_device_are_known_not_to_fit() -> None:
    """As surely as so many times the bytes would be too many on the largest; what fits is never less likely to."""
    cluster = samples.cluster(samples.nodes(devices_per_node=2), SMALL)
    space = legal_space(MODEL, cluster, JOB)
    frame = space.frame_of(np.arange(len(space.keys)))
    prices = price(space.table, model=MODEL, cluster=cluster, job=JOB)
    floors = Floors(space, model=MODEL, cluster=cluster, job=JOB)
    raw = Bounds(space, model=MODEL, cluster=cluster, job=JOB).bytes(space.table, frames=frame)
    told = floors.likely(floors.bytes(space.table, frame), space.table)
    assert np.any((told == 0.0) & (floors.likely(raw, space.table) > 0.5))
    assert not prices.fits[told == 0.0].any()
    assert np.all(told[prices.fits] >= prices.fit_probability[prices.fits] * (1.0 - 1e-9))


def test_rooms_are_those_of_the_devices_that_a_plan_uses() -> None:
    cluster = samples.cluster(SMALL, samples.nodes(devices_per_node=2))
    space = legal_space(MODEL, cluster, JOB)
    table = space.table
    small, large = (group.device.memory_bytes * group.device.usable_fraction for group in cluster.groups)
    assert np.array_equal(largest_room(table, cluster=cluster), np.where(table.world > 2, large, small))
    first = np.zeros((len(table), 1), dtype=np.int64)
    whole = np.flatnonzero(table.world == 4)
    assert np.allclose(scarcity(table.take(whole), first[whole], cluster=cluster), large / small)
    alike = samples.cluster(SMALL)
    assert scarcity(table, first, cluster=alike) == 1.0
