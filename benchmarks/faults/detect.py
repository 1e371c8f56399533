"""Real runs of which a rank or a link is slowed now and then: how many are named, after how many steps, and how often
something is told of clean steps.

    python benchmarks/faults/detect.py ranks [EPISODES]      one of two ranks is stopped for a part of the time
    python benchmarks/faults/detect.py clean [STEPS]         nothing is done
    sudo python benchmarks/faults/detect.py links [EPISODES] the link of two hosts of a lab gives as many times less
    sudo python benchmarks/faults/detect.py start [RUNS]     one link of three is slow in every other run

Ranks are slowed by SIGSTOP and SIGCONT in turns: of every period a share, such that own work takes so many times as
long. What is asked is in `episodes`, what was told in `incidents`.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import psutil
from recording import LAYOUTS, wide
from tests.run.runs import design, losses
from tests.support.designs import Layout

import record
from meshwright.lab import Lab, Topology, Uplink
from meshwright.run.files import write_json
from meshwright.run.launch import WORKER_MODULE
from meshwright.run.train import train
from meshwright.spec.incident import Incident, Trouble
from meshwright.train.observe.incidents import incidents_of

FOUND, WITHIN = 0.95, 20
SETTLED, LASTS, APART = 60, 40, 50  # steps before the first episode, in one, and between two
TIMES = (1.3, 1.5, 2.0)
PERIOD_SECONDS = 0.02
RATE = 12.5e6  # of links of which some are slow from the start
FAST = 125e6  # of the link that becomes slow: whole gradients of 5 M parameters take as long as a step of half a core
THREE, FIRST_STEPS = ("host0", "host1", "host2"), 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """From step `begun` to `ended` what `who` did took `times` as long."""

    begun: int
    ended: int
    who: tuple[int, ...]
    times: float


Slow = Callable[
    [int, float], AbstractContextManager[None]
]  # (rank, times): while inside, it takes so many times as long


def episodes(run_dir: Path, count: int, *, slow: Slow, who: tuple[int, ...]) -> list[Episode]:
    """`count` of them, one after the other, while a run goes on in `run_dir`."""
    draw, found = random.Random(1), list[Episode]()
    _await_step(run_dir, SETTLED)
    for number in range(count):
        rank, times = draw.choice(who), TIMES[number % len(TIMES)]
        begun = _step(run_dir)
        with slow(rank, times):
            _await_step(run_dir, begun + LASTS)
        ended = _step(run_dir)
        found.append(Episode(begun=begun, ended=ended, who=(rank,), times=times))
        _await_step(run_dir, ended + APART)
    return found


def ranks(count: int) -> None:
    """Episodes of slow ranks in a run on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir, found = Path(folder) / "run", list[Episode]()

        @contextmanager
        def slow(rank: int, times: float) -> Iterator[None]:
            over = threading.Event()
            worker = _worker(rank)
            stopping = threading.Thread(target=_stutter, args=(worker, 1.0 - 1.0 / times, over))
            stopping.start()
            yield
            over.set()
            stopping.join()

        def act() -> None:
            found.extend(episodes(run_dir, count, slow=slow, who=(0, 1)))
            os.kill(os.getpid(), signal.SIGTERM)

        acting = threading.Thread(target=act)
        acting.start()
        train(wide(Path(folder), LAYOUTS["zero3"]), run_dir=run_dir, say=lambda _line: None)
        acting.join()
        told = incidents_of(run_dir)
    _finish("detect_ranks", found, told, trouble=Trouble.RANK)


def links(count: int) -> None:
    """Episodes of a slow link in a run over two hosts of a lab with a core each."""
    names = ("host0", "host1")
    uplinks = tuple(Uplink(below=name, above="core", bandwidth=FAST) for name in names)
    with tempfile.TemporaryDirectory() as folder:
        run_dir, found = Path(folder) / "run", list[Episode]()
        run_dir.mkdir()
        write_json(run_dir / "design.json", wide(Path(folder), LAYOUTS["replicas"]))
        with Lab.of(Topology(hosts=names, shares=(0.5, 0.5), uplinks=uplinks)) as lab:

            @contextmanager
            def slow(_rank: int, times: float) -> Iterator[None]:
                for host in range(len(names)):
                    lab.slow(host, FAST / times)
                yield
                for host in range(len(names)):
                    lab.slow(host, FAST)

            def act() -> None:
                found.extend(episodes(run_dir, count, slow=slow, who=(0,)))
                for child in psutil.Process().children(recursive=True):
                    if WORKER_MODULE in child.cmdline() and "RANK" in child.environ():
                        child.send_signal(signal.SIGTERM)

            acting = threading.Thread(target=act)
            acting.start()
            ended = lab.run(["sh", "-c", _worker_script(run_dir)], timeout_seconds=3600.0)
            acting.join()
        told = incidents_of(run_dir)
        if any(each.exit_code for each in ended):
            raise SystemExit("\n".join(each.output[-2000:] for each in ended))
    _finish("detect_links", found, told, trouble=Trouble.LINK)


