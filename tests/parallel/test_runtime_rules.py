"""What the search says that this runtime cannot train is what its rooms refuse to build, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import catalog
from meshwright.nn.decoder import unsupported
from meshwright.parallel.precision import dtypes
from meshwright.search import RULES, Scope
from meshwright.search.runtime_rules import TRAINED_PRECISIONS
from meshwright.spec.cluster import DeviceKind, Precision
from meshwright.spec.errors import ConfigError
from tests.support.designs import Layout, design
from tests.support.models import all_models, model

LAYER_RULES = [rule for rule in RULES if rule.name in ("runtime-layers", "runtime-towers")]


@pytest.mark.parametrize("entry", catalog.models(), ids=lambda entry: entry.name)
def test_models_are_refused_where_they_have_no_module(entry: catalog.Entry) -> None:
    spec = catalog.load_model(entry.name)
    asked = replace(design(model(), Layout()), model=spec)
    refused = [rule.name for rule in LAYER_RULES if rule(asked)]
    assert bool(refused) == bool(unsupported(spec, start=0, stop=len(spec.blocks)))


def test_the_models_of_the_parity_matrix_are_not_refused() -> None:
    runtime = [rule for rule in RULES if rule.scope is Scope.RUNTIME]
    for spec in all_models().values():
        assert [rule.name for rule in runtime if rule(design(spec, Layout()))] == []


@pytest.mark.parametrize("precision", list(Precision))
def test_precisions_are_refused_where_they_have_no_types(precision: Precision) -> None:
    asked = design(model(), Layout())
    stages = tuple(
        replace(stage, groups=tuple(replace(group, precision=precision) for group in stage.groups))
        for stage in asked.plan.stages
    )
    plan = replace(asked.plan, stages=stages)
    rule = next(rule for rule in RULES if rule.name == "runtime-precision")
    processors = replace(asked, plan=plan)
    group = asked.cluster.groups[0]
    faster = replace(group, device=replace(group.device, kind=DeviceKind.CUDA))
    accelerators = replace(processors, cluster=replace(asked.cluster, groups=(faster,)))
    assert (rule(accelerators) is None) == (precision in TRAINED_PRECISIONS)
    assert (rule(processors) is None) == (precision in TRAINED_PRECISIONS or precision.quantized)
    if rule(processors) is None:
        assert dtypes(plan)
        return
    with pytest.raises(ConfigError, match="no runtime"):
        dtypes(plan)
