"""The planner against its peers: errors on the same published rows, and the seconds that a search takes.

peers.csv holds the signed error in percent of each peer on rows of ../published/runs.csv, found by running it on
their settings with nothing fitted: Calculon (its A100-80GB system file, data parallel overlap on, whose Table 5 was
its authors' own calibration), llm-analysis at a constant efficiency of a half, SimuMax with its documented factors.
"""

from __future__ import annotations

import csv
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import record
from meshwright import catalog, search
from meshwright.catalog.decoders.shapes import GptStyle
from meshwright.replay import read_runs
from meshwright.replay.published import replay
from meshwright.search.decide import explored
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec

HERE = Path(__file__).resolve().parent
PEERS = ("calculon", "llm_analysis", "simumax")
TABLES = {
    "2104.04473 table 1": ("S03-megatron-2104.04473", 3.5, 8.0),
    "2205.05198 table 5": ("S03d-recompute-2205.05198", 2.5, math.inf),
}
CALCULON_SECONDS = 8.9 * 3600.0  # of CPU for 7,276,848 strategies of the 1T model on 4,096 devices, by the same count
TRILLION = "1T parameters on 4,096 A100"
LARGE = "1,000 layers on 100,000 H100"


def errors() -> dict[str, dict[str, float]]:
    """Signed error in percent of everyone on every row of peers.csv."""
    with (HERE / "peers.csv").open(newline="", encoding="utf-8") as file:
        told = {row["id"]: {peer: float(row[peer]) for peer in PEERS} for row in csv.DictReader(file)}
    for run in read_runs(HERE.parent / "published" / "runs.csv"):
        if run.id in told:
            point, seconds = replay(run).point, run.seconds
            assert point is not None
            assert seconds
            told[run.id]["meshwright"] = 100.0 * (point.predicted_seconds / seconds - 1.0)
    return told


def job(length: int, sequences: int) -> JobSpec:
    return catalog.load_job(None, sets=[f"sequence_length={length}", f"batch_tokens={length * sequences}"])


def cases() -> dict[str, tuple[ModelSpec, ClusterSpec, JobSpec]]:
    deep = GptStyle(name="deep", layers=1000, width=12288, heads=96, vocab=51200, positions=4096).build()
    return {
        TRILLION: (catalog.load_model("gpt-1t"), catalog.load_cluster("512x8xA100-80GB"), job(2048, 4096)),
        LARGE: (deep, catalog.load_cluster("12500x8xH100"), job(4096, 100_000)),
    }


def searched(name: str) -> dict[str, float]:
    """One search in this process: strategies, CPU seconds until the best are known and after refining, peak bytes."""
    model, cluster, asked = cases()[name]
    start = time.process_time()
    found = explored(model, cluster, asked)
    known = time.process_time() - start
    start = time.process_time()
    decision = search.design(model, cluster, asked)
    return {
        "strategies": float(found.space.count),
        "priced": float(found.priced),
        "known_seconds": known,
        "refined_seconds": time.process_time() - start,
        "step_seconds": decision.report.step_seconds,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
    }


def apart(name: str, runs: int) -> list[dict[str, float]]:
    """`searched` in processes of their own, so that each peak of memory is its own."""
    command = [sys.executable, str(HERE / "run.py"), "--search", name]
    found = []
    for _ in range(runs):
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found.append(json.loads(done.stdout))
    return found


def table_rows(told: dict[str, dict[str, float]]) -> list[record.Row]:
    rows = []
    for name, (source, mean, most) in TABLES.items():
        mine = [entry for key, entry in told.items() if key.startswith(source)]
        means = {who: statistics.fmean(abs(entry[who]) for entry in mine) for who in (*PEERS, "meshwright")}
        largest = max(abs(entry["meshwright"]) for entry in mine)
        peers = ", ".join(f"{peer} {means[peer]:.1f}" for peer in PEERS)
        limit = "" if math.isinf(most) else f" (largest <= {most:g})"
        rows.append(
            record.Row(
                name=f"{name}: mean error ({peers})",
                target=f"<= {mean:g} %{limit}",
                measured=f"{means['meshwright']:.1f} % (largest {largest:.1f})",
                holds=means["meshwright"] <= mean and largest <= most,
            )
        )
    return rows


def search_rows(trillion: list[dict[str, float]], large: list[dict[str, float]]) -> list[record.Row]:
    known, refined, whole = (
        statistics.median(run[key] for run in runs)
        for runs, key in ((trillion, "known_seconds"), (trillion, "refined_seconds"), (large, "refined_seconds"))
    )
    count, number = trillion[0]["strategies"], large[0]["strategies"]
    rate, peak = count / known, max(run["peak_bytes"] for run in large) / 2**30
    return [
        record.Row(
            name="strategies searched a second, one core (Calculon 250)",
            target=">= 1,000,000",
            measured=f"{rate:,.0f}",
            holds=rate >= 1e6,
        ),
        record.Row(
            name=f"{TRILLION}, {count:,.0f} strategies, CPU (Calculon {CALCULON_SECONDS:,.0f} s)",
            target="<= 1 s, refined <= 5 s",
            measured=f"{known:.2f} s, refined {refined:.2f} s",
            holds=known <= 1.0 and refined <= 5.0,
        ),
        record.Row(
            name=f"{LARGE}, {number:,.0f} strategies, refined, CPU",
            target="<= 20 s, <= 4 GiB",
            measured=f"{whole:.1f} s, {peak:.2f} GiB",
            holds=whole <= 20.0 and peak <= 4.0,
        ),
    ]


def main() -> None:
    told = errors()
    trillion, large = apart(TRILLION, 5), apart(LARGE, 3)
    rows = [*table_rows(told), *search_rows(trillion, large)]
    record.finish("planner", rows, {"errors": told, TRILLION: trillion, LARGE: large})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--search"]:
        print(json.dumps(searched(sys.argv[2])))
    else:
        main()
