"""Designs over two nodes, and what is asked of places."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright import catalog
from meshwright.run.launching.ask import Ask, Place
from meshwright.spec.plan import Design, Sharding
from tests.run.runs import BATCH, design
from tests.support.designs import Layout

NODES = 2
FAR = {"image": "registry/meshwright:1", "volume": "training:/mnt"}


def on_processors(folder: Path, *, steps: int = 4, **changes: Any) -> Design:
    """Two nodes of one core, with the state divided between them."""
    made = design(folder, Layout(batch=BATCH, shard=2, sharding=Sharding.PARAMETERS), steps=steps, **changes)
    (group,) = made.cluster.groups
    return replace(made, cluster=replace(made.cluster, groups=(_nodes(group, NODES),)))


def on_gpus(folder: Path, *others: str) -> Design:
    """Two H100s, one a node; with `others` one node of them and one of each of these."""
    made = on_processors(folder)
    groups = [catalog.load_cluster(f"1x{name}").groups[0] for name in ("H100", *others)]
    nodes = [_nodes(group, 1 if others else NODES) for group in groups]
    return replace(made, cluster=replace(made.cluster, groups=tuple(nodes)))


def _nodes(group: Any, count: int) -> Any:
    return replace(group, num_nodes=count, devices_per_node=1)


def ask(place: str, **asked: Any) -> Ask:
    run = "/mnt/runs/first-run" if Place(place).is_far else "/shared/first run"
    return Ask(place=Place(place), **{"run": Path(run), **asked})
