"""How many drawn plans a second the parity machine checks at four ranks: reference, layout, a step and comparison.

Draws are those of tests/parallel at four ranks, with the tiny model of two layers for theirs and no grid of experts.
The first time that each is checked, process groups are formed and workers start; the target is of the later ones.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.parallel import draws, fixing, reproduce
from tests.parallel.draws import Draw
from tests.support.pool import Pool

import record

RANKS = 4
LAYERS = 2
TARGET = 5.0
ROUNDS = 3


def on_the_tiny_model(draw: Draw) -> Draw | None:
    """The draw with two layers of the tiny model; None where it has a table or more stages, or a rule refuses it."""
    stages = len(draw.bounds) + 1
    if draw.table or stages > LAYERS + 2:
        return None
    small = replace(
        draw,
        model="tiny",
        layers=LAYERS,
        bounds=tuple(range(1, stages)),
        recompute=(draw.recompute * LAYERS)[:LAYERS],
        kinds=(),
        frozen=tuple(block for block in draw.frozen if block < LAYERS + 2),
        experts=None,
        **{name: (getattr(draw, name) * (LAYERS + 2))[: LAYERS + 2] for name in ("shards", "extents", "offloads")},
    )
    return None if draws.refused(small) else small


def main() -> None:
    torch.set_num_threads(1)  # as in tests: a second thread of the reference would wait for a core of the ranks
    every = [draw for draw in fixing.every() if draw.ranks == RANKS]
    chosen = sorted(dict.fromkeys(filter(None, map(on_the_tiny_model, every))), key=lambda draw: str(draw.axes))
    pool, seconds = Pool(), dict[str, list[float]]()
    for _ in range(1 + ROUNDS):
        for draw in chosen:
            start = time.perf_counter()
            reproduce.check(pool, draw)
            seconds.setdefault(str(draw), []).append(time.perf_counter() - start)
    pool.close()
    first, *later = (len(chosen) / sum(values[turn] for values in seconds.values()) for turn in range(1 + ROUNDS))
    plans = f"{len(chosen)} plans of {RANKS} ranks of the tiny model"
    rows = [
        record.Row(
            name=plans,
            target=f">= {TARGET:.0f} a second",
            measured=f"{statistics.median(later):.2f} a second",
            holds=statistics.median(later) >= TARGET,
        ),
        record.Row(name=f"{plans}, the first time", target="none", measured=f"{first:.2f} a second", holds=True),
    ]
    record.finish("parity", rows, seconds)


if __name__ == "__main__":
    main()
