"""A spoilt plan is refused by a rule with a name, or it is another legal plan and gives what one device gives."""

from __future__ import annotations

from random import Random

import pytest

from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError
from meshwright.spec.plan import Design
from tests.parallel import parity_cases, spoilt
from tests.parallel.parity_cases import Documents
from tests.support.pool import Pool

EXACT = (Precision.FP32, Precision.FP64)  # gradients that meet in less are not those of one device, nor are products


def allowed(count: int, *, seed: int) -> list[tuple[str, Design]]:
    """Of `count` spoilt plans those that nothing refuses; every other one is refused in words and by name."""
    random, found = Random(seed), []
    for _ in range(count):
        told, design = spoilt.spoilt(random)
        if isinstance(design, ConfigError):
            assert all(problem.what and problem.where.startswith("plan") for problem in design.problems), told
            continue
        problems = spoilt.refusals(design)
        assert all(problem.what and problem.where and "rule " in problem.why for problem in problems), told
        plan = design.plan
        if not problems and plan.gradients.precision in EXACT and plan.first_group.precision is Precision.FP64:
            found.append((told, design))
    return found


def test_what_is_refused_is_refused_by_name_and_few_are_not() -> None:
    assert 0 < len(allowed(1500, seed=3)) < 700


def run(pool: Pool, told: str, design: Design) -> None:
    plan, job = design.plan, design.job
    expected = parity_cases.one_device(
        design.model,
        count=plan.sequences,
        length=plan.sequence_length,
        z_loss=job.z_loss,
        optimizer=job.optimizer,
        packed=Documents.TWO,
        frozen=plan.frozen_blocks,
    )
    found = pool.run(parity_cases.one_rank, design, Documents.TWO, ranks=plan.world_size)
    try:
        parity_cases.compare(expected, found)
    except AssertionError as failure:
        raise AssertionError(told) from failure


def test_what_is_not_refused_gives_what_one_device_gives(pool: Pool) -> None:
    some = allowed(30, seed=4)
    assert some
    for told, design in sorted(some, key=lambda entry: entry[1].plan.world_size):
        run(pool, told, design)


@pytest.mark.slow
def test_more_that_is_not_refused_does_so_too(pool: Pool) -> None:
    many = allowed(400, seed=5)
    assert many
    for told, design in sorted(many, key=lambda entry: entry[1].plan.world_size):
        run(pool, told, design)
