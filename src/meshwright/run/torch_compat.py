"""Private torch that the worker needs: how long groups wait, and take to be formed, which collective a rank entered
last, and a group that is alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _set_pg_timeout, _world
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from meshwright.parallel.torch_compat import forget_layouts

_TRIES = 5
_KEPT = "256"  # collectives that torch's flight recorder remembers


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """A collective: what it does, which one of its group it is, and the ranks of the group."""

    operation: str
    number: int
    ranks: tuple[int, ...]


def remember_collectives() -> None:
    """Torch keeps the last collectives of this process, unless the person who runs it has said how many."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _KEPT)


def limit_waits(timeout: timedelta, *, but: str) -> None:
    """A collective of any group that is made by now fails after `timeout`, except in those described as `but`.

    Torch gives groups that are made without one its own, of half an hour.
    """
    for group in list(_world.pg_map):
        if group.group_desc != but:
            _set_pg_timeout(timeout, group)


@contextmanager
def formed_within(timeout: timedelta) -> Iterator[None]:
    """Inside, a group over gloo whose ranks do not all connect fails after `timeout`; its collectives wait as long as
    they would.

    gloo tries `_TRIES` times to connect, each for as long as a collective of the group may take: with torch's half an
    hour a rank that is lost meanwhile would hold up the others for hours.
    """
    form: Any = distributed_c10d._new_process_group_helper
    each = timeout / _TRIES

    def soon(*asked: Any, timeout: timedelta, **options: Any) -> Any:
        group, store = form(*asked, timeout=min(timeout, each), **options)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            _set_pg_timeout(timeout, group)
        return group, store

    with mock.patch.object(distributed_c10d, "_new_process_group_helper", soon):
        yield


def forget_groups() -> None:
    """No process group is left, nor what torch keeps of layouts over them."""
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_layouts()


def unseen() -> AbstractContextManager[Any]:
    """Inside, nothing of this process looks at what torch is asked to do."""
    return _disable_current_modes()


@contextmanager
def alone(*, rank: int, ranks: int) -> Iterator[None]:
    """Inside, this process has `rank` among `ranks`, no other of which is there: nothing that is sent arrives."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        forget_groups()


def last_entered() -> Entered | None:
    """The collective that this process entered last; None where torch remembers none."""
    try:
        dump = getattr(_distributed_c10d, "_dump_fr_trace_json")  # noqa: B009 - it is in no stub
        entries = json.loads(dump(True, False)).get("entries", [])
    except (AttributeError, RuntimeError, ValueError):
        return None
    if not entries:
        return None
    entry = max(entries, key=lambda entry: int(entry["record_id"]))
    name = entry["process_group"][0]
    number = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    # A process that is not of a group keeps a number in its place.
    known = _world.pg_group_ranks.items()
    members = next((ranks for group, ranks in known if getattr(group, "group_name", "") == name), {})
    operation = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
    return Entered(operation=operation, number=int(number), ranks=tuple(sorted(members)))
