"""A simulated fleet in words: how often it fails beside how many failures a run has had, and no table of one figure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from meshwright import catalog
from meshwright.catalog.failure_mix import LLAMA3
from meshwright.cost.foresee import Foreseen, foresee
from meshwright.report import terminal_chaos
from tests.cost.cost_examples import design, llama

HOURS = 50_000.0  # of a device between failures


@pytest.fixture(scope="module")
def found() -> Foreseen:
    return _foreseen(devices=64, days=1.0)


def _foreseen(*, devices: int, days: float) -> Foreseen:
    plain = design(llama(), catalog.load_cluster("64xH100"))
    groups = tuple(
        replace(group, device=replace(group.device, hours_between_failures=HOURS)) for group in plain.cluster.groups
    )
    failing = replace(plain, cluster=replace(plain.cluster, groups=groups))
    return foresee(failing, mix=LLAMA3, devices=devices, days=days, seeds=4)


def _shown(found: Foreseen) -> str:
    console = Console(width=200, color_system=None, highlight=False)
    with console.capture() as captured:
        for view in terminal_chaos.foreseen(found):
            console.print(view)
    return captured.get()


def test_failures_stand_beside_how_often_they_come(found: Foreseen) -> None:
    shown = _shown(found)
    assert "64 devices for 1 day, simulated 4 times" in shown
    assert "a failure every 32 d" in shown
    many = found.advice.asked.failures
    assert (f"{many:.2g} failures in a run" if many else "none of 4 runs had one") in shown


def test_that_nothing_fails_while_nodes_are_waited_for_is_told() -> None:
    shown = _shown(_foreseen(devices=8_000_000, days=0.5))
    assert "a failure every 22.5 s on the mean: " in shown
    assert "; none while nodes are waited for, " in shown


def test_what_is_the_same_with_every_number_of_spares_is_a_line_and_no_table() -> None:
    found = _foreseen(devices=10_000_000, days=3.0)
    shown = _shown(found)
    most = found.advice.spares[-1].fleet.spares
    assert f"spares: 0 to {most:,} were tried and come to the same" in shown
    assert "failures leave no time for anything but restarts and waiting" in shown
    assert "of all paid for" not in shown
