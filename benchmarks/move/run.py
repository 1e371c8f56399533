"""State moved between plans: bytes sent over the least there is, and seconds beside the way through files.

Plans of one model on processes of this machine, which pass messages over its loopback; then the way that would be
taken between plans of Llama-3.1-8B on two clusters, where only what is sent is counted.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from moving import moves
from tests.support.designs import Layout, design
from tests.support.pool import Pool

import meshwright
import record
from meshwright import catalog
from meshwright.cost.holdings import holdings
from meshwright.cost.moved import least_bytes, least_crossing_bytes
from meshwright.cost.routes import rounds, routes
from meshwright.spec.cluster import Precision
from meshwright.spec.plan import Sharding

MODEL = "llama-5m"
TIMES = 5
ZERO3 = Sharding.PARAMETERS
ALL = (0, 1, 2, 3)
CASES = (
    ("sharded to stages and tensor", Layout(shard=4, sharding=ZERO3), Layout(pipeline=2, tensor=2), ALL, ALL),
    ("tensor to sharded", Layout(tensor=4), Layout(shard=4, sharding=ZERO3), ALL, ALL),
    ("stages to hybrid shards", Layout(pipeline=4), Layout(replicate=2, shard=2, sharding=ZERO3), ALL, ALL),
    ("four shrink to two", Layout(shard=4, sharding=ZERO3), Layout(shard=2, sharding=ZERO3), ALL, (0, 1)),
    ("two grow to four", Layout(tensor=2), Layout(tensor=2, shard=2, sharding=ZERO3), (0, 1), ALL),
    ("one copy to four", Layout(), Layout(replicate=4), (0,), ALL),
)
STAGING_BYTES = 64 * 2**20


def here(pool: Pool) -> tuple[list[record.Row], dict[str, Any]]:
    """Every case on four processes."""
    model, rows, raw = catalog.load_model(MODEL), [], {}
    for name, one, other, ours, theirs in CASES:
        sides = [design(model, replace(layout, precision=Precision.FP32)) for layout in (one, other)]
        with tempfile.TemporaryDirectory() as folder:
            found = pool.run(moves, *sides, ours, theirs, folder, TIMES, ranks=len(ALL), timeout=600.0)
        sent, least = sum(entry.sent_bytes for entry in found), found[0].least_bytes
        memory, files = (
            statistics.median(max(entry) for entry in zip(*each, strict=True))
            for each in ([e.memory_seconds for e in found], [e.folder_seconds for e in found])
        )
        raw[name] = [asdict(entry) for entry in found]
        rows.append(
            record.Row(
                name=f"{name}: {sent / 2**20:.1f} MiB sent, over the least",
                target="<= 1.0",
                measured=f"{sent / least:.3f}",
                holds=sent <= least,
            )
        )
        rows.append(
            record.Row(
                name=f"{name}: seconds over those through files ({files:.2f} s)",
                target="< 1",
                measured=f"{memory / files:.2f} ({memory:.2f} s)",
                holds=memory < files,
            )
        )
        print(rows[-2].name, rows[-2].measured, "|", rows[-1].measured, flush=True)
    return rows, raw


def far() -> tuple[list[record.Row], dict[str, Any]]:
    """From 64 H100 to 32: bytes sent and between nodes, how even they are, and the seconds to find the way."""
    plans = (
        ("64xH100", ("constraints.fix.shard=16", "constraints.fix.tensor=4")),
        ("32xH100", ("constraints.fix.pipeline=2", "constraints.fix.tensor=8")),
    )
    found = [
        meshwright.design("llama-3.1-8b", cluster, catalog.load_job(None, sets=list(sets))).design
        for cluster, sets in plans
    ]
    start = time.perf_counter()
    source, target = (holdings(entry) for entry in found)
    nodes = [process // 8 for process in range(64)]
    hops = [hop for hops in rounds(routes(source, target, nodes=nodes), staging_bytes=STAGING_BYTES) for hop in hops]
    seconds = time.perf_counter() - start
    least, crossing = sum(least_bytes(source, target).values()), least_crossing_bytes(source, target, nodes=nodes)
    sent = Counter[int]()
    for hop in hops:
        sent[hop.sender] += hop.bytes
    crossed = sum(hop.bytes for hop in hops if nodes[hop.sender] != nodes[hop.receiver])
    total, most = sum(sent.values()), max(sent.values())
    mean = total / 64
    before = "Llama-3.1-8B from 64 H100 to 32"
    rows = [
        record.Row(
            name=f"{before}: {total / 2**30:.1f} GiB sent, over the least",
            target="<= 1.0",
            measured=f"{total / least:.3f}",
            holds=total <= least,
        ),
        record.Row(
            name=f"{before}: {crossed / 2**30:.1f} GiB between nodes, over the least",
            target="<= 1.0",
            measured=f"{crossed / crossing:.3f}",
            holds=crossed <= crossing,
        ),
        record.Row(
            name=f"{before}: sent by the process that sends most, over the mean",
            target="<= 1.1",
            measured=f"{most / mean:.3f}",
            holds=most <= 1.1 * mean,
        ),
        record.Row(name=f"{before}: the way found", target="< 20 s", measured=f"{seconds:.1f} s", holds=seconds < 20.0),
    ]
    raw = {
        "plans": [entry.plan.describe() for entry in found],
        "sent_bytes": dict(sent),
        "least_bytes": least,
        "crossed_bytes": crossed,
        "least_crossing_bytes": crossing,
        "seconds": seconds,
    }
    return rows, raw


def main() -> None:
    pool = Pool()
    near_rows, near = here(pool)
    pool.close()
    far_rows, away = far()
    record.finish("move", [*near_rows, *far_rows], {"here": near, "far": away})


if __name__ == "__main__":
    main()
