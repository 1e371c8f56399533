"""What all tests are run with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.pool import Pool

# A machine that others use is slow, and no test is about time.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """One pool of workers for all rooms."""
    workers = Pool()
    yield workers
    workers.close()
