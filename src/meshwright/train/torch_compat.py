"""The private parts of torch that the train room stands on, in one place; each has a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "TorchDispatchMode",
    "around_resizes",
    "around_waits",
    "group_ranks",
    "in_backward",
    "is_distributed",
    "local_part",
    "storage_key",
    "tree_leaves",
    "unboxed",
]


def is_distributed(kind: type) -> bool:
    """Whether tensors of this type run their operators on plain local tensors, where a dispatch mode sees them."""
    return issubclass(kind, (DTensor, AsyncCollectiveTensor))


_resolve: Callable[[Any], Any] = dist.distributed_c10d._resolve_process_group


def group_ranks(handle: Any) -> tuple[int, ...] | None:
    """Global ranks of a process group given as itself, as a script object or by its registered name; None otherwise."""
    group = _group(handle)
    return None if group is None else tuple(dist.get_process_group_ranks(group))


def group_name(handle: Any) -> str | None:
    """What the group was made for, given as to `group_ranks`: `mesh_tensor` of a mesh's axis; None otherwise."""
    group = _group(handle)
    return None if group is None else str(group.group_desc)


def _group(handle: Any) -> dist.ProcessGroup | None:
    if isinstance(handle, torch.ScriptObject):
        handle = unboxed(dist.ProcessGroup, handle)
    if isinstance(handle, str):
        try:
            handle = _resolve(handle)
        except (RuntimeError, ValueError, KeyError):
            return None
    return handle if isinstance(handle, dist.ProcessGroup) else None


def unboxed(kind: Any, value: torch.ScriptObject) -> Any:
    """The `kind` (ProcessGroup or Work) inside a script object, or None when it holds something else."""
    try:
        return kind.unbox(value)
    except RuntimeError:
        return None


@contextmanager
def around_waits(around: Callable[[Any, Callable[[], Any]], Any]) -> Iterator[None]:
    """While entered, every Work.wait runs as `around(work, wait)`; there is no public hook on a wait."""
    original = dist.Work.wait

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        return around(work, lambda: original(work, *args, **kwargs))

    dist.Work.wait = wait  # type: ignore[method-assign, assignment]  # put back when the block ends
    try:
        yield
    finally:
        dist.Work.wait = original  # type: ignore[method-assign]  # the method that was there


@contextmanager
def around_resizes(after: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """While entered, `after(storage)` runs when a storage was resized in place, as sharded parameters are."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        after(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]  # put back when the block ends
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]  # the method that was there


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number that is the same for every handle of one storage, unique while the storage lives."""
    return int(storage._cdata)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's plain tensor of a distributed tensor, with no operator run; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return int(torch._C._current_graph_task_id()) != -1
