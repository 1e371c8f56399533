from __future__ import annotations

from itertools import pairwise

import numpy as np

from meshwright.cost.stacks import SOFTWARE
from meshwright.search.lies import lies
from meshwright.search.stages import balanced_stages, block_seconds, rank_speeds
from meshwright.spec.cluster import Precision
from tests.search import search_samples as samples


def test_block_times_grow_with_the_work() -> None:
    model, device, job = samples.model(vocab=4096), samples.device(), samples.job()
    asked = {"precision": Precision.BF16, "software": SOFTWARE["torch"]}
    one = block_seconds(model, device, job, **asked)
    assert len(one) == len(model.blocks)
    assert len(set(one[1:-1])) == 1, "equal layers take equal times"
    assert one[-1] > one[0] > 0, "the head multiplies, the embedding looks up"
    larger = block_seconds(model, device, job, **asked, microbatch=64)
    assert all(few <= many for few, many in zip(one, larger, strict=True))
    assert sum(one) < sum(larger)


def test_equal_machines_get_equal_stages_but_for_the_ends() -> None:
    boundaries = balanced_stages(samples.model(layers=16), samples.cluster(), samples.job(), precision=Precision.BF16)
    sizes = [stop - start for start, stop in pairwise(boundaries(4, range(4), 8))]
    assert sum(sizes) == 18
    assert max(sizes) - min(sizes) <= 2


def test_slower_machines_hold_fewer_blocks() -> None:
    fast, slow = samples.device(name="fast", speed=4.0), samples.device(name="slow")
    cluster = samples.cluster(samples.nodes(of=fast, site="a"), samples.nodes(of=slow, site="b"))
    boundaries = balanced_stages(samples.model(layers=30), cluster, samples.job(length=4096), precision=Precision.BF16)
    first, second = (stop - start for start, stop in pairwise(boundaries(2, range(2), 16)))
    assert first > second


def test_both_ends_of_a_v_shape_are_those_of_the_machines_that_it_begins_on() -> None:
    fast, slow = samples.device(name="fast", speed=4.0), samples.device(name="slow")
    cluster = samples.cluster(samples.nodes(of=slow, site="a"), samples.nodes(of=fast, site="b"))
    boundaries = balanced_stages(samples.model(layers=30), cluster, samples.job(length=4096), precision=Precision.BF16)
    sizes = [stop - start for start, stop in pairwise(boundaries(2, (0, 1, 1, 0), 16))]
    assert max(sizes[0], sizes[3]) < min(sizes[1:3])
    loop = [stop - start for start, stop in pairwise(boundaries(2, (0, 1, 0, 1), 16))]
    assert max(loop[0], loop[2]) < min(loop[1], loop[3])


def test_a_pipeline_rank_is_as_fast_as_its_slowest_machine() -> None:
    cluster = samples.cluster(samples.nodes(num_nodes=2, site="a"), samples.nodes(num_nodes=1, site="b"))
    assert rank_speeds(cluster, (1.0, 0.5), pipeline=3, devices=24) == (1.0, 1.0, 0.5)
    assert rank_speeds(cluster, (1.0, 0.5), pipeline=2, devices=24) == (1.0, 0.5)
    assert rank_speeds(cluster, (1.0, 1.0), pipeline=2, devices=24) == (1.0, 1.0)


def test_machines_that_a_plan_leaves_out_do_not_count() -> None:
    cluster = samples.cluster(samples.nodes(num_nodes=2, site="a"), samples.nodes(num_nodes=1, site="b"))
    assert rank_speeds(cluster, (1.0, 0.5), pipeline=4, devices=16) == (1.0,) * 4
    assert rank_speeds(cluster, (0.5, 1.0), pipeline=4, devices=16) == (1.0,) * 4, "equally slow is equally fast"
    assert rank_speeds(cluster, (1.0, 0.5), pipeline=5, devices=20) == (1.0, 1.0, 1.0, 1.0, 0.5)


def test_frames_are_told_apart_by_the_kinds_of_devices_under_their_ranks() -> None:
    slow = samples.nodes(num_nodes=1, of=samples.device(name="slow"), site="b")
    cluster = samples.cluster(samples.nodes(num_nodes=2, site="a"), slow)
    found = lies(cluster, pipeline=np.array([2, 2, 2, 1, 3]), world=np.array([8, 16, 24, 24, 24]))
    assert found.of.tolist() == [0, 0, 1, 0, 1]
    assert found.devices == {(1, 0): 24, (2, 0): 8, (2, 1): 24, (3, 1): 24}
    alike = samples.cluster(samples.nodes(num_nodes=2, site="a"), samples.nodes(num_nodes=1, site="b"))
    assert not lies(alike, pipeline=np.array([2, 3]), world=np.array([24, 24])).of.any()
