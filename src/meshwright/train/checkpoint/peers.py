"""What the ranks of a run agree on over a process group of their own, which no training collective uses."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.spec.errors import EnvironmentUnfit, Problem

T = TypeVar("T")

PATIENCE = timedelta(minutes=30)
DESCRIBED = "checkpoints"  # how torch knows the group, which waits for a disk and not for a step


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
        result: T | None = None
        failure: str | None = None
        try:
            result = work()
        except (Exception, CheckpointException) as error:  # whatever it is, no rank may be left waiting
            failure = told(error)
        failures = self.gather(failure)
        first = next((rank for rank, found in enumerate(failures) if found is not None), None)
        if first is None:
            return result  # type: ignore[return-value]  # the work ended
        return Problem(what=f"rank {first}: {failures[first]}")

    def close(self) -> None:
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
            self.group = None


def told(error: BaseException) -> str:
    """The innermost message: a checkpoint library wraps what the disk said."""
    failures = getattr(error, "failures", None)
    if failures:
        first = next(iter(failures.values()))
        return told(first[0] if isinstance(first, tuple) else first)
    cause = error.__cause__ or error.__context__
    return told(cause) if cause is not None and not isinstance(error, OSError) else str(error).strip() or repr(error)
