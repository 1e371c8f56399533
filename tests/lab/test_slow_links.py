"""Runs over hosts of a lab of which a link is slow from the first step on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from meshwright.lab import Lab, Topology, Uplink
from meshwright.lab.fabric import unfit
from meshwright.run.files import write_json
from meshwright.run.launch import WORKER_MODULE
from meshwright.spec.incident import Incident, Trouble
from meshwright.train.observe.incidents import incidents_of
from tests.run.runs import design, losses
from tests.support.designs import Layout

WHY_NOT = unfit()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
RATE, STEPS = 12.5e6, 20
NAMES = ("host0", "host1", "host2")


def command(run: Path) -> list[str]:
    place = "RANK={host} LOCAL_RANK=0 WORLD_SIZE={hosts}"
    return ["sh", "-c", f"{place} exec {sys.executable} -m {WORKER_MODULE} {run}"]


def told(folder: Path, rates: tuple[float, float, float]) -> tuple[Incident, ...]:
    """Of a run of three replicas, a host each, whose links give `rates` from the start."""
    run = folder / "run"
    run.mkdir()
    write_json(run / "design.json", design(folder, Layout(replicate=3, batch=9), steps=STEPS))
    uplinks = tuple(Uplink(below=name, above="core", bandwidth=rate) for name, rate in zip(NAMES, rates, strict=True))
    with Lab.of(Topology(hosts=NAMES, shares=(1 / 3,) * 3, uplinks=uplinks)) as lab:
        found = lab.without_shares().run(command(run), timeout_seconds=240.0)
    assert [each.exit_code for each in found] == [0, 0, 0], found[0].output
    assert max(losses(run)) == STEPS
    return incidents_of(run)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_link_of_a_third_of_the_rate_is_told_and_none_of_links_that_are_alike(tmp_path: Path) -> None:
    (tmp_path / "slow").mkdir()
    (found,) = told(tmp_path / "slow", (RATE, RATE, RATE / 3))
    assert (found.trouble, found.ranks) == (Trouble.LINK, (2,))
    assert found.begun < 10
    assert found.what.startswith("all links of host 10.77.0.3 give 3")
    assert "from the start, where the link 10.77.0.1 - 10.77.0.2 gives" in found.what
    assert found.ratio == pytest.approx(3.0, rel=0.3)
    (tmp_path / "alike").mkdir()
    assert told(tmp_path / "alike", (RATE, RATE, RATE)) == ()
