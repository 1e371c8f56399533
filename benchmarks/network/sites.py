"""Four hosts on two sites: what the planner chooses over links of 1, 10 and 100 Gbit/s between the sites, beside the
other arrangements as a lab measures them: seconds of a step of data parallel across the sites, of a pipeline across
them with even and with weighted stages, and of learners across. Sites are as fast as each other, or one is half as fast
as the other; root is needed, and without it the exit code is 4.

No machine carries 100 Gbit/s beside the training of two cores. Links between the sites are scaled down so that
gradients take the same multiple of a step as they would of 7B parameters on 32 H100 that reach 400 TFLOP/s each with a
batch of 4 Mi tokens; inside a site nothing is held back. The device is one core as `cluster measure` finds it, and a
host is a share of one. Fixed work on all cores is timed beside each arrangement, and steps are compared as they would
be on cores as they were measured.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from choice import Place, fixed_seconds, measured_device, measured_link, slowed, usual_step

import record
from meshwright import cost, search
from meshwright.lab import Lab, topology
from meshwright.spec.cluster import ClusterSpec, Link, Precision
from meshwright.spec.errors import ConfigError, NoPlanFits
from meshwright.spec.job import Constraints
from meshwright.spec.plan import Design, Plan
from meshwright.spec.synchronize import SynchronizeSpec, SyncKind
from run import FREE, LENGTH, ROOT, SEQUENCES, WARM, Curve, design, in_a_lab, trained

HOSTS = 4
NOISE = 0.10  # steps of one design on these cores, minutes apart
# 7B parameters, 6 FLOPs each for every one of 4 Mi tokens, on 32 devices of 400 TFLOP/s.
FAR_PARAMETERS, FAR_STEP = 7e9, 6 * 7e9 * 4 * 2**20 / (32 * 400e12)
GBITS = (1, 10, 100)
SPEEDS: Mapping[str, tuple[float, float]] = {"even sites": (1.0, 1.0), "one site half as fast": (1.0, 0.5)}
FEWEST, MOST, SECONDS = 3, 15, 10.0  # steps that are counted: as many as take so long
DATA, EVEN, WEIGHTED, LEARNERS = "data parallel", "pipeline, even", "pipeline, weighted", "learners"
ACROSS: Mapping[str, Mapping[str, int | str]] = {
    DATA: {"pipeline": 1, "sync": "every_step"},
    WEIGHTED: {"pipeline": 2, "sync": "every_step"},
    LEARNERS: {"pipeline": 1, "sync": "streaming"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """An arrangement with its predicted step."""

    made: Design
    predicted: float

    @property
    def every(self) -> int:
        """Steps of a round, one where ranks meet in every step."""
        plan = self.made.plan
        return plan.gradients.rounds.every if plan.learners > 1 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sites:
    """Two sites of two hosts, `gbits` between them before scaling, as `speeds` says beside each other."""

    gbits: int
    name: str
    cluster: ClusterSpec

    @property
    def words(self) -> str:
        return f"{self.gbits} Gbit/s, {self.name}"


def scaled(gbits: float, *, parameters: int, step: float) -> float:
    """Bytes/s at which gradients of `parameters` take the multiple of `step` that those of the far model do of theirs
    at `gbits`."""
    return gbits * 1e9 / 8 * (parameters / step) / (FAR_PARAMETERS / FAR_STEP)


def sites_of(one: ClusterSpec, *, gbits: int, name: str, rate: float) -> Sites:
    """Hosts of one core of `one`, each with its share of all cores, by two on sites with `rate` bytes/s between."""
    shares = [speed / (2.0 * sum(SPEEDS[name])) for speed in SPEEDS[name]]
    cores = len(os.sched_getaffinity(0))
    near = measured_link(Place(name="inside a site", rate=FREE))
    groups = tuple(
        replace(
            one.groups[0],
            name=site,
            site=site,
            num_nodes=2,
            nic=near,
            device=slowed(one.groups[0].device, 1.0 / (share * cores), name=site),
        )
        for site, share in zip(("near", "far"), shares, strict=True)
    )
    wide = Link(bandwidth=rate, latency_seconds=1e-4, efficiency=0.95)
    cluster = replace(one, name=f"{gbits} Gbit/s, {name}", groups=groups, wide_area=wide)
    return Sites(gbits=gbits, name=name, cluster=cluster)


def asked(sites: Sites, fix: Mapping[str, int | str], *, learners: bool) -> Way | None:
    """The planner's design under `fix`, where learners are allowed or not; None where there is none."""
    base = design(HOSTS, steps=MOST, seed=0, every=0)
    kinds = tuple(kind for kind in SyncKind if kind.has_learners) if learners else ()
    job = replace(
        base.job,
        batch_tokens=HOSTS * SEQUENCES * LENGTH,
        synchronize=SynchronizeSpec(kinds=kinds, precision=Precision.INT4),
        constraints=Constraints(fix=dict(fix)),
    )
    try:
        decision = search.design(base.model, sites.cluster, job, trainable=True)
    except (NoPlanFits, ConfigError) as error:
        print(f"{sites.words}, {dict(fix) or 'free'}: {error}", flush=True)
        return None
    return Way(made=decision.design, predicted=decision.report.step_seconds)


