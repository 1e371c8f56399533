"""Text with prompts trains and is evaluated alike on any layout, and unlike text whose prompts are learned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from meshwright.spec.exchange import Exchange, TokenLayout
from meshwright.spec.job import DataSpec, Source
from meshwright.spec.plan import Design, Sharding
from tests.run import runs
from tests.support import models
from tests.support.designs import Layout
from tests.support.pool import Pool
from tests.train import spoilt_cases

TOLERANCE = 1e-9


def of(folder: Path, layout: Layout, *, prefix: bool) -> Design:
    """Prompts longer than sequences, so that some rows of a batch have no target."""
    path = folder / "rows.jsonl"
    rows = [{"ask": f"Say what {n} times {n} is, " * (1 + n % 5), "text": f"it is {n * n}. " * 3} for n in range(60)]
    path.write_text("\n".join(map(json.dumps, rows)))
    data = DataSpec(sources=(Source(path=str(path), prompt_field="ask"),), validation_fraction=0.2)
    found = runs.design(folder, layout, steps=3, data=data)
    return replace(found, model=models.with_prefix(found.model)) if prefix else found


BALANCED = Exchange(layout=TokenLayout.BALANCED)
LAYOUTS = {
    False: Layout(batch=runs.BATCH, shard=2, sharding=Sharding.OPTIMIZER),
    True: Layout(batch=runs.BATCH, context=2, sharding=Sharding.OPTIMIZER, exchange=BALANCED),
}


@pytest.mark.parametrize("prefix", LAYOUTS)
def test_prompts_are_left_out_on_any_layout(pool: Pool, tmp_path: Path, prefix: bool) -> None:
    """And see all of themselves where the model has a prefix mask."""
    alone = of(tmp_path, Layout(batch=runs.BATCH), prefix=prefix)
    (wanted,) = pool.run(spoilt_cases.trained, alone, str(tmp_path / "one"), ranks=1)
    divided = of(tmp_path, LAYOUTS[prefix], prefix=prefix)
    for found in pool.run(spoilt_cases.trained, divided, str(tmp_path / "two"), ranks=2):
        assert near(found, wanted)
        for name, value in wanted["parameters"].items():
            numpy.testing.assert_allclose(found["parameters"][name], value, rtol=0, atol=TOLERANCE, err_msg=name)


def near(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    names = ("losses", "validation", "bits")
    return all(found[name] == pytest.approx(wanted[name], rel=0, abs=TOLERANCE) for name in names)
