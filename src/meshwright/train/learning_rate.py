"""The learning rate as a pure function of the step: warm-up, then cosine, WSD or constant."""

from __future__ import annotations

import math

from meshwright.spec.job import Decay, LearningRate


def learning_rate(step: int, *, shape: LearningRate, peak: float, total_steps: int) -> float:
    """The rate of optimizer step `step` (0 is the first) of `total_steps`.

    Warm-up rises linearly and reaches `peak` at its last step. Cosine falls to `final_fraction * peak` at the last
    step of the run (1608.03983); WSD stays at `peak` and falls linearly over the last `decay_fraction` of the run
    (2404.06395); after the end of the run the rate stays at its last value.
    """
    warmup = warmup_steps(shape, total_steps=total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    last, floor = max(total_steps - 1, 0), shape.final_fraction * peak
    step = min(step, last)
    if shape.decay is Decay.CONSTANT:
        return peak
    if shape.decay is Decay.COSINE:
        span = max(last - warmup, 1)
        return floor + 0.5 * (peak - floor) * (1.0 + math.cos(math.pi * (step - warmup) / span))
    decay = max(1, round(shape.decay_fraction * total_steps))
    start = max(last - decay, warmup - 1)
    if step <= start:
        return peak
    return peak - (peak - floor) * (step - start) / max(last - start, 1)


def warmup_steps(shape: LearningRate, *, total_steps: int) -> int:
    """Steps of warm-up: those asked for, else the fraction of the run, and never more than the run."""
    asked = shape.warmup_steps or round(shape.warmup_fraction * total_steps)
    return min(asked, total_steps)
