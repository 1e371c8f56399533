"""Predicted against counted of plans that a search made under constraints drawn by chance: `drawn.py SEED MODEL...`.

Tests name the layouts that someone thought of. This draws a cluster and a few settings for each model, lets the
search design the rest, runs the whole plan without its hardware, and tells the farthest peak of a rank and every line
of collectives and FLOPs that differs. A plan that the drawn settings refuse is told and not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import record

COMMAND = str(Path(sys.executable).parent / "meshwright")
MODELS = ("olmo-2-0425-1b", "llama-3.1-8b", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "gemma-2-9b", "phi-4")
CLUSTERS = ("8xH100", "16xH100", "64xH100", "32xA100-80GB", "2x8xB200")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-v", "dualpipe-v")
FITS, DOES_NOT_FIT = 0, 3
REFUSED = (2, 3)  # settings that leave no legal plan, or none that fits
MOST_PEAK = 0.005
SAME = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One dry run: what was asked for, how far the farthest peak is from its prediction, and which lines differ."""

    asked: str
    plan: str
    peak_error: float
    differing: tuple[str, ...]
    refused: str = ""

    @property
    def agrees(self) -> bool:
        return abs(self.peak_error) <= MOST_PEAK and not self.differing


def drawn(chance: random.Random, model: str) -> list[str]:
    """Arguments of `meshwright plan` for a model."""
    fixed: dict[str, Any] = {"recompute": chance.choice(("none", "none", "selective", "full"))}
    if chance.random() < 0.5:
        fixed["tensor"] = chance.choice((1, 2, 4))
    if chance.random() < 0.5:
        fixed["pipeline"] = chance.choice((1, 2, 4))
    if chance.random() < 0.3:
        fixed["zero"] = chance.choice((0, 1, 2, 3))
    if chance.random() < 0.3:
        fixed["schedule"] = chance.choice(SCHEDULES)
    if chance.random() < 0.2:
        fixed["context"] = 2
    settings = [f"constraints.fix.{name}={value}" for name, value in fixed.items()]
    if chance.random() < 0.5:
        settings.append(f"batch_tokens={chance.choice((262_144, 524_288))}")
    if chance.random() < 0.3:
        settings.append(f"sequence_length={chance.choice((1024, 4096, 8192))}")
    cluster = chance.choice(CLUSTERS)
    return ["--model", model, "--cluster", cluster, *(part for setting in settings for part in ("--set", setting))]


def compared(arguments: Sequence[str], *, folder: Path, seconds: float) -> Drawn:
    asked, plan = " ".join(arguments), folder / "plan.json"
    try:
        made = ran("plan", *arguments, "--out", str(plan), seconds=seconds)
        if made.returncode in REFUSED:
            return refused(asked, made.stderr.strip().splitlines()[-1])
        made.check_returncode()
        found = ran("dryrun", str(plan), "--json", seconds=seconds)
    except subprocess.TimeoutExpired as late:
        return refused(asked, f"{late.cmd[1]} took more than {seconds:.0f} s")
    if found.returncode not in (FITS, DOES_NOT_FIT):
        raise subprocess.CalledProcessError(found.returncode, found.args, stderr=found.stderr)
    told = json.loads(found.stdout)
    return Drawn(
        asked=asked,
        plan=told["description"],
        peak_error=max(peak_errors(told["gaps"]), key=abs, default=0.0),
        differing=tuple(differing(told["gaps"])),
    )


def refused(asked: str, why: str) -> Drawn:
    return Drawn(asked=asked, plan="", peak_error=0.0, differing=(), refused=why)


def ran(*arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=seconds)


def peak_errors(gaps: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    """Of every rank: predicted over counted, less one."""
    for gap in gaps:
        if gap["name"].startswith("rank") and gap["name"].endswith("peak"):
            yield gap["predicted"] / gap["measured"] - 1


def differing(gaps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for gap in gaps:
        predicted, counted = gap["predicted"], gap["measured"]
        if not gap["name"].startswith("rank") and abs(predicted - counted) > SAME * max(predicted, counted, 1):
            yield f"{gap['name']}: {predicted:.6g} predicted, {counted:.6g} counted"


def line(entry: Drawn) -> str:
    if entry.refused:
        return f"refused  {entry.asked}: {entry.refused[:120]}"
    verdict = "agrees " if entry.agrees else "DIFFERS"
    return f"{verdict}  {entry.asked}: {entry.plan}: peak {100 * entry.peak_error:+.2f} % {'; '.join(entry.differing)}"


def rows(found: Sequence[Drawn]) -> list[record.Row]:
    ran_ones = [entry for entry in found if not entry.refused]
    near = sum(abs(entry.peak_error) <= MOST_PEAK for entry in ran_ones)
    same = sum(not entry.differing for entry in ran_ones)
    return [
        record.Row(
            name="peaks of memory within 0.5 % of counted",
            target=f"{len(ran_ones)} of {len(ran_ones)}",
            measured=f"{near} of {len(ran_ones)}",
            holds=0 < near == len(ran_ones),
        ),
        record.Row(
            name="collectives and FLOPs the same",
            target=f"{len(ran_ones)} of {len(ran_ones)}",
            measured=f"{same} of {len(ran_ones)}",
            holds=0 < same == len(ran_ones),
        ),
    ]


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("seed", type=int, nargs="?", default=0)
    asked.add_argument("models", nargs="*", default=MODELS)
    asked.add_argument("--times", type=int, default=3, help="plans of each model")
    asked.add_argument("--seconds", type=float, default=300.0, help="longest that one command may take")
    options = asked.parse_args()
    chance, found = random.Random(options.seed), []
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            for _ in range(options.times):
                found.append(compared(drawn(chance, model), folder=Path(folder), seconds=options.seconds))
                print(line(found[-1]), flush=True)
    record.finish("dryrun-drawn", rows(found), {"seed": options.seed, "drawn": [asdict(entry) for entry in found]})


if __name__ == "__main__":
    main()
