"""The private parts of torch that the train room stands on, in one place; each has a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "TorchDispatchMode",
    "around_calls",
    "around_functional_waits",
    "around_resizes",
    "around_waits",
    "as_written",
    "group_of",
    "in_backward",
    "is_distributed",
    "leaves",
    "local_part",
    "runs_again",
    "storage_key",
    "unboxed",
]


@cache
def is_distributed(kind: type) -> bool:
    """Whether tensors of this type run their operators on plain local tensors, where a dispatch mode sees them."""
    return issubclass(kind, (DTensor, AsyncCollectiveTensor))


def leaves(tree: Any) -> list[Any]:
    """What an operator is given or gives back, taken out of sequences and mappings; lists of numbers are left out, of
    which collectives have one for each rank."""
    if isinstance(tree, (list, tuple)):
        if type(tree) is list and tree and type(tree[0]) is int:
            return []
        return [leaf for entry in tree for leaf in leaves(entry)]
    return leaves(list(tree.values())) if isinstance(tree, dict) else [tree]


_resolve: Callable[[Any], Any] = dist.distributed_c10d._resolve_process_group


def group_of(handle: Any) -> dist.ProcessGroup | None:
    """The process group given as itself, as a script object or by its registered name; None otherwise."""
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


# Methods of a process group that begin a collective; the names of 2.13, and those of 2.11 before them.
_CALLS = (
    "broadcast",
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced",
    "alltoall_base",
    "all_to_all_single",
    "alltoall",
    "send",
    "recv",
    "recv_anysource",
    "barrier",
)


@contextmanager
def around_calls(around: Callable[..., Any]) -> Iterator[None]:
    """While entered, every collective of a process group that Python calls runs as `around(name, call, group, ...)`."""
    # As the class keeps them: read by name they are bound to nothing, and would be so when they are put back.
    kept = {name: method for name, method in vars(dist.ProcessGroup).items() if name in _CALLS}

    def method(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda group, *args, **kwargs: around(name, original, group, *args, **kwargs)

    for name in kept:
        setattr(dist.ProcessGroup, name, method(name, getattr(dist.ProcessGroup, name)))
    try:
        yield
    finally:
        for name, original in kept.items():
            setattr(dist.ProcessGroup, name, original)


@contextmanager
def around_functional_waits(around: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """While entered, every wait for the tensor of a functional collective runs as `around(wait)`, but where it is
    traced for a graph."""
    original = _functional_collectives.wait_tensor

    def wait_tensor(tensor: Any) -> Any:
        return original(tensor) if torch.compiler.is_compiling() else around(lambda: original(tensor))

    _functional_collectives.wait_tensor = wait_tensor
    try:
        yield
    finally:
        _functional_collectives.wait_tensor = original


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


def runs_again() -> bool:
    """Whether this thread is inside a forward that a backward pass runs again: what it saves, a checkpoint takes."""
    return in_backward() and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def as_written() -> AbstractContextManager[object]:
    """While entered, what is compiled runs as it is written, and stays compiled: without it torch gives up for good on
    code that it meets under a dispatch mode."""
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
