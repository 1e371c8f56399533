"""Low rank training over a slow link: steps a second and bytes before and after the switch, and validation loss beside
whole matrices at equal tokens. Hosts of a lab with an even share of the cores, 100 Mbit/s between them; root is needed,
and without it the exit code is 4.

Losses are of runs over a fast link, beside those of whole matrices of `benchmarks/network/run.py` where its results are
of as many steps, else of runs of its own. On the fast link the gate is held to what it says as well: a model that it
declines stays whole, and one that it accepts becomes as much faster as it predicts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "network"))
sys.path.append(str(Path(__file__).resolve().parent.parent / "compression"))

from sent import sent_bytes

import record
from meshwright import catalog, search
from meshwright.cost.low_rank import Verdict, candidates, given_ranks, verdict
from meshwright.run.outcome import read_report
from meshwright.spec.low_rank import Pufferfish
from meshwright.spec.plan import Design
from meshwright.train.checkpoint.find import newest, of_checkpoint
from run import FREE, ROOT, SLOW, WARM, Curve, design, in_a_lab, run

DENSE, THIN, MORE = 10, 12, 10  # steps over the slow link before and after the switch, and then again
FAST_DENSE, FAST_THIN = 25, 32  # over the fast link
DECLINED, ACCEPTED = "tiny", "llama-5m"  # of width 64 and 256


def thin(made: Design, *, ratio: float, switch_at: float, rewarm: float) -> Design:
    """The design whose matrices have `ratio` of their rank from `switch_at` on, whatever its loss does after it."""
    spec = Pufferfish(ratio=ratio, switch_at=switch_at, rewarm=rewarm, rollback=None)
    return replace(made, job=replace(made.job, low_rank=spec))


def whole_loss(made: Design, *, steps: int, seed: int, folder: Path) -> float:
    """Of whole matrices after so many steps: what `benchmarks/network/run.py` kept, or a run's."""
    kept = record.RESULTS / f"network-{made.plan.world_size}.json"
    if kept.is_file():
        entry = json.loads(kept.read_text())["raw"]["runs"].get(f"every_step, seed {seed}", {"validation": {}})
        if str(steps) in entry["validation"]:
            return float(entry["validation"][str(steps)])
    return run(made, rate=FREE, folder=folder).validation[steps]


def sent_as_predicted(made: Design, folder: Path) -> float:
    """Bytes of gradients that a host sends in a step of the model that the run ended with."""
    found = newest(folder / "checkpoints").checkpoint
    assert found is not None
    return sent_bytes(of_checkpoint(made, found), ranks=made.plan.world_size)


def slow_steps(options: argparse.Namespace) -> tuple[Curve, float, float]:
    """Over the slow link: a run through its switch, bytes that a host sent in a thin step as counted at its interface,
    and as predicted."""
    curves = []
    for steps in (DENSE + THIN, DENSE + THIN + MORE):
        made = design(options.hosts, steps=steps, seed=0, every=0)
        made = thin(made, ratio=options.ratio, switch_at=float(DENSE), rewarm=2.0)
        curves.append(run(made, rate=SLOW, folder=options.folder / "slow"))
    short, long = curves
    return long, (long.sent_bytes - short.sent_bytes) / MORE, sent_as_predicted(made, options.folder / "slow")


def gate(name: str, *, hosts: int, spec: Pufferfish) -> tuple[Design, Verdict]:
    """A design of the model on the fast link that switches after FAST_DENSE steps, and what the gate says of it."""
    base = design(hosts, steps=FAST_DENSE + FAST_THIN, seed=0, every=0)
    whole = search.design(catalog.load_model(name), base.cluster, base.job).design
    asked = replace(spec, switch_at=float(FAST_DENSE), rewarm=2.0, rollback=None)
    found = candidates(whole, asked)
    said = verdict(whole, found, given_ranks(found, ratio=asked.ratio), gain=asked.gain)
    return replace(whole, job=replace(whole.job, low_rank=asked)), said


