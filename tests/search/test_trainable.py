"""What a search for plans to train lists, the runtime trains."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshwright.search.runtime_rules import RUNTIME_RULES
from meshwright.spec.job import Switch
from meshwright.spec.plan import Design
from tests.support import models
from tests.support.space import emitted

CASES = {
    "plain": lambda: emitted(models.model(), ranks=4),
    "compiled": lambda: emitted(models.model(), ranks=4, compiled=Switch.ON),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_plans_to_train_pass_every_rule_of_the_runtime(case: Callable[[], list[Design]]) -> None:
    designs = case()
    assert len(designs) > 100
    for entry in designs:
        for rule in RUNTIME_RULES:
            assert rule(entry) is None, f"{rule.name}: {entry.plan.describe()}"
