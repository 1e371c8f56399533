"""What a search for plans to train lists, the runtime trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.search.runtime_rules import RUNTIME_RULES
from meshwright.spec.job import Switch
from meshwright.spec.model import Mixture, ModelSpec
from meshwright.spec.plan import Design
from meshwright.spec.routing import Routing
from tests.support import models
from tests.support.space import emitted


def counted(model: ModelSpec) -> ModelSpec:
    """The model with experts of a capacity, which are counted over whole sequences."""
    layers = tuple(
        replace(layer, transform=replace(layer.transform, routing=Routing(capacity=2.0)))
        if isinstance(layer.transform, Mixture)
        else layer
        for layer in model.layers
    )
    return replace(model, layers=layers)


CASES = {
    "plain": lambda: emitted(models.model(), ranks=4),
    "compiled": lambda: emitted(models.model(), ranks=4, compiled=Switch.ON),
    "capacity": lambda: emitted(counted(models.all_models()["mixture"]), ranks=4),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_plans_to_train_pass_every_rule_of_the_runtime(case: Callable[[], list[Design]]) -> None:
    designs = case()
    assert len(designs) > 100
    for entry in designs:
        for rule in RUNTIME_RULES:
            assert rule(entry) is None, f"{rule.name}: {entry.plan.describe()}"