def fast_rows(options: argparse.Namespace) -> tuple[list[record.Row], dict[str, Any]]:
    """Of a model that the gate declines where nothing slow is crossed that it stays whole, and of one that it accepts
    the measured speed beside the predicted one."""
    rows, raw, folder = [], dict[str, Any](), options.folder / "fast"
    made, said = gate(DECLINED, hosts=options.hosts, spec=Pufferfish(least_dim=64, ratio=0.375))
    run(made, rate=FREE, folder=folder)
    report = read_report(folder / "measured.json")
    told = [note for note in report.notes if "low rank" in note] if report is not None else []
    stayed = not said.pays and any("declined" in note for note in told)
    rows.append(
        record.Row(
            name=f"fast link, {DECLINED}: the gate",
            target="declines",
            measured=f"{'declines' if stayed else 'accepts'}, {100 * said.saved:.1f} % of a step",
            holds=stayed,
        )
    )
    raw[DECLINED] = {"told": told, "saved": said.saved}
    made, said = gate(ACCEPTED, hosts=options.hosts, spec=Pufferfish(ratio=options.ratio))
    curve = run(made, rate=FREE, folder=folder)
    before, after = statistics.mean(curve.seconds[WARM:FAST_DENSE]), statistics.mean(curve.seconds[FAST_DENSE + 2 :])
    predicted, measured = 1.0 / (1.0 - said.saved), before / after
    rows.append(
        record.Row(
            name=f"fast link, {ACCEPTED}: step rate after the switch over that before it",
            target=f"{predicted:.2f} predicted, 15 %",
            measured=f"{measured:.2f}",
            holds=said.pays and abs(measured / predicted - 1.0) <= 0.15,
        )
    )
    raw[ACCEPTED] = {"predicted": predicted, **asdict(curve)}
    return rows, raw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ratio", type=float, default=0.1)
    parser.add_argument("--switch-at", type=float, default=0.25)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-low-rank")
    options = parser.parse_args()
    steps, folder = options.steps, options.folder
    curve, counted, predicted = slow_steps(options)
    before, after = statistics.mean(curve.seconds[WARM:DENSE]), statistics.mean(curve.seconds[DENSE + 2 :])
    print(f"whole: {before:.3f} s a step, thin: {after:.3f} s; {counted / 1e6:.2f} MB sent a thin step", flush=True)
    raw: dict[str, Any] = {"slow": asdict(curve), "counted_bytes": counted, "predicted_bytes": predicted, "runs": {}}
    gaps = []
    for seed in range(options.seeds):
        made = design(options.hosts, steps=steps, seed=seed, every=steps // 6)
        low = thin(made, ratio=options.ratio, switch_at=options.switch_at, rewarm=0.02)
        found = run(low, rate=FREE, folder=folder / "thin")
        gaps.append(found.validation[steps] - whole_loss(made, steps=steps, seed=seed, folder=folder / "whole"))
        raw["runs"][f"seed {seed}"] = asdict(found)
        print(f"seed {seed}: {gaps[-1]:+.3f} nats above whole matrices", flush=True)
    gap, way = statistics.mean(gaps), f"{options.ratio:g} of the rank from {options.switch_at:g} of the run on"
    rows = [
        record.Row(
            name="step rate after the switch over that before it, 100 Mbit/s",
            target="1.8",
            measured=f"{before / after:.2f}",
            holds=before / after >= 1.8,
        ),
        record.Row(
            name="bytes at the interface over those predicted, with what carries them",
            target="1.00 to 1.08",
            measured=f"{counted / predicted:.3f}",
            holds=1.0 <= counted / predicted <= 1.08,
        ),
        record.Row(
            name=f"loss above that of whole matrices after {steps} steps, {way}",
            target="0.03 nats",
            measured=f"{gap:+.3f} nats",
            holds=gap <= 0.03,
        ),
    ]
    told, raw["fast"] = fast_rows(options)
    name = "low-rank-network" if options.hosts == 2 else f"low-rank-network-{options.hosts}"
    record.finish(name if options.seeds >= 3 else f"{name}-short", [*rows, *told], raw)


if __name__ == "__main__":
    in_a_lab(main)
