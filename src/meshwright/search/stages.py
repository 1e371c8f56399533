"""Where stages begin: block times from the cost model's operators, device speeds from the cluster, exact balance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import TypedDict

import numpy as np

from meshwright.cost.compute import part_seconds, with_host
from meshwright.cost.operators import block_work
from meshwright.cost.rates import rates
from meshwright.cost.sizes import operator_sizes
from meshwright.cost.software import Software
from meshwright.cost.stacks import software_of
from meshwright.cost.table import PRECISIONS
from meshwright.search.balance import Balancer
from meshwright.spec.cluster import ClusterSpec, DeviceSpec, Precision
from meshwright.spec.job import JobSpec
from meshwright.spec.model import Block, ModelSpec


class Settings(TypedDict):
    """What block times depend on beside the model, the device and the job."""

    precision: Precision
    software: Software
    tensor: int
    microbatch: int


BalancedStages = Callable[[int, Sequence[int], int], Sequence[int]]


def block_seconds(
    model: ModelSpec,
    device: DeviceSpec,
    job: JobSpec,
    *,
    precision: Precision,
    software: Software,
    tensor: int = 1,
    microbatch: int = 1,
    sequence_parallel: bool = False,
) -> tuple[float, ...]:
    """Seconds of every block, forward and backward, for one microbatch on one idle device and its tensor group."""
    index = np.array([PRECISIONS.index(precision)])
    in_turn = software.host_in_turn(device.kind)
    figures = rates(device, precision=index, length=job.sequence_length, software=software)
    ranks = np.array([float(tensor)])
    sizes = operator_sizes(
        batch=np.array([float(microbatch)]),
        tensor=ranks,
        split=ranks if sequence_parallel else np.ones(1),
        itemsize=figures.itemsize,
        device=device,
        job=job,
        software=software,
    )

    @cache
    def seconds(block: Block) -> float:
        total = 0.0
        for part in block_work(block, sizes):
            spent = part_seconds(part, device=device, rates=figures, software=software)
            total += float(with_host(spent.forward, spent.host_forward, in_turn=in_turn)[0])
            total += float(with_host(spent.backward, spent.host_backward, in_turn=in_turn)[0])
        return total

    return tuple(seconds(block) for block in model.blocks)


def balanced_stages(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: JobSpec,
    *,
    precision: Precision,
    tensor: int = 1,
    microbatch: int = 1,
    weights: Sequence[float] = (),
) -> BalancedStages:
    """A function (pipeline, rank of every stage, devices in use) -> boundaries of stages, the slowest stage as fast as
    it can be.

    A stage is as fast as the slowest device of the pipeline rank that holds it: pipeline ranks are equal runs of
    the devices in use, the first of the cluster, so that on uneven clusters slower machines hold fewer blocks, at both
    ends of a V shape that they begin. `weights` are how often as much as others each stage's layers count, once where
    it is not said.
    """
    first = cluster.groups[0].device
    settings: Settings = {
        "precision": precision,
        "software": software_of(job, cluster),
        "tensor": tensor,
        "microbatch": microbatch,
    }
    seconds = block_seconds(model, first, job, **settings)
    balancer = Balancer(seconds)
    speeds = [
        sum(seconds) / sum(block_seconds(model, group.device, job, **settings)) if group.device != first else 1.0
        for group in cluster.groups
    ]

    def boundaries(pipeline: int, ranks: Sequence[int], devices: int) -> Sequence[int]:
        each = rank_speeds(cluster, speeds, pipeline=pipeline, devices=devices)
        speeds_of_stages = tuple(each[rank] for rank in ranks)
        if weights:
            speeds_of_stages = tuple(speed / weight for speed, weight in zip(speeds_of_stages, weights, strict=True))
        return balancer.bounds(len(ranks), speeds=speeds_of_stages)

    return boundaries


def rank_speeds(cluster: ClusterSpec, speeds: Sequence[float], *, pipeline: int, devices: int) -> tuple[float, ...]:
    """The speed of the slowest device of every pipeline rank of a plan on the first `devices` of the cluster, `speeds`
    being those of the cluster's groups; ones where all are equally fast."""
    if len(set(speeds)) == 1:
        return (1.0,) * pipeline
    ends = tuple(accumulate(group.num_devices for group in cluster.groups))
    starts = (0, *ends)
    found = []
    for rank in range(pipeline):
        low, high = rank * devices / pipeline, (rank + 1) * devices / pipeline
        held = (speed for speed, start, end in zip(speeds, starts, ends, strict=False) if start < high and end > low)
        found.append(min(held))
    return tuple(found) if len(set(found)) > 1 else (1.0,) * pipeline
