"""What all tests are run with."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.pool import Pool

# A machine that others use is slow, and no test is about time.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Lines are as wide as where no terminal is, whatever whoever runs this, or a worker of theirs, has.
os.environ.pop("COLUMNS", None)

# Tests run beside each other: two threads of an operator wait for a core more than they work.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """One pool of workers for all rooms."""
    workers = Pool()
    yield workers
    workers.close()
