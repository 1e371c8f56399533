"""The registry of techniques: by module name, by the nearest name, and nothing imported unasked."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshwright.techniques as registry
from meshwright.spec.errors import ConfigError

SOURCE = """
class Marker:
    name = "marker"

    def __init__(self, design):
        self.design = design


def build(design):
    return Marker(design)
"""


@pytest.fixture
def with_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "marker_for_test.py").write_text(SOURCE)
    monkeypatch.setattr(registry, "__path__", [*registry.__path__, str(tmp_path)])


@pytest.mark.usefixtures("with_marker")
def test_a_file_dropped_into_the_package_is_a_technique() -> None:
    assert "marker_for_test" in registry.available()
    (technique,) = registry.build(("marker_for_test",), design="the design")  # type: ignore[arg-type]
    assert technique.name == "marker"
    assert technique.design == "the design"  # type: ignore[attr-defined]


@pytest.mark.usefixtures("with_marker")
def test_unknown_names_are_all_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'marker_for_test'") as caught:
        registry.build(("marker_for_tset", "other"), design=None)  # type: ignore[arg-type]
    assert len(caught.value.problems) == 2


def test_with_no_technique_the_message_says_so() -> None:
    if not registry.available():
        with pytest.raises(ConfigError, match="no technique is installed"):
            registry.build(("low_rank",), design=None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("with_marker")
def test_names_are_checked_without_building_anything() -> None:
    registry.check(("marker_for_test",))
    with pytest.raises(ConfigError, match=r"job\.techniques\[1\].*did you mean 'marker_for_test'"):
        registry.check(("marker_for_test", "marker_for_tes"))
