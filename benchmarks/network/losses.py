"""What rounds cost in loss at equal tokens: `python benchmarks/network/losses.py streaming:4:int4 eager:2:int8`.

Two learners of one core each on this machine train as in `run.py`, whose every step's loss stands beside theirs; what
they learn does not depend on the link, so that none is shaped and no root is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import record
from meshwright.run.files import write_json
from meshwright.spec.cluster import Precision
from meshwright.spec.plan import Design
from meshwright.spec.synchronize import Rounds, SyncKind, usual_rounds
from run import ROOT, design, meeting

HOSTS = 2


def rounds_named(setting: str) -> tuple[SyncKind, Rounds]:
    """`streaming:4:int4` is the kind, the steps of a round and what learners send; fields of its rounds may follow, as
    in `streaming:4:int4:own_share=0`."""
    name, every, precision, *fields = setting.split(":")
    rounds = usual_rounds(SyncKind(name), every=int(every), learners=HOSTS, precision=Precision(precision))
    changed = {field.partition("=")[0]: json.loads(field.partition("=")[2]) for field in fields}
    return SyncKind(name), replace(rounds, **changed)


def losses(made: Design, *, folder: Path) -> dict[int, float]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", nargs="+")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench-losses")
    options = parser.parse_args()
    steps, raw, rows = options.steps, {}, []
    for setting in ("every_step", *options.settings):
        raw[setting] = {}
        for seed in options.seeds:
            known = record.RESULTS / f"network-{HOSTS}.json"
            made = design(HOSTS, steps=steps, seed=seed, every=steps)
            if setting != "every_step":
                made = meeting(made, *rounds_named(setting))
            curve = _known(known, seed=seed, steps=steps) if setting == "every_step" else None
            raw[setting][seed] = curve or losses(made, folder=options.folder / f"{setting.replace(':', '-')}-{seed}")
            print(f"{setting}, seed {seed}: {raw[setting][seed][steps]:.4f}", flush=True)
        gap = statistics.mean(raw[setting][seed][steps] - raw["every_step"][seed][steps] for seed in options.seeds)
        told = record.Row(
            name=f"{setting}: loss above every step's", target="told", measured=f"{gap:+.3f} nats", holds=True
        )
        rows += [told] if setting != "every_step" else []
    rounds = {setting: asdict(rounds_named(setting)[1]) for setting in options.settings}
    record.finish("network-losses", rows, {"losses": raw, "rounds": rounds})


def _known(path: Path, *, seed: int, steps: int) -> dict[int, float] | None:
    """Every step's curve as `run.py` kept it, of as many steps."""
    entries: dict[str, Any] = json.loads(path.read_text())["raw"]["runs"] if path.is_file() else {}
    curve = {
        int(step): loss for step, loss in entries.get(f"every_step, seed {seed}", {}).get("validation", {}).items()
    }
    return curve if max(curve, default=0) == steps else None


if __name__ == "__main__":
    main()
