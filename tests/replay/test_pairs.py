"""How many pairs of runs are in the order predicted, and how many could be."""

import math
from dataclasses import replace
from random import Random

import pytest

from meshwright.cost.stacks import SOFTWARE, software
from meshwright.replay.express import express
from meshwright.replay.pairs import Told, order
from tests.replay.test_validate import row


def told(pace: float, predicted: float, noise: float = 0.02) -> Told:
    return Told(pace=pace, predicted=predicted, noise=noise)


def test_runs_of_one_plan_have_no_order_that_a_prediction_could_tell() -> None:
    found = order([told(1.0, 5.0), told(1.1, 5.0)])
    assert found is not None
    assert (found.right, found.most) == (0.5, 0.5)
    assert order([told(1.0, 5.0), told(1.01, 5.0)]) is None
    assert order([told(1.0, 5.0)]) is None


def test_two_plans_have_one_order_whichever_of_their_runs_are_compared() -> None:
    """One plan ran at 1.0 and 1.3 and another at 1.1 and 1.2: two of four pairs are right in either order."""
    first, second = [1.0, 1.3], [1.1, 1.2]
    for faster, slower in ((first, second), (second, first)):
        runs = [told(pace, 1.0, 0.0) for pace in faster] + [told(pace, 2.0, 0.0) for pace in slower]
        found = order(runs)
        assert found is not None
        assert found.right == found.most == pytest.approx((2 + 0.5 * 2) / 6)


def test_no_prediction_has_more_pairs_right_than_could_be() -> None:
    random = Random(1)
    for _ in range(200):
        runs = [told(random.uniform(1.0, 1.5), float(random.randrange(4))) for _ in range(random.randrange(2, 9))]
        found = order([replace(each, predicted=1.0 + each.predicted) for each in runs])
        if found is None:
            continue
        assert 0.0 <= found.right <= found.most <= 1.0
        perfect = order([replace(each, predicted=each.pace) for each in runs])
        assert perfect is not None
        assert perfect.right == perfect.most == 1.0


def test_ties_are_told_as_before_the_most_was() -> None:
    found = order([told(1.0, 3.0), told(2.0, 2.0), told(3.0, 2.0), told(3.01, 1.0)])
    assert found is not None
    pairs = [0.0, 0.0, 0.0, 0.5, 0.0]  # the last two differ by less than the noise
    assert found.right == pytest.approx(math.fsum(pairs) / 5)


def test_a_run_whose_host_waits_for_every_kernel_says_so() -> None:
    plain, waiting = (express(row(extra=f"CUDA_LAUNCH_BLOCKING={value}")).design.job.software for value in "01")
    assert waiting == f"{plain}-blocking"
    assert plain in SOFTWARE
    assert software(waiting).waits_for_kernels
    assert not software(plain).waits_for_kernels
