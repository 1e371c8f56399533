"""Designs of four pipeline ranks whose microbatches have paths, alone and beside other axes."""

from __future__ import annotations

from dataclasses import replace

from meshwright.schedule import planned
from meshwright.schedule.paths import Paths
from meshwright.schedule.skip import Line, along
from meshwright.spec.optimizer import OptimizerSpec
from meshwright.spec.plan import Design, Recompute, Sharding
from meshwright.spec.skip import SkipSpec, Swap
from tests.support import models
from tests.support.designs import Layout, design

EVEN: Paths = ((0, 1, 3), (0, 2, 3)) * 2
TURNED: Paths = ((0, 2, 1, 3), (0, 1, 3), (0, 2, 3), (0, 1, 2, 3))
OPTIMIZER = OptimizerSpec(learning_rate=1e-2, clip_norm=0.5)
LINE = Line(forward=(1.0, 2.0, 1.0, 1.0), backward=(2.0, 4.0, 2.0, 2.0), transfer=(0.1, 0.3, 0.1, 0.0))
CASES = (
    ("tiny", Layout(pipeline=4, batch=4), EVEN),
    ("gpt", Layout(pipeline=4, batch=8, microbatch=2, recompute=Recompute.FULL), TURNED),
    ("tiny", Layout(pipeline=4, replicate=2, batch=8), TURNED),
    ("tied", Layout(pipeline=4, shard=2, sharding=Sharding.PARAMETERS, batch=8), EVEN),
    ("mixture_full", Layout(pipeline=4, shard=2, sharding=Sharding.OPTIMIZER, batch=8), TURNED),
    ("tiny", Layout(pipeline=4, tensor=2, sequence_parallel=True, batch=4), EVEN),
)


def on(kind: str, layout: Layout, paths: Paths) -> Design:
    made = design(models.all_models()[kind], layout, z_loss=1e-3, optimizer=OPTIMIZER)
    found = along(LINE, paths)
    assert found is not None
    skip = SkipSpec(share=0.5, swap=Swap.NEIGHBOURS)
    plan = replace(made.plan, schedule=planned.of(found.program, chunks=1))
    return replace(made, job=replace(made.job, skip=skip), plan=plan)
