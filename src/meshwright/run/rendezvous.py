"""Where processes of a launch find each other: nodes by the number they came with, workers of one host on loopback.

torch's TCPStore listens on every address of a host, whatever address it is given, and asks nobody who they are; its
c10d rendezvous unpickles what it finds there. A store whose socket is made here listens where it is meant to.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

LOOPBACK_ADDRESS = "127.0.0.1"
_WAITING = 1024  # connections that may come at once
_PATIENCE = timedelta(seconds=300)


class Assigned(RendezvousHandler):
    """The rendezvous of nodes that have met: each has the number that it came with, so that ranks lie as planned."""

    def __init__(self, store: Store, *, node: int, nodes: int, host: str, port: int) -> None:
        self._store, self._node, self._nodes = store, node, nodes
        self._at = RendezvousStoreInfo(host, port)

    def get_backend(self) -> str:
        return "meshwright"

    @property
    def use_agent_store(self) -> bool:
        """Workers use the store of the meeting, so that nodes need one open port."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._store, self._node, self._nodes, self._at)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody comes later."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "meshwright"

    def shutdown(self) -> bool:
        return True


def store_here(*, timeout: timedelta = _PATIENCE) -> TCPStore:
    """A store of this process that is reached from this host alone, on a port that the system chooses."""
    listening = socket.create_server((LOOPBACK_ADDRESS, 0), backlog=_WAITING)
    return TCPStore(
        LOOPBACK_ADDRESS,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listening.detach(),
    )


def server_at(host: str, port: int) -> socket.socket:
    """What listens at `host` alone, where that is an address of this machine.

    Where it is a name of this machine that stands for its loopback here and for another address elsewhere, or an
    address that is translated on the way, it listens on all addresses. Raises OSError where the port is taken.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    told = str(address[0])
    if told == host or not ipaddress.ip_address(told.partition("%")[0]).is_loopback:
        try:
            return socket.create_server((told, port), family=family, backlog=_WAITING)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return socket.create_server(("", port), family=family, backlog=_WAITING)


def alone() -> Assigned:
    """The rendezvous of one host by itself."""
    store = store_here()
    return Assigned(PrefixStore("agents", store), node=0, nodes=1, host=LOOPBACK_ADDRESS, port=store.port)


def store_of_launch(timeout: timedelta) -> Store:
    """Where the ranks of this launch find each other; of this process alone where nobody launched it."""
    if "MASTER_ADDR" not in os.environ:
        return dist.HashStore()
    store: Store = next(dist.rendezvous("env://", timeout=timeout))[0]
    return store