def evenly(way: Way) -> Way:
    """The pipeline with as many blocks on every stage, but for those that are left over."""
    made, stages = way.made, way.made.plan.stages
    blocks, cuts = len(made.model.blocks), len(stages)
    edges = [round(index * blocks / cuts) for index in range(cuts + 1)]
    even = tuple(
        replace(stage, groups=(replace(stage.groups[0], start=start, stop=stop),))
        for stage, start, stop in zip(stages, edges, edges[1:], strict=False)
    )
    found = replace(made, plan=replace(made.plan, stages=even))
    return Way(made=found, predicted=cost.predict(found).step_seconds)


def ways_of(sites: Sites) -> tuple[dict[str, Way], dict[str, str]]:
    """Arrangements by name, and which of them the planner chooses where every step is to be that of one device and
    where learners are allowed; a choice that is none of the others is one of its own."""
    found = {name: way for name, fix in ACROSS.items() if (way := asked(sites, fix, learners=name == LEARNERS))}
    if WEIGHTED in found and (even := evenly(found[WEIGHTED])).made.plan != found[WEIGHTED].made.plan:
        found[EVEN] = even
    chosen = {}
    for word, learners in (("every step", False), ("learners allowed", True)):
        free = asked(sites, {}, learners=learners)
        assert free is not None, f"{sites.words}: no plan at all"
        same = [name for name, way in found.items() if way.made.plan == free.made.plan]
        chosen[word] = same[0] if same else f"the choice, {word}"
        found.setdefault(chosen[word], free)
    return found, chosen


def steps_of(way: Way) -> int:
    """Steps to train: those before the ones that count, and as many as ten seconds have, whole rounds of learners."""
    every = way.every
    counted = min(MOST, max(FEWEST, round(SECONDS / way.predicted)))
    return WARM + every * max(2 if every > 1 else 1, math.ceil(counted / every))


def measured(way: Way, sites: Sites, *, folder: Path) -> Curve:
    """The design trained for a few steps on the lab that the cluster is."""
    job = replace(way.made.job, total_tokens=steps_of(way) * way.made.plan.batch_tokens)
    with Lab.of(topology(sites.cluster)) as lab:
        return trained(replace(way.made, job=job), lab, range(HOSTS), folder)


