"""Inquiries: what ranks ask each other at the end of a step when something is amiss, and what links gave at first."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field

import psutil
import torch
import torch.distributed as dist

from meshwright.train.events import Examine, Examined, LinksProbed, ProbeLinks
from meshwright.train.observe.health import Health

MOST_ROUNDS = 16  # neighbours of each host in the plan's order that are probed
_TRIES = 2
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 64 << 20
_CLEAR_SECONDS = 10e-3  # that a message takes to say more of a link than of the ends


@dataclass(slots=True, kw_only=True)
class Inquiries:
    """Asked of all ranks of a learner alike, which are `group`; None where there is one. All get the same answer."""

    group: dist.ProcessGroup | None
    device: torch.device
    health: Health = field(default_factory=Health)
    hosts: tuple[str, ...] = ()
    host_of: tuple[int, ...] = ()

    def answer(self, action: Examine | ProbeLinks) -> Examined | LinksProbed:
        """Collective over the group."""
        return self._examine(action.rank) if isinstance(action, Examine) else self._probe(action.num_bytes)

    def _examine(self, rank: int) -> Examined:
        here = self.group is None or dist.get_rank(self.group) == rank
        words = [self.health.words() if here else ""]
        if self.group is not None:
            dist.broadcast_object_list(words, src=dist.get_global_rank(self.group, rank), group=self.group)
        return Examined(rank=rank, words=words[0])

    def _probe(self, num_bytes: int) -> LinksProbed:
        """Every host sends to its next neighbour, then to the one after that and so on, and receives as they do."""
        if not self.hosts:
            self._meet()
        count, size = len(self.hosts), num_bytes or _LEAST_BYTES
        if count < 2:
            return LinksProbed(hosts=self.hosts, host_of=self.host_of, num_bytes=0, seconds=())
        took = self._rounds(size)
        while not num_bytes and size < _MOST_BYTES and float(took[took > 0].min()) < _CLEAR_SECONDS:
            size *= 4
            took = self._rounds(size)
        seconds = tuple(tuple(row) for row in took.tolist())
        return LinksProbed(hosts=self.hosts, host_of=self.host_of, num_bytes=size, seconds=seconds)

    def _meet(self) -> None:
        """The hosts of all ranks are known, each by a name of its own."""
        mine = _host()
        everyone = [mine] * (1 if self.group is None else self.group.size())
        if self.group is not None:
            dist.all_gather_object(everyone, mine, group=self.group)
        keys = list(dict.fromkeys(everyone))
        names = [name for name, _, _ in keys]
        self.host_of = tuple(keys.index(each) for each in everyone)
        self.hosts = tuple(
            name if names.count(name) == 1 else address or f"{name} ({index})"
            for index, (name, address, _) in enumerate(keys)
        )

    def _rounds(self, num_bytes: int) -> torch.Tensor:
        """Seconds from host to host, the least of a few tries, (hosts, hosts); the first rank of each host sends."""
        assert self.group is not None, "several hosts have several ranks"
        count = len(self.hosts)
        firsts = [self.host_of.index(host) for host in range(count)]
        rank = dist.get_rank(self.group)
        out = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        into = torch.empty_like(out)
        took = torch.zeros(count, count, dtype=torch.float64, device=self.device)
        for offset in range(1, min(count - 1, MOST_ROUNDS) + 1):
            for _ in range(_TRIES):
                dist.barrier(group=self.group)
                if rank not in firsts:
                    continue
                host = firsts.index(rank)
                sender, receiver = (host - offset) % count, (host + offset) % count
                seconds = self._pass_on(out, into, to=firsts[receiver], of=firsts[sender])
                before = float(took[sender, host])
                took[sender, host] = min(seconds, before) if before else seconds
        dist.all_reduce(took, op=dist.ReduceOp.MAX, group=self.group)
        return took.cpu()

    def _pass_on(self, out: torch.Tensor, into: torch.Tensor, *, to: int, of: int) -> float:
        """How long what rank `of` of the group sends takes to come, while this one sends to rank `to`."""
        began = time.perf_counter()
        receive = dist.P2POp(dist.irecv, into, group=self.group, group_peer=of)
        send = dist.P2POp(dist.isend, out, group=self.group, group_peer=to)
        received, *sent = dist.batch_isend_irecv([receive, send])
        received.wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - began
        for work in sent:
            work.wait()
        return seconds


def _host() -> tuple[str, str, str]:
    """Name, address and network of the host of this process: namespaces of one machine are hosts of their own."""
    address = ""
    for interface in psutil.net_if_addrs().values():
        for each in interface:
            if each.family is socket.AF_INET and not each.address.startswith("127."):
                address = address or each.address
    network = ""
    with suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    return socket.gethostname(), address, network
