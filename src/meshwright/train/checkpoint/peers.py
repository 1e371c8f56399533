"""What the ranks of a run agree on over a process group of their own, which no training collective uses."""

from __future__ import annotations

import errno
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.spec.errors import FULL, EnvironmentUnfit, Problem

T = TypeVar("T")

PATIENCE = timedelta(minutes=30)
DESCRIBED = "checkpoints"  # how torch knows the group, which waits for a disk and not for a step


_FIXES = {
    FULL: "free space there",
    (errno.EACCES, errno.EPERM, errno.EROFS): "make it writable",
    (errno.ENOENT, errno.ESTALE): "leave the folder where it is while the run goes on",
    (errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR): "move away what is in its place",
}


class Peers:
    """All ranks of the default group, over gloo; a process without one is alone. Making it is collective."""

    def __init__(self) -> None:
        grouped = dist.is_initialized()
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE, group_desc=DESCRIBED) if grouped else None
        self.rank = dist.get_rank(self.group) if grouped else 0
        self.size = dist.get_world_size(self.group) if grouped else 1

    def share(self, look: Callable[[], T]) -> T:
        """What `look` gave on rank 0, the only rank that looks. Raises EnvironmentUnfit everywhere when it failed."""
        box: list[Any] = [None, None]
        if self.rank == 0:
            try:
                box[0] = look()
            except OSError as error:
                box[1] = Problem(what=str(error), where=str(error.filename or ""))
        if self.group is not None:
            dist.broadcast_object_list(box, src=0, group=self.group)
        if box[1] is not None:
            raise EnvironmentUnfit(box[1])
        result: T = box[0]
        return result

    def gather(self, value: T) -> list[T]:
        """What every rank gave, in rank order, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, work: Callable[[], T]) -> T | Problem:
        """Every rank did `work`; the result of this rank, or on every rank the first failure of any rank."""
        failure: Problem | None = None
        try:
            result: T | Problem = work()
        except (Exception, CheckpointException) as error:  # whatever it is, no rank may be left waiting
            result = failure = Problem(what=f"rank {self.rank}: {told(error)}", fix=mended_by(error))
        return next((found for found in self.gather(failure) if found is not None), result)

    def close(self) -> None:
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
            self.group = None


def told(error: BaseException) -> str:
    """The innermost message: a checkpoint library wraps what the disk said."""
    inner = _innermost(error)
    return str(inner).strip() or repr(inner)


def mended_by(error: BaseException) -> str:
    """What a person does about the innermost error, as far as the system says what it is."""
    inner = _innermost(error)
    number = inner.errno if isinstance(inner, OSError) else None
    return next((fix for numbers, fix in _FIXES.items() if number in numbers), "free space there or make it writable")


def _innermost(error: BaseException) -> BaseException:
    failures = getattr(error, "failures", None)
    if failures:
        first = next(iter(failures.values()))
        return _innermost(first[0] if isinstance(first, tuple) else first)
    cause = error.__cause__ or error.__context__
    return _innermost(cause) if cause is not None and not isinstance(error, OSError) else error