def place(sites: Sites, *, usual: float, folder: Path) -> tuple[list[record.Row], dict[str, Any]]:
    """Every arrangement measured, with the rows of what the planner chooses."""
    ways, chosen = ways_of(sites)
    found: dict[str, float] = {}
    raw: dict[str, Any] = {"chosen": chosen, "ways": {}}
    before = fixed_seconds()
    for name, way in sorted(ways.items(), key=lambda entry: entry[1].predicted):
        curve = measured(way, sites, folder=folder / "run")
        after = fixed_seconds()
        times = (before + after) / (2.0 * usual)
        step = usual_step(curve.seconds, every=way.every)
        found[name] = step / times
        marks = [f"chosen: {word}" for word, which in chosen.items() if which == name]
        told = f"{found[name]:.3f} s a step ({step:.3f} on cores {times:.2f} times as slow)"
        words = f"{way.made.plan.describe()}, blocks {blocks_of(way.made.plan)}"
        print(f"{sites.words}, {name}: {told}, predicted {way.predicted:.3f}; {words} {'; '.join(marks)}", flush=True)
        fixed = [before, after, usual]
        raw["ways"][name] = {"predicted": way.predicted, "plan": words, "fixed_seconds": fixed, **asdict(curve)}
        before = after
    return rows_of(sites, ways, found, chosen=chosen), raw


def blocks_of(plan: Plan) -> str:
    return "+".join(str(stage.stop - stage.start) for stage in plan.stages)


def rows_of(
    sites: Sites, ways: Mapping[str, Way], found: Mapping[str, float], *, chosen: Mapping[str, str]
) -> list[record.Row]:
    """The choices beside the fastest, and the order of all arrangements as predicted and as measured."""
    rows = []
    for word, name in chosen.items():
        rivals = [way for way in found if word == "learners allowed" or ways[way].made.plan.learners == 1]
        best = min(rivals, key=lambda way: found[way])
        beyond = found[name] / found[best] - 1.0
        rows.append(
            record.Row(
                name=f"{sites.words}, {word}: step of the choice ({name}) beyond the shortest ({best})",
                target=f"{100 * NOISE:.0f} %, noise",
                measured=f"{100 * beyond:.1f} %",
                holds=beyond <= NOISE,
            )
        )
    pairs = list(combinations(found, 2))
    right = [in_order(found[a] / found[b], ways[a].predicted / ways[b].predicted) for a, b in pairs]
    predicted, shown = (
        " < ".join(sorted(found, key=lambda way: seconds[way]))
        for seconds in ({way: ways[way].predicted for way in found}, found)
    )
    rows.append(
        record.Row(
            name=f"{sites.words}: pairs in the order predicted ({predicted})",
            target="all, but noise",
            measured=f"{sum(right)} of {len(pairs)} ({shown})",
            holds=all(right),
        )
    )
    return rows


def in_order(measured: float, predicted: float) -> bool:
    """Two steps are as predicted beside each other, or as long as each other but for noise."""
    return abs(math.log(measured)) <= math.log1p(NOISE) or (measured > 1.0) == (predicted > 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gbits", type=int, nargs="+", default=list(GBITS))
    parser.add_argument("--sites", nargs="+", default=list(SPEEDS), choices=list(SPEEDS))
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-sites")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    one, usual = measured_device(options.folder / "one-core.json")
    rows: list[record.Row] = []
    raw: dict[str, Any] = {"places": {}}
    even = sites_of(one, gbits=0, name="even sites", rate=FREE)
    alone = asked(even, {"replicate": HOSTS}, learners=False)
    assert alone is not None
    for name in options.sites:
        for gbits in options.gbits:
            rate = scaled(gbits, parameters=alone.made.model.parameters, step=alone.predicted)
            sites = sites_of(one, gbits=gbits, name=name, rate=rate)
            print(f"{sites.words}: {8 * rate / 1e6:.0f} Mbit/s here", flush=True)
            told, kept = place(sites, usual=usual, folder=options.folder)
            rows += told
            raw["places"][sites.words] = {"bytes_per_second": rate, **kept}
    partial = len(options.gbits) * len(options.sites) < len(GBITS) * len(SPEEDS)
    record.finish("network-sites-part" if partial else "network-sites", rows, raw)


if __name__ == "__main__":
    in_a_lab(main)
