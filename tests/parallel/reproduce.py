"""One drawn plan beside one device: python -m tests.parallel.reproduce 'DRAW', as a failing test prints it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import numpy

from tests.parallel import parity_cases
from tests.parallel.draws import Draw, build, read, refused
from tests.parallel.parity_cases import Documents, Masks, Outcome, RankOutcome
from tests.parallel.simpler import simpler
from tests.support.pool import Pool

# What a rank does of a design.
Rank = Callable[..., RankOutcome]
MOST_TRIES = 200
# How far a loss and the whole gradient may be from those of fp64, as parts of them.
NEAR = {"fp32": 1e-4, "bf16": 0.1, "fp8": 0.3, "fp8-row": 0.3, "fp8-block": 0.3, "mxfp8": 0.3, "nvfp4": 0.8}
NEAR_GRADIENTS = {"int8": 0.1, "fp8": 0.1, "bf16": 0.1}
# How far a second update may be by moments that lie in blocks of one byte, of which each rank has its own.
NEAR_MOMENTS = {"dynamic8": 0.05, "fp8": 0.05}


def beside_one_device(pool: Pool, draw: Draw, *, rank: Rank = parity_cases.one_rank) -> None:
    """Every rank's losses, norm, gradients and parameters are those of one device; AssertionError where not."""
    given = (build(draw), Documents(draw.documents), Masks(draw.masks), draw.steps)
    found = pool.run(rank, *given, ranks=draw.ranks)
    expected, narrow = _reference(draw), _near_moments(draw)
    rough = max(NEAR.get(draw.precision, 0.0), NEAR_GRADIENTS.get(draw.gradients, 0.0))
    if rough:
        parity_cases.compare_roughly(expected, found, bound=rough)
    elif narrow:
        _compare_second_updates(expected, found, bound=narrow)
    else:
        parity_cases.compare(expected, found)


def _near_moments(draw: Draw) -> float | None:
    """How far the second update may be, where there is one by such moments."""
    return NEAR_MOMENTS.get(draw.moments) if draw.steps > 1 else None


def _compare_second_updates(expected: Outcome, found: Sequence[RankOutcome], *, bound: float) -> None:
    """As on one device up to the second update, of which less than `bound` of it is off."""
    parity_cases.compare(expected, found, whats=("gradients",))
    assert expected.before is not None
    far = change = 0.0
    for name, part in (pair for outcome in found for pair in outcome.parameters.items()):
        wanted, first = part.of(expected.parameters[name]), part.of(expected.before.parameters[name])
        far += float(numpy.square(part.values - wanted).sum())
        change += float(numpy.square(wanted - first).sum())
    assert far**0.5 <= bound * change**0.5, f"{(far / change) ** 0.5:.3f} of the second update is off"


def _reference(draw: Draw) -> Outcome:
    design = build(draw)
    return parity_cases.one_device(
        design.model,
        count=design.plan.sequences,
        length=design.plan.sequence_length,
        z_loss=design.job.z_loss,
        optimizer=design.job.optimizer,
        packed=Documents(draw.documents),
        frozen=design.plan.frozen_blocks,
        masks=Masks(draw.masks),
        steps=draw.steps,
    )


def check(pool: Pool, draw: Draw, *, rank: Rank = parity_cases.one_rank) -> None:
    """As `beside_one_device`; where not, the smallest draw that fails is found and told with how to run it."""
    failure = _failure(pool, draw, rank=rank)
    if failure is None:
        return
    smallest, failure = shrink(pool, draw, failure, rank=rank)
    raise AssertionError(f"python -m tests.parallel.reproduce '{smallest}'\n{failure}") from None


def shrink(
    pool: Pool, draw: Draw, failure: AssertionError, *, rank: Rank = parity_cases.one_rank
) -> tuple[Draw, AssertionError]:
    """The last of a chain of simpler draws that all fail, and how it fails."""
    tries = 0
    while True:
        for one in simpler(draw):
            tries += 1
            found = _failure(pool, one, rank=rank)
            if found is not None:
                draw, failure = one, found
                break
            if tries > MOST_TRIES:
                return draw, failure
        else:
            return draw, failure


def _failure(pool: Pool, draw: Draw, *, rank: Rank) -> AssertionError | None:
    try:
        beside_one_device(pool, draw, rank=rank)
    except AssertionError as failure:
        return failure
    return None


def main(arguments: Sequence[str], *, rank: Rank = parity_cases.one_rank) -> None:
    draw = read(arguments[0])
    for problem in refused(draw):
        print(problem)
    pool = Pool()
    try:
        beside_one_device(pool, draw, rank=rank)
    finally:
        pool.close()
    print(f"{draw.ranks} ranks give what one device gives")


if __name__ == "__main__":
    main(sys.argv[1:])
