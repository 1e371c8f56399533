"""Low rank training over a slow link: steps a second and bytes before and after the switch, and validation loss beside
whole matrices at equal tokens. Two hosts of a lab with one core each, 100 Mbit/s between them; root is needed.

Losses are of runs over a fast link, beside those of whole matrices of `benchmarks/network/run.py` where its results are
of as many steps, else of runs of its own.
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
from meshwright.spec.low_rank import Pufferfish
from meshwright.spec.plan import Design
from meshwright.train.checkpoint.find import newest, of_checkpoint
from run import FREE, ROOT, SLOW, WARM, Curve, design, run

HOSTS, DENSE, THIN, MORE = 2, 10, 12, 10  # steps over the slow link before and after the switch, and then again


def thin(made: Design, *, ratio: float, switch_at: float, rewarm: float) -> Design:
    """The design whose matrices have `ratio` of their rank from `switch_at` on, whatever its loss does after it."""
    spec = Pufferfish(ratio=ratio, switch_at=switch_at, rewarm=rewarm, rollback=None)
    return replace(made, job=replace(made.job, low_rank=spec))


def whole_loss(made: Design, *, steps: int, seed: int, folder: Path) -> float:
    """Of whole matrices after so many steps: what `benchmarks/network/run.py` kept, or a run's."""
    kept = record.RESULTS / f"network-{HOSTS}.json"
    if kept.is_file():
        entry = json.loads(kept.read_text())["raw"]["runs"].get(f"every_step, seed {seed}", {"validation": {}})
        if str(steps) in entry["validation"]:
            return float(entry["validation"][str(steps)])
    return run(made, rate=FREE, folder=folder).validation[steps]


def sent_as_predicted(made: Design, folder: Path) -> float:
    """Bytes of gradients that a host sends in a step of the model that the run ended with."""
    found = newest(folder / "checkpoints").checkpoint
    assert found is not None
    return sent_bytes(of_checkpoint(made, found), ranks=HOSTS)


def slow_steps(options: argparse.Namespace) -> tuple[Curve, float, float]:
    """Over the slow link: a run through its switch, bytes that a host sent in a thin step as counted at its interface,
    and as predicted."""
    curves = []
    for steps in (DENSE + THIN, DENSE + THIN + MORE):
        made = design(HOSTS, steps=steps, seed=0, every=0)
        made = thin(made, ratio=options.ratio, switch_at=float(DENSE), rewarm=2.0)
        curves.append(run(made, rate=SLOW, folder=options.folder / "slow"))
    short, long = curves
    return long, (long.sent_bytes - short.sent_bytes) / MORE, sent_as_predicted(made, options.folder / "slow")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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
        made = design(HOSTS, steps=steps, seed=seed, every=steps // 6)
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
    record.finish("low-rank-network", rows, raw)


if __name__ == "__main__":
    main()
