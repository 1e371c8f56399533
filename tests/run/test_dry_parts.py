"""Every part of memory is counted under the name that it is predicted under."""

from __future__ import annotations

from dataclasses import replace

from meshwright import cost
from meshwright.cost.fixed_buffers import workspace_bytes
from meshwright.cost.stacks import software
from meshwright.spec.cluster import Precision
from meshwright.spec.plan import ExpertGrid, Sharding
from meshwright.spec.report import MemoryPart
from meshwright.spec.synchronize import GradientSync
from tests.run.test_dry_memory import DENSE, MACHINES, MORE, SPARSE, asked, hold
from tests.support.designs import Layout

ROUNDED = Layout(replicate=2, shard=2, sharding=Sharding.PARAMETERS, batch=8)
EXPERTS = Layout(shard=4, sharding=Sharding.OPTIMIZER, experts=ExpertGrid(expert=4, tensor=1), batch=8)
BUFFERS = MemoryPart.BUFFERS.value


def test_parts_of_peaks_have_the_names_that_they_are_predicted_under() -> None:
    """Among them gradients in eight bits of hybrids: what rounding leaves, and what is received beside what it is."""
    plain = asked(DENSE, ROUNDED, layers=4)
    eight = replace(plain, plan=replace(plain.plan, gradients=GradientSync(precision=Precision.INT8)))
    entries = {"int8 hybrid": eight, "experts": asked(SPARSE, EXPERTS, layers=4)}
    entries |= {name: asked(*MORE[name], layers=4) for name in ("zero1", "halves of backwards")}
    found = hold(entries)
    workspace = workspace_bytes(MACHINES.groups[0].device, software=software("torch"))
    for (name, entry), ranks in zip(entries.items(), found, strict=True):
        for told, count in zip(cost.predict(entry).memory, ranks, strict=True):
            parts = {**count.memory, BUFFERS: count.memory.get(BUFFERS, 0.0) + workspace}
            off = {part: abs(told.parts.get(part, 0.0) - parts.get(part, 0.0)) for part in parts}
            assert max(off.values()) <= 0.005 * told.allocated, (name, count.rank, off)
