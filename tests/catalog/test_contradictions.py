"""Numbers of machines that contradict one another, or that nothing measured gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import catalog
from meshwright.spec.errors import ConfigError


def refused(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        catalog.load_cluster(name)
    return str(caught.value)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "machines.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("inside.torus = 0", "0 is not positive"),
        ("inside.torus = 1000000000000000000", "is more than any machine has"),
        ("inside.peers = 99", "99 peers in a node of 8 devices"),
        ("rack_nodes = 2", "nothing joins a rack of nodes"),
        ("nics = 1000000000", "is more than any machine has"),
    ],
)
def test_numbers_that_contradict_a_node_are_refused(line: str, told: str, tmp_path: Path) -> None:
    text = f'name = "ours"\n[[groups]]\ndevice = "H100"\n{line}\n'
    assert told in refused(written(tmp_path, text))


def test_what_whole_steps_explain_may_be_above_a_measured_peak(tmp_path: Path) -> None:
    """`cluster measure` moves shares of a peak until whole steps are explained."""
    cluster = catalog.load_cluster("8xH100")
    (group,) = cluster.groups
    device = replace(group.device, attention_backward_fraction=1.4)
    catalog.save(replace(cluster, groups=(replace(group, device=device),)), tmp_path / "moved.toml")
    assert catalog.load_cluster(str(tmp_path / "moved.toml")).groups[0].device.attention_backward_fraction == 1.4


def test_an_error_of_steps_is_a_logarithm_and_small(tmp_path: Path) -> None:
    text = 'name = "ours"\nstep_error = 300\n[[groups]]\ndevice = "H100"\n'
    assert "step_error: 300 is more than any machine has" in refused(written(tmp_path, text))
