"""Quorum: the replicas of a run as torchft's manager knows them: who meets, whose sums are whole, who stands where."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, TCPStore
from torchft import manager as torchft_manager
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from meshwright.run.failure import LostPeers
from meshwright.run.rendezvous import LOOPBACK_ADDRESS, store_here
from meshwright.run.torch_compat import unseen
from meshwright.run.torchft.lighthouse import HEARTBEAT_SECONDS
from meshwright.run.torchft.transport import Transport
from meshwright.spec.errors import Problem, WorkerFailed
from meshwright.train.replicas import Changed, Handed, Seat

_QUORUM_SECONDS = 3600.0  # a replica that is left alone waits for another as long as its launcher lets it
_PAUSE_SECONDS = 0.01
_FRUITLESS = 8  # rounds in a row that nobody was lost in and that failed all the same


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Managers that are made here listen where processes of this host alone reach them: torchft gives its own every
    address of the host."""
    server = torchft_manager.ManagerServer

    def here(*, bind: str, **settings: Any) -> Any:
        return server(bind=f"{LOOPBACK_ADDRESS}:{bind.rpartition(':')[2]}", **settings)

    torchft_manager.ManagerServer = here
    try:
        yield
    finally:
        torchft_manager.ManagerServer = server


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rank `rank` of `size` of replica `own` of `total`, of which `fewest` may train. `lighthouse` is where they find
    each other, `word` what those of this run know, and `patience_seconds` what any of them waits for another."""

    own: int
    total: int
    rank: int
    size: int
    fewest: int
    lighthouse: str
    word: str
    patience_seconds: float


class Quorum:
    """`train.replicas.Replicas` by torchft. `first` says that all of them are on their way, and begin together;
    `changed` is told who trains."""

    def __init__(
        self, group: Group, *, ready: Path | None, changed: Callable[[Changed], None], say: Callable[[str], None]
    ) -> None:
        self.own, self.total = group.own, group.total
        self._group, self._ready, self._say = group, ready, say
        self.changed = changed
        self._stores: list[TCPStore] = []
        self._wire = _Wire(timeout=timedelta(seconds=group.patience_seconds))
        self._manager: Manager | None = None
        self._fruitless = 0

    def stand(self, rounds: int, *, give: Callable[[], Handed], take: Callable[[Handed], None]) -> None:
        group, patience = self._group, timedelta(seconds=self._group.patience_seconds)
        port = self._store_port()
        transport = Transport(word=group.word, like=lambda: give().tensors, say=self._say)
        with _on_loopback():
            self._manager = Manager(
                pg=self._wire,
                load_state_dict=take,
                state_dict=give,
                min_replica_size=group.fewest,
                use_async_quorum=False,
                timeout=patience,
                quorum_timeout=timedelta(seconds=_QUORUM_SECONDS),
                connect_timeout=patience,
                rank=group.rank,
                world_size=group.size,
                store_addr=LOOPBACK_ADDRESS,
                store_port=port,
                lighthouse_addr=group.lighthouse,
                replica_id=f"{group.own:05d}",
                hostname=LOOPBACK_ADDRESS,
                heartbeat_interval=timedelta(seconds=HEARTBEAT_SECONDS),
                checkpoint_transport=transport,
                init_sync=False,
            )
        self._manager.load_state_dict({"step": rounds, "batches_committed": 0})
        if self._ready is not None and group.rank == 0:
            self._wait_for_all(self._ready)

    def meet(self) -> Seat:
        """Raises LostPeers where they do not come to know each other again and again."""
        manager, end = self._known(), time.monotonic() + 3 * self._group.patience_seconds
        while True:
            try:
                manager.start_quorum()
            except (RuntimeError, TimeoutError) as error:
                raise LostPeers(f"replicas do not meet: {error}", None) from error
            index = manager.participating_rank()
            if manager.errored() is None and index is not None:
                return Seat(index=index, count=manager.num_participants(), formed=self._wire.formed)
            self._wire.abort()
            manager.should_commit()
            if time.monotonic() > end:
                raise LostPeers(f"replicas do not meet: {manager.errored()}", None)
            time.sleep(_PAUSE_SECONDS)

    def sum(self, x: Tensor) -> None:
        manager = self._known()
        if manager.errored() is None:
            with unseen():
                manager.allreduce(x, reduce_op=ReduceOp.SUM).wait()
        if manager.errored() is not None:
            # Whoever waits for this one hears at once that it does not come.
            self._wire.abort()

    def commit(self) -> bool:
        """Raises WorkerFailed after as many in vain, one after another, as no loss of a replica explains."""
        if self._known().should_commit():
            self._fruitless = 0
            return True
        self._fruitless += 1
        if self._fruitless > _FRUITLESS:
            error = self._known().errored()
            why = str(error.original_exception if error is not None else "others did not end it")
            raise WorkerFailed(Problem(what="replicas lose contact again and again, all of them alive", why=why))
        return False

    def close(self) -> None:
        """Nobody waits for this one any more."""
        if self._manager is not None:
            self._manager.shutdown(wait=False)

    def _known(self) -> Manager:
        assert self._manager is not None, "it stands somewhere before it meets others"
        return self._manager

    def _store_port(self) -> int:
        """Of the store that the ranks of this replica share, which the first of them keeps."""
        port = 0
        if self._group.rank == 0:
            self._stores.append(store_here())
            port = self._stores[0].port
        if self._group.size == 1:
            return port
        told = torch.tensor(port)
        dist.broadcast(told, src=0)
        return int(told)

    def _wait_for_all(self, ready: Path) -> None:
        """All replicas that were started together are known at the lighthouse, or have had time enough: none of them
        begins without those that are on their way."""
        ready.mkdir(parents=True, exist_ok=True)
        (ready / str(self.own)).touch()
        end = time.monotonic() + self._group.patience_seconds
        while time.monotonic() < end and len(list(ready.iterdir())) < self.total:
            time.sleep(_PAUSE_SECONDS)
        time.sleep(2 * HEARTBEAT_SECONDS)


class _Wire(ProcessGroupGloo):
    """torchft's group over gloo, formed anew `formed` times, whose store listens on the loopback alone."""

    def __init__(self, *, timeout: timedelta) -> None:
        super().__init__(timeout=timeout)
        self.formed = 0
        self._own: TCPStore | None = None

    def get_reconfigure_handle(self) -> str:
        if self._own is None:
            self._own = store_here()
        store = f"{LOOPBACK_ADDRESS}:{self._own.port}"
        return json.dumps({"id": self._handle_id(), "store": store, "global_rank": self._global_rank})

    def reconfigure(self, opts: Any) -> Any:
        found = super().reconfigure(opts)
        self.formed += 1
        return found
