"""What all tests are run with."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from meshwright import catalog, search
from meshwright.run.detect import calibration_file
from meshwright.run.measure import save_cluster
from tests.support import searches
from tests.support.pool import Pool

# A machine that others use is slow, and no test is about time. What a change must pass does not hang on chance:
# examples are the same in every run but of `make test-full`, which draws others each time.
settings.register_profile("searching", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("patient", settings.get_profile("searching"), derandomize=True)
settings.load_profile("patient")

# Lines are as wide as where no terminal is, whatever whoever runs this, or a worker of theirs, has.
os.environ.pop("COLUMNS", None)

# Tests run beside each other: two threads of an operator wait for a core more than they work.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays to the end: the collector of garbage looks at it neither meanwhile nor after."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of the tests' own: to it, this machine has the figures of one that nobody measured."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHWRIGHT_CACHE", str(cache))
        save_cluster(catalog.load_cluster("local:2"), path=calibration_file())
        yield cache


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """One pool of workers for all rooms."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture
def searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier test asked a search is not searched again: for tests of what is made of a decision."""
    monkeypatch.setattr(search, "design", searches.design)
    monkeypatch.setattr(search.decide, "best", searches.best)