def start(count: int) -> None:
    """Runs of three hosts: in every other one a link is slow before the first step, in the rest all are alike."""
    draw, found, told, alarms = random.Random(1), list[Episode](), list[Incident](), 0
    for number in range(count):
        slow = None if number % 2 else draw.randrange(len(THREE))
        times = (2.0, 3.0, 5.0)[number // 2 % 3]
        rates = [RATE / times if host == slow else RATE for host in range(len(THREE))]
        uplinks = tuple(
            Uplink(below=name, above="core", bandwidth=rate) for name, rate in zip(THREE, rates, strict=True)
        )
        with tempfile.TemporaryDirectory() as folder:
            run_dir = Path(folder) / "run"
            run_dir.mkdir()
            write_json(run_dir / "design.json", design(Path(folder), Layout(batch=9, replicate=3), steps=FIRST_STEPS))
            with Lab.of(Topology(hosts=THREE, shares=(1 / 3,) * 3, uplinks=uplinks)) as lab:
                ended = lab.run(["sh", "-c", _worker_script(run_dir)], timeout_seconds=600.0)
            if any(each.exit_code for each in ended):
                raise SystemExit("\n".join(each.output[-2000:] for each in ended))
            of_links = [each for each in incidents_of(run_dir) if each.trouble is Trouble.LINK]
        told += of_links
        if slow is None:
            alarms += len(of_links)
            continue
        right = len(of_links) == 1 and of_links[0].ranks == (slow,)
        ended_at = of_links[0].begun if right else 0
        found.append(Episode(begun=0, ended=ended_at, who=(slow,), times=times))
    named = [episode for episode in found if episode.ended]
    rows = [
        record.Row(
            name=f"links slow from the start: {len(found)} runs",
            target=f">= {FOUND:.0%} named within {WITHIN} steps",
            measured=f"{len(named)}; after {sorted(episode.ended for episode in named)} steps",
            holds=sum(episode.ended <= WITHIN for episode in named) >= FOUND * len(found),
        ),
        record.Row(
            name=f"told of {count // 2} runs of equal links", target="0", measured=str(alarms), holds=not alarms
        ),
    ]
    record.finish(
        "detect_start", rows, {"runs": [asdict(each) for each in found], "incidents": [asdict(each) for each in told]}
    )


def clean(steps: int) -> None:
    """Steps of which nothing should be told."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        train(wide(Path(folder), LAYOUTS["zero3"]), run_dir=run_dir, steps=steps, say=lambda _line: None)
        told = incidents_of(run_dir)
    for incident in told:
        print(incident.line)
    row = record.Row(name=f"alarms in {steps:,} clean steps", target="0", measured=str(len(told)), holds=not told)
    record.finish("detect_clean", [row], {"incidents": [asdict(each) for each in told]})


def _finish(name: str, asked: list[Episode], told: tuple[Incident, ...], *, trouble: Trouble) -> None:
    after, used = dict[Episode, int](), set[int]()
    for index, incident in enumerate(told):
        for episode in asked:
            named = trouble is Trouble.LINK or incident.ranks == episode.who
            if incident.trouble is trouble and named and episode.begun < incident.begun <= episode.ended:
                used.add(index)
                after.setdefault(episode, incident.begun - episode.begun)
    rows = []
    for times in sorted({episode.times for episode in asked}):
        alike = [episode for episode in asked if episode.times == times]
        told_after = f"after {sorted(after[episode] for episode in alike if episode in after)} steps"
        what = f"{trouble.value}, {times:.1f} times as long: {len(alike)} episodes"
        rows.append(record.Row(name=what, target="told", measured=told_after, holds=True))
    soon = sum(steps <= WITHIN for steps in after.values())
    rows.append(
        record.Row(
            name=f"{trouble.value}: {len(asked)} episodes",
            target=f">= {FOUND:.0%} named within {WITHIN} steps",
            measured=f"{soon}",
            holds=soon >= FOUND * len(asked),
        )
    )
    wrong = [incident for index, incident in enumerate(told) if index not in used]
    rows.append(record.Row(name="told beside", target="0", measured=str(len(wrong)), holds=not wrong))
    record.finish(
        name, rows, {"episodes": [asdict(each) for each in asked], "incidents": [asdict(each) for each in told]}
    )


def _stutter(worker: psutil.Process, share: float, over: threading.Event) -> None:
    """The worker is stopped for `share` of every period until it is `over`."""
    while not over.is_set():
        worker.send_signal(signal.SIGSTOP)
        time.sleep(share * PERIOD_SECONDS)
        worker.send_signal(signal.SIGCONT)
        time.sleep((1.0 - share) * PERIOD_SECONDS)


def _worker(rank: int) -> psutil.Process:
    for child in psutil.Process().children(recursive=True):
        if WORKER_MODULE in child.cmdline() and child.environ().get("RANK") == str(rank):
            return child
    raise SystemExit(f"no worker of rank {rank}")


def _worker_script(run_dir: Path) -> str:
    return "RANK={host} LOCAL_RANK=0 WORLD_SIZE={hosts} exec " + f"{sys.executable} -m {WORKER_MODULE} {run_dir}"


def _step(run_dir: Path) -> int:
    return max(losses(run_dir), default=0)


def _await_step(run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 900.0
    while _step(run_dir) < step:
        if time.monotonic() > deadline:
            raise SystemExit(f"step {step} did not come")
        time.sleep(0.02)


if __name__ == "__main__":
    kind, number = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
    counts = {"ranks": 12, "links": 6, "start": 12, "clean": 5000}
    {"ranks": ranks, "links": links, "start": start, "clean": clean}[kind](number or counts[kind])
