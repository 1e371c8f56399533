"""What a watched run asks, says and keeps, of steps that are made up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from meshwright.spec.incident import Trouble
from meshwright.train.events import (
    Action,
    Event,
    Examine,
    Examined,
    LinksProbed,
    Log,
    ProbeLinks,
    RankTimes,
    Saved,
    Started,
    StepDone,
)
from meshwright.train.observe.health import Health
from meshwright.train.observe.incidents import incidents_of, path_of
from meshwright.train.watch import PATIENCE, SETTLING, Watch
from tests.train.observe.traces import FloatArray, own_seconds

STEPS = 160
SIZE = 1 << 20
WORDS = "its thread waited for a core 41.0 % of the time; load 3.1 on 2 cores"


class Watched:
    """A run whose machines answer as they are told to; keeps what was said, step by step."""

    def __init__(self, folder: Path | None, *, ranks: int = 4, hosts: int = 2, members: Iterable[int] = ()) -> None:
        self.watch = Watch(
            members=list(members) or range(ranks),
            peers=[0] * ranks,
            health=Health(),
            instrumented=lambda step: step == 7,
            run_dir=folder,
        )
        self.ranks, self.hosts = ranks, hosts
        self.hop_seconds = 0.1
        self.first_seconds: list[float] = []  # of the probes to come, the next one first
        self.said: list[tuple[int, str]] = []
        self.probes = self.step = 0

    def run(self, own: FloatArray, *, network: float | FloatArray = 0.01, data: FloatArray | None = None) -> None:
        network = np.broadcast_to(network, len(own))
        waits = np.zeros_like(own) if data is None else data
        for index, row in enumerate(own):
            busy = row + waits[index]
            whole = float(busy.max() + network[index])
            times = RankTimes(own=tuple(row), waited=tuple(whole - busy), input=tuple(waits[index]))
            self.step += 1
            self.emit(done(self.step, whole, times))

    def emit(self, event: Event) -> None:
        for action in self.watch.react(event):
            self.perform(action)

    def perform(self, action: Action) -> None:
        if isinstance(action, Log):
            self.said.append((self.watch.step, action.text))
        elif isinstance(action, Examine):
            self.emit(Examined(rank=action.rank, words=WORDS))
        else:
            assert isinstance(action, ProbeLinks)
            self.probes += 1
            self.emit(self.probed())

    def probed(self) -> LinksProbed:
        names = tuple("abcdefgh"[: self.hosts])
        seconds = [[0.0 if one == other else 0.1 for other in names] for one in names]
        if self.hosts > 1 and self.probes > 1:
            seconds[0][1] = self.hop_seconds
        if self.first_seconds:
            seconds[0][1] = self.first_seconds.pop(0)
        host_of = tuple(rank * self.hosts // self.ranks for rank in range(self.ranks))
        rows = tuple(tuple(row) for row in seconds)
        return LinksProbed(hosts=names, host_of=host_of, num_bytes=SIZE, seconds=rows if self.hosts > 1 else ())


def done(step: int, seconds: float, times: RankTimes | None) -> StepDone:
    return StepDone(
        step=step,
        tokens=step,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=1.0,
        seconds=seconds,
        memory_bytes=0.0,
        ranks=times,
    )


def test_a_slow_rank_is_told_with_its_host_and_why_and_again_when_it_is_well(tmp_path: Path) -> None:
    own = own_seconds(4, STEPS, seed=1)
    own[60:110, 2] *= 1.5
    run = Watched(tmp_path)
    run.run(own)
    (began, first), (ended, last) = run.said
    assert 60 < began <= 80
    assert first.startswith("rank 2 (b) is slow: 1.")
    assert first.endswith(f" times its peers' own time in the last 16 steps; {WORDS}")
    assert last.startswith("rank 2 (b) is as fast as its peers again, after ")
    (incident,) = incidents_of(tmp_path)
    assert (incident.trouble, incident.ranks, incident.hosts) == (Trouble.RANK, (2,), ("b",))
    assert (incident.begun, incident.ended) == (began, ended)
    assert incident.fix


def test_ranks_of_a_learner_are_named_as_the_plan_names_them(tmp_path: Path) -> None:
    own = own_seconds(4, 100, seed=1)
    own[:, 1] *= 1.5
    run = Watched(tmp_path, hosts=1, members=(1, 3, 5, 7))
    run.run(own)
    assert run.said[0][1].startswith("rank 3 is slow")
    assert incidents_of(tmp_path)[0].ranks == (3,)
    later = Watched(tmp_path, hosts=1)
    later.emit(Started(step=100, total_steps=STEPS))
    assert incidents_of(tmp_path)[0].ended is None
    later.emit(Started(step=100, total_steps=STEPS, why="rank 1 was killed"))
    assert incidents_of(tmp_path)[0].ended == 100, "it was told of ranks that are others now"


def test_a_slow_link_is_told_after_the_links_were_probed(tmp_path: Path) -> None:
    network = np.full(STEPS, 0.02)
    network[70:120] *= 3.0
    run = Watched(tmp_path)
    run.hop_seconds = 0.3
    run.run(own_seconds(4, STEPS, seed=2), network=network)
    (began, first), (_, last) = run.said
    assert run.probes == 3, "at first, and twice"
    assert 70 < began <= 90
    assert first.startswith("the link a - b gives 28.0 Mbit/s of the 83.9 Mbit/s it gave; ")
    assert last.startswith("ranks wait for each other no longer than at first, after ")
    assert incidents_of(tmp_path)[0].trouble is Trouble.LINK


def test_a_link_that_is_slow_from_the_start_is_told_at_once_and_when_it_is_mended(tmp_path: Path) -> None:
    run = Watched(tmp_path, hosts=4)
    run.first_seconds = [0.3, 0.32, 0.3]
    run.run(own_seconds(4, 3 * PATIENCE + 50, seed=2))
    (began, first), (ended, last) = run.said
    assert began == SETTLING + 3, "step 7 was instrumented"
    assert first == "the link a - b gives 28.0 Mbit/s from the start, where the link a - c gives 83.9 Mbit/s"
    assert run.probes == 4, "twice at first, after 25 steps and after 50 more"
    assert last == f"links between a and b give what others do, after {ended - began} steps"
    (incident,) = incidents_of(tmp_path)
    assert (incident.trouble, incident.ranks, incident.hosts) == (Trouble.LINK, (0, 1), ("a", "b"))
    assert (incident.begun, incident.ended) == (began, ended)


def test_a_first_probe_that_stutters_is_asked_again_and_not_told() -> None:
    run = Watched(None, hosts=4)
    run.first_seconds = [0.4, 0.1]
    run.run(own_seconds(4, 60, seed=2))
    assert run.said == []
    assert run.probes == 2


def test_links_that_give_what_they_gave_are_not_blamed_and_seldom_probed(tmp_path: Path) -> None:
    network = np.full(320, 0.02)
    network[70:] *= 3.0
    run = Watched(tmp_path)
    run.run(own_seconds(4, 320, seed=2), network=network)
    assert run.said == []
    assert run.probes == 5, "at first, at once, after 25 steps, after 50 more and after 100 more"
    assert run.watch.patience == 16 * PATIENCE


def test_a_link_slower_by_three_tenths_is_told_each_time(tmp_path: Path) -> None:
    """Six times in turn: what it gives when it is well again is no reason to wait before it is probed again."""
    begins, seeds, soon = range(60, 600, 90), 4, 0
    for seed in range(seeds):
        (tmp_path / str(seed)).mkdir()
        run = Watched(tmp_path / str(seed))
        network = 0.03 * np.exp(0.05 * np.random.default_rng(seed).standard_normal(600))
        own = own_seconds(4, 600, seed=seed)
        for step in range(600):
            slow = any(begin <= step < begin + 40 for begin in begins)
            run.hop_seconds = 0.13 if slow else 0.1
            run.run(own[step : step + 1], network=network[step : step + 1] * (1.3 if slow else 1.0))
        told = incidents_of(tmp_path / str(seed))
        assert [incident.trouble for incident in told] == [Trouble.LINK] * len(begins)
        soon += sum(begin < incident.begun <= begin + 20 for begin, incident in zip(begins, told, strict=True))
    assert soon >= 0.95 * seeds * len(begins)


def test_a_link_is_probed_again_where_waits_have_grown_since_it_gave_what_it_did(tmp_path: Path) -> None:
    network = np.full(STEPS, 0.02)
    network[70:] *= 1.5
    network[100:] *= 1.5
    run = Watched(tmp_path)
    own = own_seconds(4, STEPS, seed=2)
    run.run(own[:100], network=network[:100])
    assert (run.said, run.probes) == ([], 2)
    run.hop_seconds = 0.2
    run.run(own[100:], network=network[100:])
    (incident,) = incidents_of(tmp_path)
    assert incident.hosts == ("a", "b")
    assert 100 < incident.begun <= 120


def test_a_link_is_told_soon_after_links_were_probed_in_vain(tmp_path: Path) -> None:
    """Waits rise for what is no link and fall; the link that is slow then makes them rise by less."""
    network, seeds, soon = np.full(220, 0.03), 8, 0
    network[70:100] *= 1.6
    network[130:] *= 1.35
    for seed in range(seeds):
        (tmp_path / str(seed)).mkdir()
        run = Watched(tmp_path / str(seed))
        own = own_seconds(4, 220, seed=seed)
        run.run(own[:130], network=network[:130])
        assert run.said == []
        assert run.probes >= 2, "at first, and in vain"
        run.hop_seconds = 0.135
        run.run(own[130:], network=network[130:])
        (incident,) = incidents_of(tmp_path / str(seed))
        soon += 130 < incident.begun <= 150
    assert soon >= 7


def test_probes_that_stutter_blame_no_link_however_often_they_are_asked(tmp_path: Path) -> None:
    """All wait longer to the end, for what is no link; one message of five takes three tenths longer than usual."""
    network = np.full(3000, 0.02)
    network[70:] *= 1.5
    run, stutters = Watched(tmp_path), np.random.default_rng(3)
    run.first_seconds = [0.1, *np.where(stutters.random(40) < 0.2, 0.13, 0.1).tolist()]
    run.run(own_seconds(4, 3000, seed=2), network=network)
    assert run.said == []
    assert run.probes <= 12


def test_a_probe_that_stutters_blames_no_link(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    network = np.full(STEPS, 0.02)
    network[70:] *= 1.5
    run.first_seconds = [0.1, 0.2, 0.1]
    run.run(own_seconds(4, STEPS, seed=2), network=network)
    assert (run.said, run.probes) == ([], 5), "at first, twice as one stutters, after 25 steps and after 50 more"


def test_on_one_host_there_is_no_link_to_probe() -> None:
    run = Watched(None, hosts=1)
    run.run(own_seconds(4, STEPS, seed=2), network=np.where(np.arange(STEPS) < 70, 0.02, 0.06))
    assert run.probes == 1
    assert run.said == []


def test_ranks_that_wait_for_data_are_told_as_that(tmp_path: Path) -> None:
    data = np.zeros((STEPS, 4))
    data[60:100] = 0.05
    run = Watched(tmp_path)
    run.run(own_seconds(4, STEPS, seed=3), data=data)
    assert [text.partition(" data")[0] for _, text in run.said] == ["every rank waits for", "no rank waits for"]
    assert incidents_of(tmp_path)[0].trouble is Trouble.DATA


def test_a_save_that_takes_long_is_the_disk(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    for number, seconds in enumerate((2.0, 2.5, 2.2, 2.1, 9.0, 2.0)):
        run.emit(Saved(step=10 * number, seconds=0.1, write_seconds=seconds))
    assert [text for _, text in run.said] == ["a checkpoint took 9.00 s to be written, 4.2 times those before"]
    assert incidents_of(tmp_path)[0].ended == incidents_of(tmp_path)[0].begun


def test_a_save_that_does_not_end_is_told_while_it_lasts(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    times = RankTimes(own=(0.9,) * 4, waited=(0.1,) * 4, input=(0.0,) * 4)
    for number in range(3):
        run.emit(Saved(step=number, seconds=0.1, write_seconds=2.0))
    for step in range(1, 20):
        run.emit(done(step, 1.0, replace(times, writing=2 <= step < 15)))
    assert run.said == [
        (7, "a checkpoint has been written for 6.00 s and is not whole yet; those before took 2.00 s"),
        (15, "the checkpoint is written, after 8 steps"),
    ]
    (incident,) = incidents_of(tmp_path)
    assert (incident.trouble, incident.begun, incident.ended) == (Trouble.DISK, 7, 15)


def test_a_first_save_has_ten_minutes(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    times = RankTimes(own=(29.0,) * 4, waited=(1.0,) * 4, input=(0.0,) * 4, writing=True)
    for step in range(1, 30):
        run.emit(done(step, 30.0, times))
    assert run.said == [(20, "a checkpoint has been written for 10 min 0 s and is not whole yet")]


def test_first_and_instrumented_steps_say_nothing() -> None:
    run = Watched(None)
    own = own_seconds(4, 60, seed=4)
    own[:SETTLING, 1] *= 50.0
    own[6, 1] *= 50.0
    run.run(own)
    assert run.said == []
    assert not list(run.watch.react(done(99, 1.0, None)))


def test_a_line_that_was_not_finished_is_left_out(tmp_path: Path) -> None:
    own = own_seconds(4, 100, seed=1)
    own[:, 1] *= 1.5
    Watched(tmp_path).run(own)
    kept = incidents_of(tmp_path)
    with path_of(tmp_path).open("a") as file:
        file.write('{"trouble": "slow ra')
    assert incidents_of(tmp_path) == kept
    assert kept[0].ended is None


def test_a_machine_says_how_it_does() -> None:
    words = Health().words()
    assert "load " in words
