"""A soak: a tiny model on two ranks under random faults of every kind, started again until it is done.

Nothing may be lost or repeated, the losses and the last state have to be those of the undisturbed run bit by bit, and
the goodput has to be what the simulator says of the costs that were measured. `--faults 300` takes about an hour on two
idle cores; `--keep FOLDER` keeps the runs. With `--elastic` it is three ranks that go on without lost ones: their plan
changes by it, and the losses have to be the same within 1e-9.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.run.runs import design
from tests.support.designs import Layout

from meshwright.catalog.failure_mix import load_mix
from meshwright.cost.faults import Fleet, GoesOn, Saves, Simulated, Trouble, simulate
from meshwright.lab.fabric import unfit
from meshwright.run.chaos.chaos import chaos
from meshwright.run.chaos.compare import losses
from meshwright.run.chaos.soak import draw
from meshwright.run.chaos.words import is_told
from meshwright.run.train import train
from meshwright.spec import codec
from meshwright.spec.chaos import Chaos, Struck
from meshwright.spec.faults import Fault, FaultKind
from meshwright.spec.goodput import Spent
from meshwright.spec.job import CheckpointSpec, ElasticSpec, EvaluationSpec
from meshwright.spec.optimizer import OptimizerSpec
from meshwright.spec.plan import Design, Sharding
from record import Row, finish

RANKS, BATCH, EVERY_STEPS, PATIENCE = 2, 64, 10, 4.0
ELASTIC_RANKS, ELASTIC_BATCH = 3, 48
CALM = 1e-4  # learning rate: at a hundredth what rounding does grows tenfold in twenty steps
FASTER = 3  # on two cores fewer ranks may make steps in a third of the time
NAMED_SECONDS = 1.0
TRIED_STEPS = 200
SPARE_SECONDS = 20.0
SEEDS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Faults that were open at once: how they began, how long the run lost by them, and what it went on from.

    It trained for `trained_seconds` while they were open, which are not lost: no other fault struck meanwhile.
    """

    name: str
    at_seconds: float
    seconds: float
    trained_seconds: float
    goes_on: GoesOn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--every", type=float, default=3.0, help="mean seconds of training between faults")
    parser.add_argument("--mix", default="even")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--elastic", action="store_true", help="three ranks that go on without those that are lost")
    parser.add_argument("--keep", type=Path, default=None)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        soak(folder, asked)


def soak(folder: Path, asked: argparse.Namespace) -> None:
    drawn = draw(
        load_mix(asked.mix),
        faults=asked.faults,
        seed=asked.seed,
        ranks=ELASTIC_RANKS if asked.elastic else RANKS,
        every_seconds=asked.every,
        patience_seconds=PATIENCE,
        can_cut=not unfit(),
    )
    step_seconds = pace(folder, elastic=asked.elastic)
    steps = int((drawn[-1].moment.seconds + SPARE_SECONDS) / step_seconds) * (FASTER if asked.elastic else 1)
    plan = folder / "plan.json"
    plan.write_text(made(folder, steps=steps, elastic=asked.elastic).to_json())
    print(f"{len(drawn)} faults in {steps:,} steps of {1e3 * step_seconds:.1f} ms", flush=True)
    found = chaos(plan, run_dir=folder / "soak", faults=drawn, against=folder / "still", say=print)
    report(found, steps=steps, elastic=asked.elastic)


