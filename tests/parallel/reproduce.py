"""One drawn plan beside one device: python -m tests.parallel.reproduce 'DRAW', as a failing test prints it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from tests.parallel import parity_cases
from tests.parallel.draws import Draw, build, read, refused
from tests.parallel.parity_cases import Documents, Masks, Outcome, RankOutcome
from tests.parallel.simpler import simpler
from tests.support.designs import SEQUENCE
from tests.support.pool import Pool

# What a rank does of a design.
Rank = Callable[..., RankOutcome]
MOST_TRIES = 120
# How far a loss and the whole gradient may be from those of fp64, as parts of them.
NEAR = {"fp32": 1e-4, "bf16": 0.1, "fp8": 0.3, "fp8-row": 0.3, "fp8-block": 0.3, "mxfp8": 0.3, "nvfp4": 0.8}
NEAR_GRADIENTS = {"int8": 0.1, "fp8": 0.1}


def beside_one_device(pool: Pool, draw: Draw, *, rank: Rank = parity_cases.one_rank) -> None:
    """Every rank's losses, norm, gradients and parameters are those of one device; AssertionError where not."""
    given = (build(draw), Documents(draw.documents), Masks(draw.masks))
    found = pool.run(rank, *given, ranks=draw.ranks)
    expected, bound = _reference(draw), NEAR.get(draw.precision, NEAR_GRADIENTS.get(draw.gradients))
    if bound is None:
        parity_cases.compare(expected, found)
    else:
        parity_cases.compare_roughly(expected, found, bound=bound)


def _reference(draw: Draw) -> Outcome:
    design = build(draw)
    return parity_cases.one_device(
        design.model,
        count=design.plan.batch,
        length=SEQUENCE,
        z_loss=design.job.z_loss,
        optimizer=design.job.optimizer,
        packed=Documents(draw.documents),
        frozen=design.plan.frozen_blocks,
        masks=Masks(draw.masks),
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
