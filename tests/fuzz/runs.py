"""What runs leave behind, spoilt: metrics, marks, incidents, reports, logs of collectives, tables of others' runs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from meshwright.cost import predict
from meshwright.replay import read_runs
from meshwright.replay.express import express
from meshwright.replay.models import InexpressibleError
from meshwright.report import compare, diagnose, explain, read_run, write_page, write_trace
from meshwright.run.chaos.compare import losses
from meshwright.run.outcome import read_ended
from meshwright.run.resume import steps_of
from meshwright.spec import codec
from meshwright.spec.goodput import Mark, Moment
from meshwright.spec.incident import Incident, Trouble
from meshwright.spec.plan import Design
from meshwright.train.observe.collective_log import CollectiveLog, Group, read_logs
from meshwright.train.observe.incidents import incidents_of
from meshwright.train.observe.inquest import inquest
from meshwright.train.observe.timekeeper import Timekeeper, goodput_of
from meshwright.train.observe.whereabouts import last_seen
from tests.fuzz.kind import Files, Kind, of_file, of_files, put
from tests.fuzz.mutate import break_bytes, break_text, break_value, json_text, odd, once_in
from tests.fuzz.specs import ROOT, designs

PUBLISHED = ROOT / "examples" / "published.csv"
Rows = list[Any]


def jsonl(rng: Random, rows: Rows) -> bytes:
    """The rows as lines, of which a few are spoilt, and the last one may be half-written."""
    at = {rng.randrange(len(rows)) for _ in range(rng.choice((1, 1, 3)))}
    lines = [
        json_text(rng, break_value(rng, row)) if index in at else json.dumps(row) for index, row in enumerate(rows)
    ]
    content = ("\n".join(lines) + rng.choice(("", "\n"))).encode("utf-8", "surrogatepass")
    return break_bytes(rng, content) if once_in(5, rng) else content


METRICS: Rows = [{"step": step, "loss": 2.0 / step, "tokens": 100 * step, "seconds": 0.1} for step in range(1, 6)]
METRICS[3:3] = [{"step": 3, "validation_loss": 1.0}]
MARKS: Rows = [
    codec.encode(mark)
    for mark in (
        Mark(what=Moment.LAUNCHED, at=1.0, plan="abc"),
        Mark(what=Moment.STARTED, at=2.0),
        Mark(what=Moment.STEPS, at=4.0, step=5, first=1, data_seconds=0.1),
        Mark(what=Moment.SAVED, at=5.0, step=5),
        Mark(what=Moment.ROLLED_BACK, at=6.0, step=3, why="a spike"),
        Mark(what=Moment.REGROUPED, at=6.5, step=3, why="a rank was lost"),
        Mark(what=Moment.ENDED, at=7.0, step=5, why="killed"),
    )
]
INCIDENTS: Rows = [
    codec.encode(Incident(trouble=trouble, begun=3, at=5.0, what="slow", ranks=(1,), hosts=("a",), evidence=("x",)))
    for trouble in Trouble
]
WHEREABOUTS = {"step": 4, "section": "optimizer", "process": 12}
ENVIRONMENT = {"host": "a", "versions": {"torch": "2"}}
SPANS: Rows = [{"name": "forward", "rank": 0, "start": 1.0, "seconds": 0.1, "stage": 0, "microbatch": 1, "step": 2}]


def metrics(rng: Random) -> Files:
    return {"metrics.jsonl": jsonl(rng, METRICS)}


def marks(rng: Random) -> Files:
    return {"goodput.jsonl": jsonl(rng, MARKS)}


def read_marks(folder: Path) -> object:
    found = goodput_of(folder)
    keeper = Timekeeper(folder, clock=lambda: 8.0)
    return found, keeper.ettr, keeper.summary


def incidents(rng: Random) -> Files:
    return {"incidents.jsonl": jsonl(rng, INCIDENTS)}


def whereabouts(rng: Random) -> Files:
    text = json_text(rng, break_value(rng, WHEREABOUTS)).encode("utf-8", "surrogatepass")
    return {"whereabouts/rank-00000.json": rng.choice((text, break_bytes(rng, text)))}


def outcome(rng: Random) -> Files:
    ended = {"ending": "finished", "step": 5, "total_steps": 5, "tokens": 500, "seconds": 1.0, "loss": 1.0, "schema": 1}
    return {"outcome.json": json_text(rng, break_value(rng, ended))}


def run_folder(rng: Random) -> Files:
    """A whole run of which one file is spoilt."""
    files: dict[str, Callable[[], bytes]] = {
        "metrics.jsonl": lambda: jsonl(rng, METRICS),
        "goodput.jsonl": lambda: jsonl(rng, MARKS),
        "incidents.jsonl": lambda: jsonl(rng, INCIDENTS),
        "spans/rank-00000.jsonl": lambda: jsonl(rng, SPANS),
        "predicted.json": lambda: json_text(rng, break_value(rng, report())).encode("utf-8", "surrogatepass"),
        "environment.json": lambda: json_text(rng, break_value(rng, {"host": "a", "versions": {"torch": "2"}})).encode(
            "utf-8", "surrogatepass"
        ),
        "design.json": lambda: json_text(rng, break_value(rng, designs()[0])).encode("utf-8", "surrogatepass"),
    }
    spoilt = rng.choice(tuple(files))
    return {"design.json": json.dumps(designs()[0]), spoilt: files[spoilt]()}


def read_run_folder(files: Files, folder: Path) -> object:
    """Read as diagnoses read it."""
    put_alone(files, folder)
    return diagnose(folder).lines()


def put_alone(files: Files, folder: Path) -> None:
    for path in folder.rglob("*.json*"):
        path.unlink()
    put(folder, files)


def pages(rng: Random) -> tuple[Files, int]:
    return run_folder(rng), rng.randrange(4)


def read_pages(made: tuple[Files, int], folder: Path) -> object:
    """What is shown of it: the page, the trace, the explanation, and the comparison with itself."""
    files, act = made
    put_alone(files, folder)
    read_run(folder)
    if act == 0:
        return write_page([folder], folder / "out" / "page.html")
    if act == 1:
        return write_trace(folder, folder / "out" / "trace.json")
    return explain(folder) if act == 2 else compare(folder, folder)


@cache
def report() -> Any:
    return codec.encode(predict(codec.decode(Design, designs()[0])))


@cache
def ring() -> tuple[bytes, str]:
    """A log of collectives of one rank, with some that are still under way, and the groups beside it."""
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        log = CollectiveLog(Path(place), rank=0, kept=8)
        group = log.know(Group(name="world", ranks=(0, 1)))
        for number in range(10):
            log.begin_step(number)
            slot = log.enter(group, "all_reduce", 1000)
            if number < 9:
                log.leave(slot, inside_seconds=0.1)
        folder = Path(place) / "collectives"
        return (folder / "rank-00000.bin").read_bytes(), (folder / "rank-00000.json").read_text()


def rings(rng: Random) -> Files:
    content, groups = ring()
    files: dict[str, str | bytes] = {}
    for rank in range(2):
        files[f"collectives/rank-{rank:05d}.bin"] = content if once_in(3, rng) else break_bytes(rng, content)
        told = break_value(rng, json.loads(groups)) if once_in(2, rng) else json.loads(groups)
        files[f"collectives/rank-{rank:05d}.json"] = json_text(rng, told)
    return files


@cache
def table() -> list[dict[str, str]]:
    with PUBLISHED.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def published(rng: Random) -> Files:
    rows = [dict(rng.choice(table())) for _ in range(3)]
    for _ in range(rng.choice((1, 2, 5))):
        row = rng.choice(rows)
        row[rng.choice(tuple(row))] = str(odd(rng))
    names = list(rows[0])
    if once_in(10, rng):
        names[rng.randrange(len(names))] = rng.choice(("gpu", "", "x"))
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(names)
    writer.writerows(list(row.values()) for row in rows)
    return {"runs.csv": break_text(rng, out.getvalue()) if once_in(5, rng) else out.getvalue()}


def read_published(path: Path) -> None:
    for run in read_runs(path):
        told = run.faults, run.seconds, run.tokens, run.noise, run.stack, run.died
        with suppress(InexpressibleError):
            _ = told[0] or express(run)


KINDS = (
    Kind(
        name="metrics",
        make=metrics,
        read=of_files(lambda folder: (steps_of(folder), losses(folder))),
        refuses=False,
        share=6,
    ),
    Kind(name="marks", make=marks, read=of_files(read_marks), refuses=False, share=4),
    Kind(
        name="incidents",
        make=incidents,
        read=of_files(lambda folder: [incident.line for incident in incidents_of(folder)]),
        refuses=False,
        share=3,
    ),
    Kind(
        name="whereabouts",
        make=whereabouts,
        read=of_files(lambda folder: str(last_seen(folder, 0))),
        refuses=False,
        share=6,
    ),
    Kind(name="outcome", make=outcome, read=of_files(read_ended), share=3),
    Kind(name="run folder", make=run_folder, read=read_run_folder, share=0.5),
    Kind(name="pages of a run", make=pages, read=read_pages, share=0.05, quick=8),
    Kind(
        name="logs of collectives",
        make=rings,
        read=of_files(lambda folder: (read_logs(folder), inquest(folder))),
        refuses=False,
        share=3,
    ),
    Kind(name="published runs", make=published, read=of_file("runs.csv", read_published), share=1.5),
)
