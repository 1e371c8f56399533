from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.search.balance import Balancer


def least_bottleneck(seconds: tuple[float, ...], stages: int, speeds: tuple[float, ...]) -> float:
    """Dynamic programming over (blocks left, stages left): the exact answer by the definition."""

    @cache
    def best(stop: int, stage: int) -> float:
        if stage == 0:
            return sum(seconds[:stop]) / speeds[0]
        cuts = range(stage, stop)
        return min(max(best(cut, stage - 1), sum(seconds[cut:stop]) / speeds[stage]) for cut in cuts)

    return best(len(seconds), stages - 1)


def bottleneck(bounds: tuple[int, ...], seconds: tuple[float, ...], speeds: tuple[float, ...]) -> float:
    return max(sum(seconds[bounds[s] : bounds[s + 1]]) / speed for s, speed in enumerate(speeds))


@settings(max_examples=150)
@given(st.data())
def test_the_slowest_stage_is_as_fast_as_any_partition_makes_it(data: st.DataObject) -> None:
    seconds = tuple(data.draw(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=12)))
    stages = data.draw(st.integers(1, len(seconds)))
    speeds = tuple(data.draw(st.lists(st.floats(0.5, 4.0), min_size=stages, max_size=stages)))
    bounds = Balancer(seconds).bounds(stages, speeds=speeds)
    assert bounds[0] == 0
    assert bounds[-1] == len(seconds)
    assert all(low < high for low, high in pairwise(bounds))
    assert bottleneck(bounds, seconds, speeds) <= least_bottleneck(seconds, stages, speeds) * (1 + 1e-6) + 1e-12


def test_embedding_and_head_are_work() -> None:
    seconds = (0.1, *(1.0 for _ in range(126)), 0.7)
    bounds = Balancer(seconds).bounds(16)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    assert max(sizes) == 8
    assert sizes[-1] == 8, "seven layers and the head"
    assert sum(sizes) == 128


def test_fast_machines_hold_more_blocks() -> None:
    bounds = Balancer([1.0] * 12).bounds(2, speeds=(1.0, 2.0))
    assert bounds == (0, 4, 12)


def test_one_table_serves_every_number_of_stages() -> None:
    seconds = [0.5, 3.0, 1.0, 1.0, 2.0, 0.25, 4.0]
    shared = Balancer(seconds)
    assert [shared.bounds(stages) for stages in (3, 7, 1, 5)] == [
        Balancer(seconds).bounds(stages) for stages in (3, 7, 1, 5)
    ]


def test_more_stages_than_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="2 blocks do not fill 3 stages"):
        Balancer([1.0, 1.0]).bounds(3)
