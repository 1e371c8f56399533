"""Every collective of a sampled step, timed as the host meets it and filed under the report line it belongs to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from meshwright.cost.traffic_groups import DATA_AXES, SCALAR_BYTES
from meshwright.parallel.mesh import CONTEXT_GROUP
from meshwright.parallel.outer.learners import ACROSS, MEETING
from meshwright.spec.plan import AxisName, Plan
from meshwright.spec.report import LineName
from meshwright.spec.span import Span
from meshwright.train.observe.samples import CollectiveCall, axes_spanned
from meshwright.train.torch_compat import (
    TorchDispatchMode,
    around_waits,
    group_of,
    is_distributed,
    leaves,
    storage_key,
    unboxed,
)

NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
WAITS = frozenset({"wait_tensor", "_wrap_tensor_autograd"})
# The first word found in the name of an operator says what it does; order matters.
_OPERATIONS: Mapping[str, str] = {
    "reduce_scatter": "reduce_scatter",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
}


# What a group of the grid of experts is called by torch, after the axis of its mesh: those that tokens travel in,
# and those of ranks that hold the same experts.
_TOKENS = frozenset({"mesh_expert", "mesh_expert_tensor"})
_SAME_EXPERTS = frozenset({"mesh_expert_replicate", "mesh_expert_shard"})


def line_of(
    operation: str, *, axes: frozenset[AxisName], num_bytes: int, described: str = "", counts: bool = False
) -> LineName:
    """The report line of one collective, by what it does, along which axes its group runs and how it is `described`.

    Groups for keys, values and heads are described as context, those in which learners meet as learners; other groups
    along the context axis are data parallel, as what is sharded is divided over it too. Groups of the grid of experts
    say whether tokens travel in them or experts' parameters and gradients. What `counts` (int64) is none of the values
    that a line predicts. Along tensor alone it is a tensor collective; a send or receive is pipeline transfer; along
    data axes, with tensor among them where experts are held by all of a stage, a gather brings parameters and a
    reduction takes gradients; a reduction along the pipeline joins gradients of tied matrices. Reductions of a loss or
    a norm and whatever runs along several kinds of axes are `other`.
    """
    if described == CONTEXT_GROUP:
        return LineName.OTHER if counts else LineName.CONTEXT
    if described == ACROSS:
        return LineName.OUTER
    if operation in ("send", "recv"):
        return LineName.TRANSFER
    if counts:
        return LineName.OTHER
    if described in _TOKENS:
        return LineName.EXPERTS
    if described in _SAME_EXPERTS and num_bytes > SCALAR_BYTES:
        return LineName.PARAMETERS if operation == "all_gather" else LineName.GRADIENTS
    if axes == {AxisName.TENSOR}:
        return LineName.TENSOR
    if num_bytes <= SCALAR_BYTES or operation == "barrier":
        return LineName.OTHER
    if axes and axes <= DATA_AXES | {AxisName.TENSOR}:
        return LineName.PARAMETERS if operation in ("all_gather", "broadcast") else LineName.GRADIENTS
    if axes == {AxisName.PIPELINE} and operation == "all_reduce":
        return LineName.GRADIENTS
    return LineName.OTHER


class CollectiveTimer(TorchDispatchMode):
    """While entered, keeps one CollectiveCall for every c10d and functional collective of this thread and backward.

    The time is what the host is held for, in the call and in the wait that ends it (Work.wait or wait_tensor), so
    compute that runs meanwhile is not charged. Operators on tensor subclasses are seen when they reach plain
    tensors. On an accelerator the host does not wait for collectives: pass `synchronize` (torch.cuda.synchronize)
    and each is then timed alone, with nothing beside it.
    """

    def __init__(self, plan: Plan, *, synchronize: Any = None) -> None:
        super().__init__()
        self._plan = plan
        self._synchronize = synchronize
        self._by_work: dict[int, _Pending] = {}
        self._by_result: dict[int, _Pending] = {}
        self._pending: list[_Pending] = []

    @property
    def calls(self) -> tuple[CollectiveCall, ...]:
        """Every collective seen, in the order of the calls."""
        return self.calls_among(())

    def calls_among(self, spans: Iterable[Span]) -> tuple[CollectiveCall, ...]:
        """As `calls`; what begins while learners meet, as `spans` tell, is theirs but for what they tell each other."""
        rounds = [span for span in spans if span.name == LineName.OUTER]
        return tuple(pending.finish(self._plan, rounds) for pending in self._pending)

    @contextmanager
    def watching(self) -> Iterator[CollectiveTimer]:
        """Enters the mode and times the waits; both end with the block."""
        with around_waits(self._waited), self:
            yield self

    def _waited(self, work: object, wait: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = wait()
        pending = self._by_work.get(id(work))
        if pending is not None:
            pending.add_wait(start, time.perf_counter() - start)
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_distributed(kind) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if func.namespace not in NAMESPACES:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else func.__name__
        if name == "wait_tensor":
            return self._wait_tensor(func, args)
        operation = operation_of(name)
        if name in WAITS or operation is None:
            return func(*args, **kwargs)
        return self._collective(func, operation, args, kwargs)

    def _wait_tensor(self, func: Any, args: Any) -> Any:
        start = time.perf_counter()
        result = func(*args)
        pending = self._by_result.pop(storage_key(args[0].untyped_storage()), None)
        if pending is not None:
            pending.add_wait(start, time.perf_counter() - start)
        return result

    def _collective(self, func: Any, operation: str, args: Any, kwargs: Any) -> Any:
        if self._synchronize is not None:
            self._synchronize()
        start = time.perf_counter()
        result = func(*args, **kwargs)
        if self._synchronize is not None:
            self._synchronize()
        seconds = time.perf_counter() - start
        group = group_among(args, kwargs)
        if group is None or group.size() < 2:
            return result
        pending = _Pending(
            operation=operation, group=group, num_bytes=whole_bytes(args, result), start=start, seconds=seconds
        )
        pending.counts = only_counts(args)
        self._pending.append(pending)
        for leaf in leaves(result):
            if isinstance(leaf, torch.ScriptObject):
                pending.work = unboxed(dist.Work, leaf)
                self._by_work[id(pending.work)] = pending
            elif isinstance(leaf, torch.Tensor) and func.namespace != "c10d":
                self._by_result[storage_key(leaf.untyped_storage())] = pending
        return result


class _Pending:
    """A call whose wait may still come; holds its Work so that the identity of it stays unique."""

    __slots__ = ("counts", "described", "held_from", "num_bytes", "operation", "ranks", "seconds", "start", "work")

    def __init__(
        self, *, operation: str, group: dist.ProcessGroup, num_bytes: int, start: float, seconds: float
    ) -> None:
        self.operation = operation
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.described = group.group_desc
        self.num_bytes = num_bytes
        self.start = start
        self.held_from = start
        self.seconds = seconds
        self.counts = False
        self.work: object = None

    def add_wait(self, start: float, seconds: float) -> None:
        self.held_from = start
        self.seconds += seconds

    def finish(self, plan: Plan, rounds: Sequence[Span]) -> CollectiveCall:
        axes = axes_spanned(plan, ranks=self.ranks)
        line = line_of(
            self.operation, axes=axes, num_bytes=self.num_bytes, described=self.described, counts=self.counts
        )
        meets = any(span.start <= self.start <= span.start + span.seconds for span in rounds)
        return CollectiveCall(
            line=LineName.OUTER if meets and self.described != MEETING else line,
            operation=self.operation,
            ranks=len(self.ranks),
            bytes=self.num_bytes,
            start=self.start,
            held_from=self.held_from,
            seconds=self.seconds,
        )


@cache
def operation_of(name: str) -> str | None:
    """`all_gather` for `_allgather_base_`: what an operator of c10d does, by its name; None for helpers."""
    return next((operation for word, operation in _OPERATIONS.items() if word in name), None)


def whole_bytes(args: Any, result: Any) -> int:
    """Bytes of the whole tensor: the largest argument or result, for one side of a gather or scatter is whole."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    return max((_bytes_of(side) for side in (*args, *results)), default=0)


def _bytes_of(tree: Any) -> int:
    tensors = (leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def group_among(args: Any, kwargs: Any) -> dist.ProcessGroup | None:
    """The group among the arguments of an operator; names of reductions are no groups."""
    handles = (leaf for leaf in reversed(leaves((args, kwargs))) if not isinstance(leaf, (torch.Tensor, int)))
    return next((group for handle in handles if (group := group_of(handle)) is not None), None)


def only_counts(args: Any) -> bool:
    """Whether an operator moves int64: choices of experts and how many there are."""
    tensors = [leaf for leaf in leaves(args) if isinstance(leaf, torch.Tensor)]
    return bool(tensors) and all(tensor.dtype is torch.int64 for tensor in tensors)
