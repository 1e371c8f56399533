"""A lab: a cluster's nodes as hosts whose links have its rates, delays and losses, and on which commands run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from meshwright.lab.fabric import Fabric
from meshwright.lab.hosts import Host, Outcome, Say, run_everywhere
from meshwright.lab.quota import Quotas
from meshwright.lab.topology import Topology
from meshwright.spec.errors import EnvironmentUnfit, Problem

PORT = 29_500


def silent(_host: str, _line: str) -> None:
    """Nothing is said."""


class Lab:
    """Hosts in order, the first of which others meet at; used with `with`, after which nothing of it is left.

    `python` is the path of the Python that has meshwright on every host.
    """

    def __init__(self, hosts: Sequence[Host], *, python: str = sys.executable) -> None:
        self.hosts = tuple(hosts)
        self.python = python
        self.quotas: Quotas | None = None
        self._fabric: Fabric | None = None

    @classmethod
    def of(cls, topology: Topology, *, cores: float | None = None) -> Self:
        """Namespaces of this machine, joined as `topology` says; hosts share `cores`, all that this process may use by
        default, as its shares say.

        Where no shares of processors can be made, even hosts of all cores do without. Raises EnvironmentUnfit where no
        namespaces can be made, or no shares for others.
        """
        fabric = Fabric(topology)
        lab = cls(fabric.hosts)
        lab._fabric = fabric
        try:
            lab._share(topology, cores)
        except BaseException:
            lab.down()
            raise
        return lab

    def _share(self, topology: Topology, cores: float | None) -> None:
        every = float(len(os.sched_getaffinity(0)))
        self.quotas = Quotas([share * (cores or every) for share in topology.shares])
        if not self.quotas.available and (cores or not topology.even):
            why = "control groups of processors cannot be made here"
            raise EnvironmentUnfit(Problem(what="hosts cannot have shares of the cores", why=why))
        self.hosts = tuple(
            replace(host, enter=(*self.quotas.enter(index), *host.enter)) for index, host in enumerate(self.hosts)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def down(self) -> None:
        """Nothing of it is left."""
        if self._fabric is not None:
            self._fabric.down()
        if self.quotas is not None:
            self.quotas.down()
        self._fabric, self.quotas = None, None

    def pull(self, host: int) -> None:
        """The host's cable is pulled: nothing comes from it or to it any more. Only of a lab that was made here."""
        assert self._fabric is not None, "cables of real hosts are for people to pull"
        self._fabric.pull(self.hosts[host])

    def slow(self, host: int, bandwidth: float) -> None:
        """The host's link gives so many bytes a second from now on, each way. Only of a lab that was made here."""
        assert self._fabric is not None, "links of real hosts are as they are"
        self._fabric.slow(self.hosts[host], bandwidth)

    def without_shares(self) -> Lab:
        """The same hosts, whose commands may use all cores of the machine; it goes with this one."""
        return self if self._fabric is None else Lab(self._fabric.hosts, python=self.python)

    def run(
        self,
        words: Sequence[str],
        *,
        hosts: Sequence[int] | None = None,
        say: Say = silent,
        timeout_seconds: float | None = None,
    ) -> tuple[Outcome, ...]:
        """`words` run on every host at once, or on those named, to their ends.

        Each finds in its environment what torchrun and torch.distributed ask for: NNODES, NODE_RANK, MASTER_ADDR,
        MASTER_PORT and the interface of its traffic; in `words`, {hosts}, {host}, {address}, {first} and {port} stand
        for them.
        """
        chosen = list(range(len(self.hosts))) if hosts is None else list(hosts)
        values = [self._values(place, chosen) for place in range(len(chosen))]
        members = [self.hosts[index] for index in chosen]
        return run_everywhere(
            members,
            [[_filled(word, told) for word in words] for told in values],
            environments=[_environment(host, told) for host, told in zip(members, values, strict=True)],
            say=say,
            timeout_seconds=timeout_seconds,
        )

    def _values(self, place: int, chosen: Sequence[int]) -> dict[str, str]:
        return {
            "hosts": str(len(chosen)),
            "host": str(place),
            "address": self.hosts[chosen[place]].address,
            "first": self.hosts[chosen[0]].address,
            "port": str(PORT),
        }


def _filled(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def _environment(host: Host, values: dict[str, str]) -> dict[str, str]:
    found = {
        "NNODES": values["hosts"],
        "NODE_RANK": values["host"],
        "MASTER_ADDR": values["first"],
        "MASTER_PORT": values["port"],
    }
    if host.interface:
        found |= {"GLOO_SOCKET_IFNAME": host.interface, "NCCL_SOCKET_IFNAME": host.interface}
    return found
