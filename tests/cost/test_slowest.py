"""All wait for the slowest of equal devices, and the more there are the slower it is."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright import catalog
from meshwright.cost import predict
from meshwright.cost.slowest import slowest
from meshwright.spec.job import JobSpec
from meshwright.spec.report import LineName
from tests.cost.cost_examples import design, even_layout, llama
from tests.cost.slow_device import slowest as added_up

MODEL = llama(width=4096, hidden=14336, heads=32, layers=4, vocab=32000)


@pytest.mark.parametrize("count", [1, 2, 6, 8, 72, 1024, 27648, 100_000])
def test_it_is_as_slow_as_the_greatest_of_so_many_normal_figures(count: int) -> None:
    assert slowest(0.01, np.array([float(count)]))[0] == pytest.approx(added_up(0.01, count), abs=6e-4)


def test_counts_may_differ_from_row_to_row() -> None:
    counts = np.array([1.0, 8.0, 8.0, 512.0])
    each = [slowest(0.02, counts[row : row + 1])[0] for row in range(4)]
    assert slowest(0.02, counts).tolist() == each
    assert each == sorted(each)
    assert (slowest(0.0, counts) == 1.0).all()


def step(cluster: str, *, spread: float, replicas: int):
    machines = catalog.load_cluster(cluster)
    (group,) = machines.groups
    machines = replace(machines, groups=(replace(group, device=replace(group.device, spread=spread)),))
    layout = even_layout(layers=len(MODEL.layers), pipeline=1)
    job = JobSpec(sequence_length=4096)
    return predict(design(MODEL, machines, job=job, replicate=replicas, microbatch=1, layout=layout))


def test_work_takes_longer_where_devices_differ_and_links_do_not() -> None:
    alike, unlike = (step("64xH100", spread=spread, replicas=64) for spread in (0.0, 0.01))
    factor = added_up(0.01, 64)
    for name in (LineName.FORWARD, LineName.BACKWARD):
        assert unlike.step.find(name).seconds == pytest.approx(factor * alike.step.find(name).seconds, rel=1e-3)
    assert unlike.step.find(LineName.OPTIMIZER) == alike.step.find(LineName.OPTIMIZER)
    told = [note for note in unlike.notes if "slowest of 64 devices" in note]
    assert len(told) == 1
    assert not [note for note in alike.notes if "slowest" in note]


def test_one_device_waits_for_none() -> None:
    alike, unlike = (step("1xH100", spread=spread, replicas=1) for spread in (0.0, 0.01))
    assert alike == unlike
