"""One of two ranks that form a second group: rank 1 is killed as soon as it has told where it can be reached."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from meshwright.run.torch_compat import formed_within


class Telling(dist.Store):
    """A store whose owner dies by telling it something, once it is to."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner, self.dies = inner, False

    def set(self, key: str, value: Any) -> None:
        self.inner.set(key, value)
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)

    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    def add(self, key: str, amount: int) -> int:
        return self.inner.add(key, amount)

    def wait(self, *asked: Any) -> None:
        self.inner.wait(*asked)

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)


def main(path: str, rank: int, seconds: float) -> None:
    store = Telling(dist.FileStore(path, 2))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    with formed_within(timedelta(seconds=60)):
        kept = dist.new_group([0, 1])
    dist.barrier()
    store.dies = rank == 1
    with formed_within(timedelta(seconds=seconds)):
        began = time.monotonic()
        try:
            dist.new_group([0, 1])
        except RuntimeError as error:
            took = time.monotonic() - began
            backend: Any = kept._get_backend(dist.distributed_c10d.torch.device("cpu"))
            print(f"{took:.3f} {backend.options._timeout.total_seconds():.0f} {error}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