def made(folder: Path, *, steps: int, elastic: bool) -> Design:
    """Ranks that share parameters, gradients and state, deterministic, saved every EVERY_STEPS."""
    ranks, batch = (ELASTIC_RANKS, ELASTIC_BATCH) if elastic else (RANKS, BATCH)
    changes = {"elastic": ElasticSpec(min_ranks=1, replacements=1000), "optimizer": OptimizerSpec(learning_rate=CALM)}
    return design(
        folder,
        Layout(batch=batch, microbatch=batch // ranks, shard=ranks, sharding=Sharding.PARAMETERS),
        steps=steps,
        deterministic=True,
        **(changes if elastic else {}),
        checkpoint=CheckpointSpec(every_steps=EVERY_STEPS, keep=3),
        evaluation=EvaluationSpec(every_steps=0, tokens=BATCH * 16),
        peer_timeout_seconds=PATIENCE,
    )


def pace(folder: Path, *, elastic: bool) -> float:
    """Seconds of a step here and now."""
    train(made(folder, steps=TRIED_STEPS, elastic=elastic), run_dir=folder / "tried", say=str.strip)
    rows = (folder / "tried" / "metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(row)["seconds"] for row in rows if '"loss"' in row)


def report(found: Chaos, *, steps: int, elastic: bool) -> None:
    struck, goodput, curve = found.struck, found.goodput, found.curve
    if found.gave_up:
        raise SystemExit(f"after {len(struck)} faults the run was not started again: {found.gave_up}")
    assert goodput is not None
    assert curve is not None
    met = incidents(found)
    predicted, measured = predict(found, met), measure(found)
    gap = abs(sum(goodput.seconds.values()) / found.wall_seconds - 1.0)
    off = predicted.ettr / measured - 1.0
    asked, tolerance = named_ones(struck), 1e-9 if elastic else 0.0
    rightly = [each for each in asked if is_told(each.fault, each.words)]
    late = lateness(struck)
    kinds = Counter(each.fault.kind for each in struck)
    simulated = Row(
        name="simulated beside measured goodput",
        target="5 %",
        measured=f"{predicted.ettr:.4f} and {measured:.4f}: {100 * off:+.1f} %",
        holds=abs(off) <= 0.05,
    )
    finish(
        "faults-soak-elastic" if elastic else "faults-soak",
        [
            Row(
                name="faults recovered from",
                target=f"{len(struck) + len(found.missed)} of {len(struck) + len(found.missed)}",
                measured=f"{found.recovered}, {len(kinds)} kinds, {len(found.launches)} launches",
                holds=found.recovered == len(struck) and not found.missed and not found.gave_up,
            ),
            Row(
                name="sequences lost or repeated",
                target="0",
                measured=f"{'0' if not found.problems else 'some'} of {found.read:,}",
                holds=not found.problems and found.read == steps * (ELASTIC_BATCH if elastic else BATCH),
            ),
            Row(
                name="losses beside the undisturbed run",
                target="1e-9" if elastic else "the same bits",
                measured=f"{curve.worst:.1e} apart in {curve.steps:,} steps, state the same: {curve.same_state}",
                holds=curve.is_equal and curve.worst <= tolerance,
            ),
            Row(
                name="goodput sums to the time that passed",
                target="0.5 %",
                measured=f"{100 * gap:.2f} %",
                holds=gap <= 0.005,
            ),
            *(() if elastic else (simulated,)),
            Row(
                name="killed and hung ranks that were named",
                target="all",
                measured=f"{len(rightly)} of {len(asked)}",
                holds=len(rightly) == len(asked),
            ),
            Row(
                name="from the fault until the rank was named, less the time-out where it hung, at worst",
                target=f"{NAMED_SECONDS:g} s",
                measured=f"{max(late, default=0.0):.2f} s of {len(late)}, {_mean(late):.2f} s on average",
                holds=max(late, default=0.0) <= NAMED_SECONDS,
            ),
        ],
        {
            "chaos": {**codec.encode(replace(found, goodput=None)), "by_kind": by_kind(struck)},
            "goodput": codec.encode(goodput),
            "incidents": codec.encode(met),
            "simulated": codec.encode(predicted),
        },
    )


def named_ones(struck: Sequence[Struck]) -> list[Struck]:
    """Kills and hangs of one rank that ended a launch, or an epoch, and about which the run had something to say: where
    other faults were open, what it said may be of them."""
    kinds = (FaultKind.KILL, FaultKind.HANG)
    return [each for each in struck if each.fault.kind in kinds and each.fault.rank is not None and each.words]


def lateness(struck: Sequence[Struck]) -> list[float]:
    """Of each of them the seconds until it was named, or until the launch had ended where it was named then; of ranks
    that hung less those that others may wait."""
    named = [(each, each.named_seconds or each.found_seconds) for each in named_ones(struck)]
    waited = {FaultKind.HANG: PATIENCE}
    return [took - waited.get(each.fault.kind, 0.0) for each, took in named if took is not None]


def incidents(found: Chaos) -> list[Incident]:
    """Faults that overlap are one: a start that was killed is part of what brought it about."""
    groups: list[list[Struck]] = []
    ends = 0.0
    for each in found.struck:
        if groups and each.at_seconds <= ends:
            groups[-1].append(each)
        else:
            groups.append([each])
            ends = 0.0
        ends = max(ends, each.at_seconds + (each.back_seconds or 0.0))
    return [_incident(group, step_seconds=found.undisturbed_seconds / found.undisturbed_steps) for group in groups]


def _incident(group: Sequence[Struck], *, step_seconds: float) -> Incident:
    began = group[0].at_seconds
    seconds = max(each.at_seconds + (each.back_seconds or 0.0) for each in group) - began
    ended = any(each.found_seconds is not None for each in group)
    kinds = {each.fault.kind for each in group}
    steps = 1 if ended else max(_steps_within(each.fault) for each in group)  # a run is back when it has done a step
    trained = min(seconds, step_seconds * steps)
    if not ended:
        goes_on = GoesOn.HERE
    elif FaultKind.CORRUPT in kinds:
        goes_on = GoesOn.BEFORE
    else:
        goes_on = GoesOn.SAVED if kinds == {FaultKind.PREEMPT} else GoesOn.NEWEST
    name = "+".join(sorted(kind.value for kind in kinds)) + ("" if ended else ", went on")
    return Incident(name=name, at_seconds=began, seconds=seconds - trained, trained_seconds=trained, goes_on=goes_on)


def _steps_within(fault: Fault) -> int:
    return fault.steps + 2 if fault.kind is FaultKind.SLOW else 2


def predict(found: Chaos, met: Sequence[Incident]) -> Simulated:
    """By what incidents cost, for the whole time that the run took."""
    alike: dict[tuple[str, GoesOn], list[float]] = defaultdict(list)
    for each in met:
        alike[each.name, each.goes_on].append(each.seconds)
    troubles = [
        Trouble(
            name=name,
            share=len(seconds) / len(met),
            found_seconds=0.0,
            back_seconds=statistics.mean(seconds),
            goes_on=goes_on,
        )
        for (name, goes_on), seconds in alike.items()
    ]
    trained = found.undisturbed_seconds + sum(each.trained_seconds for each in met)
    fleet = Fleet(nodes=1, seconds_between_failures=trained / len(met), only_training=True)
    each = stall(found)
    every = EVERY_STEPS * step(found)
    saves = Saves(every_seconds=every, stall_seconds=each, write_seconds=each)
    return simulate(fleet, saves, troubles, seconds=found.wall_seconds, seeds=SEEDS)


def stall(found: Chaos) -> float:
    """What a save stops training for, on average over the run."""
    assert found.goodput is not None
    done = found.goodput.steps + sum(each.undone_steps for each in found.struck)
    return found.goodput.seconds[Spent.CHECKPOINT] / max(1.0, done / EVERY_STEPS)


def step(found: Chaos) -> float:
    """Seconds of a step while no fault was open, saves left out."""
    return found.undisturbed_seconds / found.undisturbed_steps - stall(found) / EVERY_STEPS


def measure(found: Chaos) -> float:
    """The share of the time that the steps of the run would have taken undisturbed, without saves."""
    return len(losses(Path(found.run))) * step(found) / found.wall_seconds


def by_kind(struck: Sequence[Struck]) -> dict[str, dict[str, float]]:
    """How many, how many ended a launch, and mean seconds until it ended and until it trained again."""
    told = {}
    for kind in FaultKind:
        ours = [each for each in struck if each.fault.kind is kind]
        ended = [each for each in ours if each.found_seconds is not None]
        told[kind.value] = {
            "faults": len(ours),
            "ended": len(ended),
            "found_seconds": _mean([each.found_seconds or 0.0 for each in ended]),
            "back_seconds": _mean([each.back_seconds or 0.0 for each in ours]),
            "undone_steps": _mean([float(each.undone_steps) for each in ours]),
            **{f"at_{at}": sum(each.fault.moment.at == at for each in ours) for at in ("any", "save", "start")},
        }
    return told


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values) if values else 0.0


if __name__ == "__main__":
    main()
