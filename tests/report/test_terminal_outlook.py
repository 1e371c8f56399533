from __future__ import annotations

from dataclasses import replace
from io import StringIO

from rich.console import Console

from meshwright import catalog, search
from meshwright.report.terminal import checkpoint_words, outlook
from meshwright.search.fields import set_cluster
from meshwright.spec.job import JobSpec
from meshwright.spec.outlook import Outlook
from tests.support import models


def whole(*, every: float, stall: float, write: float) -> Outlook:
    return Outlook(
        tokens=10**12,
        days=1.0,
        goodput=0.9,
        hours_between_failures=3.0,
        failures=8.0,
        checkpoint_bytes=2.0**40,
        checkpoint_seconds=every,
        stall_seconds=stall,
        write_seconds=write,
        restart_seconds=600.0,
        dollars=None,
        kilowatt_hours=None,
    )


def test_a_checkpoint_says_what_it_stops_and_when_it_is_safe() -> None:
    beside = checkpoint_words(whole(every=10.0, stall=0.006, write=2.4))
    assert beside == "1 TiB; each stops training for 6.00 ms, to copy it to hosts and agree, and is safe after 2.40 s"
    stopped = checkpoint_words(whole(every=100.0, stall=2.4, write=2.4))
    assert stopped == "1 TiB; each stops training for the 2.40 s that it takes to write"


def test_one_that_comes_before_the_last_is_written_is_said_to() -> None:
    hurried = checkpoint_words(whole(every=1.0, stall=0.006, write=2.4))
    assert hurried == "1 TiB; too often: each takes 2.40 s to write, and training waits for the one before"


def shown(value: Outlook, *, price_per_hour: float | None) -> str:
    console = Console(width=160, record=True, file=StringIO())
    console.print(outlook(value, price_per_hour=price_per_hour))
    return console.export_text()


def test_the_price_of_the_devices_stands_beside_the_cost_and_how_to_give_one_where_there_is_none() -> None:
    free = whole(every=100.0, stall=0.1, write=0.1)
    paid = shown(replace(free, dollars=1234.0), price_per_hour=2.5)
    assert "$2.50 an hour" in paid
    assert "--set cluster.device.price_per_hour=" in shown(free, price_per_hour=None)
    asked = search.Question(model=models.model(), cluster=catalog.load_cluster("2xRTX-4090"), job=JobSpec())
    assert asked.cluster.price_per_hour is None
    assert set_cluster(asked, ["cluster.device.price_per_hour=2.5"]).cluster.price_per_hour == 5.0
