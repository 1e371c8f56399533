"""When ranks have settled, which rank each matrix takes, and whether a loss has left its trend: pure functions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshwright.cost.low_rank import Candidate, grouped, rounded
from meshwright.spec.low_rank import RANK_MULTIPLE, Cuttlefish, LowRank, Pufferfish, Ranks, steps_of

EMA_POINTS = 5  # 2305.02538, appendix, of transformers


def found_ranks(found: Iterable[Candidate], tracks: Mapping[str, Sequence[float]], spec: Cuttlefish) -> Ranks:
    """Every matrix with the rank that its stable ranks call for: the last one, scaled by the full rank over the first.

    A matrix that would need more than what saves parameters stays whole.
    """
    chosen = []
    for one in found:
        scaled = _scaled(tracks[one.key]) * one.full_rank
        wanted = min(max(scaled, spec.least_ratio * one.full_rank), one.full_rank)
        if math.ceil(wanted / RANK_MULTIPLE) * RANK_MULTIPLE <= one.most:
            chosen.append((one, rounded(one, wanted)))
    return grouped(chosen)


def rank_share(found: Collection[Candidate], tracks: Mapping[str, Sequence[float]]) -> float:
    """The mean over all matrices of the share of their full rank that their stable ranks call for now."""
    return sum(min(1.0, _scaled(tracks[one.key])) for one in found) / len(found)


def _scaled(track: Sequence[float]) -> float:
    """The share of full rank that the last of a track stands for: all of it at the start."""
    return track[-1] / max(track[0], 1.0)


def smoothed(track: Sequence[float]) -> list[float]:
    """The exponential moving average of a track, of weight 2 / (EMA_POINTS + 1)."""
    weight, values = 2.0 / (EMA_POINTS + 1), list(track[:1])
    for value in track[1:]:
        values.append(values[-1] + weight * (value - values[-1]))
    return values


def has_settled(track: Sequence[float], spec: Cuttlefish) -> bool:
    """The smoothed track changed by at most `tolerance` of itself in each of the last `settled` intervals.

    2305.02538 asks this of absolute changes, whose size is another in every architecture.
    """
    values = smoothed(track)
    if len(values) <= spec.settled:
        return False
    last = values[-spec.settled - 1 :]
    return all(abs(after - before) <= spec.tolerance * abs(before) for before, after in pairwise(last))


def is_due(step: int, spec: LowRank, *, total_steps: int, tracks: Mapping[str, Sequence[float]]) -> bool:
    """Whether the switch follows step `step`: the given one, or ranks have settled, or they have had their time."""
    if isinstance(spec, Pufferfish):
        return step >= steps_of(spec.switch_at, total_steps=total_steps)
    if step >= steps_of(spec.switch_by, total_steps=total_steps):
        return True
    return bool(tracks) and all(has_settled(track, spec) for track in tracks.values())


def rate_factor(step: int, *, since: int, steps: int) -> float:
    """What the learning rate of `step` is multiplied by where it rises again over `steps` steps from `since` on."""
    return min(1.0, (step - since + 1) / steps)


def trend(losses: Sequence[float], *, first_step: int, at: float) -> float:
    """The loss at step `at` on the line through `losses`, of steps `first_step` on, over the logarithm of the step.

    The least squares line of a loss that falls by a power law is straight there; one that rises counts as level.
    """
    x = [math.log(first_step + place) for place in range(len(losses))]
    mean_x, mean_y = sum(x) / len(x), sum(losses) / len(losses)
    spread = sum((value - mean_x) ** 2 for value in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, losses, strict=True)) / spread if spread else 0.0
    return mean_y + min(slope, 0.0) * (math.log(at) - mean_x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """What a run's loss has come to be after a switch, beside what the dense model's was on its way to."""

    loss: float
    expected: float
    tolerance: float

    @property
    def broken(self) -> bool:
        return not self.loss <= self.expected * (1.0 + self.tolerance)


def guard(before: Sequence[float], after: Sequence[float], *, switched: int, last: int, tolerance: float) -> Guard:
    """Of the losses of the steps up to `switched`, and of those up to `last`."""
    middle = last - (len(after) - 1) / 2
    expected = trend(before, first_step=switched - len(before) + 1, at=middle)
    return Guard(loss=sum(after) / len(after), expected=expected, tolerance=tolerance)


def window(spec: LowRank, *, total_steps: int) -> int:
    """Steps whose losses are compared: as many as the learning rate takes to rise, and at least eight."""
    return max(8, steps_of(spec.rewarm, total_steps=total_steps))
