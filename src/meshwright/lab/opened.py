"""A lab by what names it: a cluster whose nodes are made here, or hosts that there are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from meshwright import catalog
from meshwright.lab.lab import Lab
from meshwright.lab.nodes import detected
from meshwright.lab.real import is_real, real_lab
from meshwright.lab.topology import Topology, topology
from meshwright.spec.cluster import ClusterSpec, NodeGroup
from meshwright.spec.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A lab that is up; `asked` are the links of hosts that are made here, None of real ones."""

    lab: Lab
    asked: Topology | None = None
    cluster: ClusterSpec | None = None

    def nodes(self) -> tuple[NodeGroup, ...]:
        """What is inside each host: what the cluster says of those made here, what real ones say of themselves."""
        if self.cluster is None:
            return detected(self.lab)
        return tuple(group for group in self.cluster.groups for _ in range(group.num_nodes))


@contextmanager
def opened(
    where: str,
    *,
    cache: Path,
    say: Callable[[str], None],
    loss: float = 0.0,
    cores: float | None = None,
    python: str | None = None,
) -> Iterator[Opened]:
    """The lab of a cluster by name or file, or of `ssh:ONE,TWO` and the like; nothing of it is left afterwards.

    Raises ConfigError for what names none, EnvironmentUnfit where it cannot be made or a host cannot be entered.
    """
    if is_real(where):
        if loss or cores:
            what = "--loss and --cores are of hosts that are made here"
            raise ConfigError(Problem(what=what, where=where, fix="leave them out: real hosts are as they are"))
        with real_lab(where, python=python or sys.executable) as lab:
            yield Opened(lab=lab)
        return
    if python:
        what = "--python is of real hosts"
        raise ConfigError(Problem(what=what, where=where, fix="leave it out: hosts that are made here have this one"))
    cluster = catalog.load_cluster(where, cache=cache)
    asked = topology(cluster, loss=loss)
    say(f"hosts and links that are made: {len(asked.hosts)} and {len(asked.uplinks)}")
    with Lab.of(asked, cores=cores) as lab:
        yield Opened(lab=lab, asked=asked, cluster=cluster)
