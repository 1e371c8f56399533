"""A step of ours beside the bare torch calls for the same model, plan by plan: FSDP2, DDP, DTensor styles, 1F1B.

Both are in the same processes and take turns; a step has forward, backward, clipping and AdamW in fp32, one thread a
rank. The ratio is of medians.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import cases
from tests.support.designs import Layout, design
from tests.support.pool import Pool

import record
from meshwright.spec.cluster import Precision
from meshwright.spec.plan import Sharding

LIMIT = 1.03
ROUNDS = 30
BATCH = 8
PAIRS = {
    "fully_shard": Layout(shard=2, sharding=Sharding.PARAMETERS, microbatch=2, batch=BATCH, precision=Precision.FP32),
    "DistributedDataParallel": Layout(replicate=2, microbatch=4, batch=BATCH, precision=Precision.FP32),
    "parallelize_module": Layout(tensor=2, microbatch=4, batch=BATCH, precision=Precision.FP32),
    "Schedule1F1B": Layout(pipeline=2, microbatch=2, batch=BATCH, precision=Precision.FP32),
}


def main() -> None:
    pool, rows, raw = Pool(), [], {}
    for bare, layout in PAIRS.items():
        entry = cases.whole(design(cases.model(), layout))
        ours, theirs = pool.run(cases.both, entry, bare, ROUNDS, ranks=2, timeout=600.0)[0]
        ratio = statistics.median(ours) / statistics.median(theirs)
        raw[bare] = {"ours_seconds": ours, "bare_seconds": theirs}
        rows.append(
            record.Row(
                name=f"{entry.plan.describe()} over {bare}",
                target=f"<= {LIMIT:.2f}",
                measured=f"{ratio:.3f} ({statistics.median(theirs) * 1e3:.0f} ms bare)",
                holds=ratio <= LIMIT,
            )
        )
        print(rows[-1].name, rows[-1].measured, flush=True)
    pool.close()
    record.finish("overhead", rows, raw)


if __name__ == "__main__":
    main()
