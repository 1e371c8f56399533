"""What it costs to log every collective of every step and to judge what ranks say: processor seconds with and without.

Both are in the same processes and take turns, block by block; the ratio is the median over pairs of neighbours, which
on a machine that others use varies by more than what is measured. What one collective and one step cost is therefore
counted too: an all-reduce of a group of one rank with the log and without, and the judges fed with made-up seconds.

    python benchmarks/faults/recording.py [BLOCKS]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import recorded
import torch
import torch.distributed as dist
from tests.run import runs
from tests.support import models
from tests.support.designs import Layout
from tests.support.pool import Pool
from tests.train.observe.traces import own_seconds

import record
from meshwright.spec.cluster import Precision
from meshwright.spec.job import EvaluationSpec
from meshwright.spec.model import Layer
from meshwright.spec.plan import Design, Sharding
from meshwright.train.observe.collective_log import CollectiveLog
from meshwright.train.observe.listening import listening
from meshwright.train.observe.slowness import Communication, DataWaits, SlowRanks

LIMIT = 0.01
BLOCKS, STEPS = 30, 6
WIDTH = 256
LAYOUTS = {
    "zero3": Layout(batch=runs.BATCH, shard=2, sharding=Sharding.PARAMETERS, microbatch=4, precision=Precision.FP32),
    "replicas": Layout(batch=runs.BATCH, replicate=2, microbatch=4, precision=Precision.FP32),
    "stages": Layout(batch=runs.BATCH, pipeline=2, microbatch=2, precision=Precision.FP32),
    "tensor": Layout(batch=runs.BATCH, tensor=2, microbatch=4, precision=Precision.FP32),
}


def wide(folder: Path, layout: Layout) -> Design:
    """Six layers of width 256: 5 M parameters, of which a step takes a tenth of a second or so."""
    norm = replace(models.NORM, width=WIDTH)
    mixer = models.attention(width=WIDTH, heads=8, kv_heads=4, head_dim=32, norm=norm)
    mixer = replace(mixer, rotary=replace(mixer.rotary, dims=32) if mixer.rotary else None)
    layer = Layer(mixer=mixer, transform=models.feed_forward(width=WIDTH, hidden=3 * WIDTH, norm=norm))
    model = models.model(layer=layer, layers=6)
    model = replace(
        model,
        embedding=replace(model.embedding, vocab=runs.VOCAB, width=WIDTH),
        head=replace(model.head, vocab=runs.VOCAB, width=WIDTH, norm=norm),
    )
    evaluation = EvaluationSpec(every_steps=0)
    return runs.design(folder, layout, steps=10**6, evaluation=evaluation, model=model)


def logging_seconds(run_dir: Path, *, calls: int = 2000, rounds: int = 5) -> float:
    """Processor seconds that the log adds to one all-reduce, the least of some rounds."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    log, number = CollectiveLog(run_dir, rank=0), torch.ones(1)
    found: dict[bool, list[float]] = {True: [], False: []}
    for logged in (True, False) * rounds:
        with listening(log) if logged else nullcontext():
            began = time.process_time()
            for _ in range(calls):
                dist.all_reduce(number)
            found[logged].append((time.process_time() - began) / calls)
    dist.destroy_process_group()
    return min(found[True]) - min(found[False])


def judging_seconds(ranks: int, *, steps: int = 300) -> float:
    """Processor seconds that all judges take for one step of so many ranks."""
    rows = own_seconds(ranks, steps, seed=0).tolist()
    slow, waits, network = SlowRanks([0] * ranks), DataWaits(), Communication()
    began = time.process_time()
    for row in rows:
        slow.see(row, step_seconds=0.1)
        waits.see([0.0] * ranks, step_seconds=0.1)
        network.see(row, step_seconds=0.1)
    return (time.process_time() - began) / steps


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        logging = logging_seconds(Path(folder))
    judging = {ranks: judging_seconds(ranks) for ranks in (2, 8, 64, 1024)}
    print(f"the log {logging * 1e6:.1f} us a collective; judges of", end=" ")
    print(", ".join(f"{ranks:,} ranks {seconds * 1e6:.0f} us" for ranks, seconds in judging.items()), flush=True)
    pool, rows, raw = Pool(), [], dict[str, Any]()
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else BLOCKS
    for name, layout in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            design = wide(Path(folder), layout)
            found = pool.run(recorded.measure, design, folder, blocks, STEPS, ranks=2, timeout=900.0)
        shares = [on / off - 1.0 for each in found for on, off in zip(each.watched, each.plain, strict=True)]
        share, step = statistics.median(shares), statistics.median(found[0].plain) / STEPS
        counted = (found[0].collectives * logging + judging[2]) / step
        raw[name] = [asdict(each) for each in found]
        rows.append(
            record.Row(
                name=f"{design.plan.describe()}: {found[0].collectives:.0f} collectives a step",
                target=f"<= {LIMIT:.0%}",
                measured=f"{counted:.2%} counted, {share:+.2%} measured, of {step * 1e3:.0f} ms of processor time",
                holds=counted <= LIMIT,
            )
        )
        print(rows[-1].name, rows[-1].measured, flush=True)
    pool.close()
    raw["logging_seconds"], raw["judging_seconds"] = logging, judging
    record.finish("recording", rows, raw)


if __name__ == "__main__":
    main()
