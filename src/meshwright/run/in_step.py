"""A device's figures as they hold inside a step: levels from operators timed in a real decoder, shapes from probes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean

import numpy as np

from meshwright.cost.compute import part_seconds
from meshwright.cost.operators import block_work
from meshwright.cost.rates import rates
from meshwright.cost.sizes import operator_sizes
from meshwright.cost.stacks import software
from meshwright.cost.table import PRECISIONS
from meshwright.run.measure_layers import SEQUENCE, LayerTimes, layered_model
from meshwright.spec.cluster import DeviceSpec
from meshwright.spec.job import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """What the cost model says of `layered_model`: seconds of products and of scores, bytes of element-wise work."""

    product_seconds: float
    scores_seconds: float
    element_bytes: float


def as_in_a_step(device: DeviceSpec, times: Sequence[LayerTimes]) -> DeviceSpec:
    """`device` with its curves, attention rates and memory fraction at the levels of `times`; as it is without any."""
    if not times:
        return device
    matrix, bandwidths, scores = dict(device.matrix), [], []
    for entry in times:
        priced = _price(device, entry)
        curve = matrix[entry.precision]
        level = priced.product_seconds / entry.product_seconds
        matrix[entry.precision] = replace(curve, fraction=curve.fraction * level)
        scores.append(priced.scores_seconds / entry.scores_seconds)
        bandwidths.append(priced.element_bytes / entry.element_seconds)
    level = geometric_mean(scores)
    attention = tuple(
        replace(rate, forward_flops=level * rate.forward_flops, backward_flops=level * rate.backward_flops)
        for rate in device.attention_rates
    )
    bandwidth = geometric_mean(bandwidths)
    return replace(
        device,
        matrix=matrix,
        attention_rates=attention,
        memory_bandwidth=max(device.memory_bandwidth, bandwidth),
        memory_fraction=min(bandwidth / device.memory_bandwidth, 1.0),
    )


def _price(device: DeviceSpec, times: LayerTimes) -> _Priced:
    """The three kinds of work of a forward and backward, apart: an infinite memory leaves the products' own time."""
    job, features = JobSpec(sequence_length=SEQUENCE), software("torch")
    fast = replace(device, memory_bandwidth=math.inf, memory_fraction=1.0)
    figures = rates(fast, precision=np.array([PRECISIONS.index(times.precision)]), length=SEQUENCE, software=features)
    ones = np.ones(1)
    sizes = operator_sizes(
        batch=times.sequences * ones,
        tensor=ones,
        split=ones,
        itemsize=figures.itemsize,
        device=device,
        job=replace(job, data=replace(job.data, document_mask=False)),
        software=features,
    )
    parts = [part for block in layered_model().blocks for part in block_work(block, sizes)]
    alone = [replace(part, products=()) for part in parts]
    whole, scores = (
        sum(
            float((spent.forward + spent.backward)[0])
            for spent in (part_seconds(part, device=fast, rates=figures, software=features) for part in entries)
        )
        for entries in (parts, alone)
    )
    return _Priced(
        product_seconds=whole - scores,
        scores_seconds=scores,
        element_bytes=sum(float(np.sum(part.traffic) + np.sum(part.backward_traffic)) for part in parts),
    )
