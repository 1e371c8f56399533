"""What ways of meeting cost in loss at equal tokens: `python benchmarks/network/losses.py streaming:4:int4 powersgd:4`.

Two learners of one core each on this machine train as in `run.py`, beside ranks whose whole gradients meet in every
step; what they learn does not depend on the link, so that none is shaped and no root is needed. Curves that are kept
from earlier calls are not measured again but with --again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import record
from meshwright.run.files import write_json
from meshwright.spec import codec
from meshwright.spec.cluster import Precision
from meshwright.spec.compression import PowerSgd
from meshwright.spec.plan import Design
from meshwright.spec.synchronize import GradientSync, SyncKind, usual_rounds
from run import ROOT, design

HOSTS, STEPS, APART = 2, 150, 25
EVERY_STEP = SyncKind.EVERY_STEP.value
FOLDER = ROOT / "runs" / "bench-losses"
KEPT = record.RESULTS / "network-losses.json"
Curve = dict[int, float]  # validation loss by step


def gradients_named(setting: str) -> GradientSync:
    """`streaming:4:int4` is the kind, the steps of a round and what learners send; fields of its rounds may follow, as
    in `streaming:4:int4:own_share=0`. `powersgd:4` is compression of that rank."""
    name, *told = setting.split(":")
    if name == EVERY_STEP:
        return GradientSync()
    if name == PowerSgd().kind:
        return GradientSync(compression=PowerSgd(rank=int(told[0])))
    every, precision, *fields = told
    rounds = usual_rounds(SyncKind(name), every=int(every), learners=HOSTS, precision=Precision(precision))
    changed = {field.partition("=")[0]: json.loads(field.partition("=")[2]) for field in fields}
    return GradientSync(kind=SyncKind(name), rounds=replace(rounds, **changed))


def setting_of(gradients: GradientSync) -> str:
    """The setting that `gradients` are of, where their rounds are the usual ones."""
    if gradients.compression is not None:
        assert isinstance(gradients.compression, PowerSgd)
        return f"{gradients.word}:{gradients.compression.rank}"
    if not gradients.kind.has_learners:
        return EVERY_STEP
    return f"{gradients.word}:{gradients.rounds.every}:{gradients.rounds.precision.value}"


def trained(made: Design, *, folder: Path) -> Curve:
    """Validation loss by step of the design trained to its end by as many processes here as it has ranks."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "design.json", made)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={made.plan.world_size}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, *launch, "-m", "meshwright.run.worker", str(folder)],
        env=environment,
        check=True,
        capture_output=True,
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}


def curve_of(setting: str, *, seed: int, steps: int, again: bool = False) -> Curve:
    """The curve that is kept of it, or one that is measured now and kept."""
    known = kept()
    found = known.get(setting, {}).get(seed, {})
    if again or not set(range(APART, steps + 1, APART)) <= found.keys():
        made = design(HOSTS, steps=steps, seed=seed, every=APART)
        made = replace(made, plan=replace(made.plan, gradients=gradients_named(setting)))
        found = trained(made, folder=FOLDER / f"{setting.replace(':', '-')}-{seed}")
        known.setdefault(setting, {})[seed] = found if again else {**known.get(setting, {}).get(seed, {}), **found}
        record.keep("network-losses", rows_of(known), raw_of(known))
    print(f"{setting}, seed {seed}: {found[max(step for step in found if step <= steps)]:.4f}", flush=True)
    return found


def kept() -> dict[str, dict[int, Curve]]:
    """By setting and seed."""
    if not KEPT.is_file():
        return {}
    losses = json.loads(KEPT.read_text())["raw"]["losses"]
    return {
        setting: {int(seed): {int(step): loss for step, loss in curve.items()} for seed, curve in seeds.items()}
        for setting, seeds in losses.items()
    }


def mean_curve(curves: Sequence[Curve]) -> Curve:
    return {step: statistics.mean(curve[step] for curve in curves) for step in curves[0]}


def rows_of(known: dict[str, dict[int, Curve]]) -> list[record.Row]:
    """Of every setting, how far it ends above every step's with the seeds and after the steps that both have."""
    rows = []
    for setting, seeds in known.items():
        alike = known.get(EVERY_STEP, {})
        both = [(curve, alike[seed]) for seed, curve in seeds.items() if max(alike.get(seed, {}), default=-1) in curve]
        if setting != EVERY_STEP and both:
            gap = statistics.mean(curve[max(whole)] - whole[max(whole)] for curve, whole in both)
            name = f"{setting}: loss above every step's (seeds: {len(both)})"
            rows.append(record.Row(name=name, target="told", measured=f"{gap:+.3f} nats", holds=True))
    return rows


def raw_of(known: dict[str, dict[int, Curve]]) -> object:
    return {"losses": known, "gradients": {setting: codec.encode(gradients_named(setting)) for setting in known}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--again", action="store_true", help="also what is kept")
    options = parser.parse_args()
    for setting in (EVERY_STEP, *options.settings):
        for seed in options.seeds:
            curve_of(setting, seed=seed, steps=options.steps, again=options.again)
    known = kept()
    if rows := rows_of(known):
        record.finish("network-losses", rows, raw_of(known))


if __name__ == "__main__":
    main()
