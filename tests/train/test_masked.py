"""Text with prompts trains and is evaluated alike on any layout, and unlike text whose prompts are learned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from meshwright.spec.job import DataSpec, Source
from meshwright.spec.plan import Design, Sharding
from tests.run import runs
from tests.support.designs import Layout
from tests.support.pool import Pool
from tests.train import non_finite_cases

TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()


def of(folder: Path, layout: Layout) -> Design:
    """Prompts longer than sequences, so that some rows of a batch have no target."""
    path = folder / "rows.jsonl"
    rows = [{"ask": f"Say what {n} times {n} is, " * (1 + n % 5), "text": f"it is {n * n}. " * 3} for n in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)))
    data = DataSpec(sources=(Source(path=str(path), prompt_field="ask"),), validation_fraction=0.2)
    return runs.design(folder, layout, steps=3, data=data)


def test_prompts_are_left_out_on_any_layout(pool: Pool, tmp_path: Path) -> None:
    alone = of(tmp_path, Layout(batch=runs.BATCH))
    (wanted,) = pool.run(non_finite_cases.trained, alone, str(tmp_path / "one"), ranks=1)
    layout = Layout(batch=runs.BATCH, shard=2, sharding=Sharding.OPTIMIZER)
    for found in pool.run(non_finite_cases.trained, of(tmp_path, layout), str(tmp_path / "two"), ranks=2):
        assert near(found, wanted)
        for name, value in wanted["parameters"].items():
            numpy.testing.assert_allclose(found["parameters"][name], value, rtol=0, atol=TOLERANCE, err_msg=name)


def near(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    names = ("losses", "validation", "bits")
    return all(found[name] == pytest.approx(wanted[name], rel=0, abs=TOLERANCE) for name in names)
