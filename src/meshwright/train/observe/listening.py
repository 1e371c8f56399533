"""Every collective that this thread calls in a run, in its CollectiveLog: what a step was held by, at any step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist

from meshwright.train.observe.collective_log import BETWEEN_TWO, CollectiveLog, Group
from meshwright.train.observe.collectives import operation_of
from meshwright.train.torch_compat import around_calls, around_functional_waits, around_waits


@contextmanager
def listening(log: CollectiveLog) -> Iterator[None]:
    """While entered, `log` is told of every collective, send and receive that this thread calls through
    torch.distributed, and of every wait that holds it.

    Unlike CollectiveTimer it is no dispatch mode: some microseconds a collective, and no other operator is seen. What
    torch's own code starts without Python is waited for all the same, but is no entry. Other threads are not heard:
    what a checkpoint waits for holds no step.
    """
    thread = get_ident()
    pending: dict[int, tuple[int, float]] = {}

    def call(name: str, original: Callable[..., Any], group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        operation = operation_of(name)
        if get_ident() != thread or operation is None:
            return original(group, *args, **kwargs)
        number = log.number_of(group.group_name, group.size())
        if number is None:
            ranks = tuple(dist.get_process_group_ranks(group))
            number = log.know(Group(name=group.group_name, ranks=ranks, described=group.group_desc))
        peer = args[1] if operation in BETWEEN_TWO and name in BETWEEN_TWO else -1
        slot = log.enter(number, operation, _bytes_of(args), peer=peer)
        began = time.perf_counter()
        work = original(group, *args, **kwargs)
        held = log.held(began)
        if work is None:
            log.leave(slot, inside_seconds=held)
        else:
            log.begun(slot)
            pending[id(work)] = (slot, held)
        return work

    def wait(work: object, original: Callable[[], Any]) -> Any:
        if get_ident() != thread:
            return original()
        slot, held = pending.pop(id(work), (None, 0.0))
        if slot is not None:
            log.waits(slot)
        began = time.perf_counter()
        result = original()
        held += log.held(began)
        if slot is not None:
            log.leave(slot, inside_seconds=held)
        return result

    def wait_functional(original: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = original()
        if get_ident() == thread:
            log.held(began)
        return result

    with around_calls(call), around_waits(wait), around_functional_waits(wait_functional):
        yield


def _bytes_of(args: tuple[Any, ...]) -> int:
    """Of the larger side: one side of a gather or a scatter is whole."""
    return max((_size(side) for side in args[:2]), default=0)


def _size(side: Any) -> int:
    if isinstance(side, torch.Tensor):
        return side.numel() * side.element_size()
    return sum(map(_size, side)) if isinstance(side, list) else 0
