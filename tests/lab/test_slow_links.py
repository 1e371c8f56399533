"""Runs over hosts of a lab of which a link is slow from the first step on, or becomes so while they go on."""

from __future__ import annotations

import re
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.lab import Lab, Topology, Uplink
from meshwright.lab.fabric import unfit
from meshwright.run.files import write_json
from meshwright.run.launch import WORKER_MODULE
from meshwright.spec.incident import Incident, Trouble
from meshwright.spec.job import EvaluationSpec
from meshwright.spec.model import Layer
from meshwright.spec.synchronize import GradientSync, SynchronizeSpec, SyncKind, usual_rounds
from meshwright.train.observe.incidents import incidents_of
from tests.run.runs import VOCAB, after_steps, design, losses
from tests.support import models
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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rounds_of_learners_are_longer_once_the_link_gives_a_quarter_and_the_run_ends(tmp_path: Path) -> None:
    run, kind, count = tmp_path / "run", SyncKind.STREAMING, 240
    run.mkdir()
    layer = Layer(mixer=models.attention(), transform=models.feed_forward(hidden=2048))
    wide = models.model(layer=layer)
    wide = replace(wide, embedding=replace(wide.embedding, vocab=VOCAB), head=replace(wide.head, vocab=VOCAB))
    spec = SynchronizeSpec(kinds=(kind,), every=0)
    never = EvaluationSpec(every_steps=0)  # which would have them together all the time
    layout = Layout(replicate=2, batch=8)
    made = design(tmp_path, layout, steps=count, model=wide, synchronize=spec, evaluation=never)
    rounds = usual_rounds(kind, every=6, learners=2)
    made = replace(made, plan=replace(made.plan, gradients=GradientSync(kind=kind, rounds=rounds)))
    write_json(run / "design.json", made)
    hosts = NAMES[:2]
    uplinks = tuple(Uplink(below=name, above="core", bandwidth=RATE) for name in hosts)
    lengths: dict[bool, list[int]] = {False: [6], True: []}
    slowed = threading.Event()
    with Lab.of(Topology(hosts=hosts, shares=(0.5, 0.5), uplinks=uplinks)) as lab:

        def slow() -> None:
            slowed.set()
            for host in range(len(hosts)):
                lab.slow(host, RATE / 4)

        def say(_host: str, line: str) -> None:
            found = re.search(r"learners meet every (\d+) steps from here on", line)
            if found:
                lengths[slowed.is_set()].append(int(found[1]))

        acting = after_steps(run, count // 3, slow)
        found = lab.without_shares().run(command(run), say=say, timeout_seconds=240.0)
        acting.join()
    assert [each.exit_code for each in found] == [0, 0], found[0].output
    assert max(losses(run)) == count
    assert lengths[True], f"rounds stayed as they were: {lengths}"
    assert lengths[True][-1] > 1.5 * lengths[False][-1], lengths
