"""How parameters are treated by their names."""

from __future__ import annotations

from meshwright.spec.optimizer import Muon, OptimizerKind, OptimizerSpec, ParameterGroup, treatment


def test_muon_takes_matrices_alone_whatever_a_group_says() -> None:
    asked = OptimizerSpec(groups=(ParameterGroup(names=("layers.*",), kind=OptimizerKind.MUON),))
    assert isinstance(treatment(asked, "layers.0.mixer.query.weight").rule, Muon)
    for vector in ("layers.0.mixer_norm.weight", "layers.0.mixer.query.bias", "layers.0.mixer.sinks"):
        assert isinstance(treatment(asked, vector).rule, OptimizerSpec)
