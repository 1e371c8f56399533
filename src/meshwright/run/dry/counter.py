"""Everything that operators of one step do on this rank, as a list of events in their order."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn

from meshwright.parallel.outer.learners import MEETING
from meshwright.run.dry.events import Event, Kind
from meshwright.run.dry.kernels import flops_of, multiplies
from meshwright.run.dry.torch_compat import ASKS_DEVICE, FakeTensor, device_of, fake_mode, is_on_host
from meshwright.schedule import planned
from meshwright.spec.plan import AxisName, Design, Offload, Sharding
from meshwright.spec.report import LineName, MemoryPart
from meshwright.train.observe.collectives import (
    NAMESPACES,
    WAITS,
    group_among,
    line_of,
    only_counts,
    operation_of,
    whole_bytes,
)
from meshwright.train.observe.memory import Followed, MemoryTracker
from meshwright.train.observe.samples import axes_spanned, local_vocab
from meshwright.train.torch_compat import in_backward, is_distributed, leaves, runs_again, storage_key, unboxed


class _Does(Enum):
    """What an operator does beside taking memory."""

    MULTIPLY = "multiply"
    COMMUNICATE = "communicate"
    NEITHER = "neither"


class StepCounter(MemoryTracker):
    """While watching, keeps an Event for every operator of this thread and its backward that takes memory, multiplies
    or communicates.

    Tensors that a collective works on live as long as its handle does, as they do under gloo and NCCL. Where the step
    runs on fake tensors, those alone are followed; on an accelerator what lies in the host's memory is counted apart,
    where the plan offloads anything.
    `forms_gradients` is set while a split backward forms gradients of matrices, which no backward pass of torch does,
    and `updates` once gradients are whole.
    """

    def __init__(
        self, design: Design, *, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer, device: str
    ) -> None:
        plan = design.plan
        freed = all(group.sharding is Sharding.PARAMETERS for group in plan.groups)
        super().__init__(
            parts=parts,
            optimizer=optimizer,
            vocab=local_vocab(design, rank=dist.get_rank() if dist.is_initialized() else 0),
            gathered=MemoryPart.BUFFERS if freed else MemoryPart.PARAMETERS,
        )
        self.forms_gradients = self.updates = self._meets = False
        self._plan = plan
        self._mode = fake_mode()
        self._has_host = device != "cpu"
        self._waits = planned.splits(plan.schedule) and plan.schedule.chunks == 1
        self._marked = 0
        self._offloads = self._has_host and any(group.offload is not Offload.NONE for group in plan.groups)
        self._on_host: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._raw: list[tuple[Followed | None, Event]] = []
        self._received: set[int] = set()
        self._work: object = None
        self._does: dict[int, _Does] = {}
        self._spanned: dict[str, frozenset[AxisName]] = {}

    def mark(self, name: str) -> None:
        """A pass called `name` ends here."""
        self.mark_summed()
        if self._waits:
            self._keep_waiting()
        self._raw.append((None, Event(Kind.MARK, name)))

    def _keep_waiting(self) -> None:
        """What half of a backward made and is there when its pass ends waits for the other half: activations. What is
        held when the step begins, up to the first mark, is what it was."""
        made = self._raw[self._marked :] if self._marked else []
        self._marked = len(self._raw)
        live = {id(entry) for entry in self._live.values()}
        for entry, _ in made:
            if entry is not None and id(entry) in live and entry.part is MemoryPart.BUFFERS:
                entry.part = MemoryPart.ACTIVATIONS

    def events(self) -> tuple[Event, ...]:
        """Everything so far in order; parts of memory are as they are known now."""
        found = []
        for entry, event in self._raw:
            if event.kind is Kind.MEMORY and not event.amount:
                continue
            if entry is None:
                found.append(event)
                continue
            received = id(entry) in self._received and event.amount > 0
            found.append(Event(Kind.RECEIVE if received else Kind.MEMORY, str(entry.part.value), event.amount))
        return tuple(found)

    @contextmanager
    def watching(self) -> Iterator[StepCounter]:
        with super().watching():
            yield self

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """What is sent inside is of a round of learners, but for what they tell each other."""
        self._meets = True
        yield
        self._meets = False

    def _note(self, entry: Followed, change: int) -> None:
        self._raw.append((entry, Event(Kind.MEMORY, "", float(change))))

    def _is_plain(self, value: object) -> bool:
        if self._mode is None:
            return super()._is_plain(value)
        return self._is_ours(value) and not (self._has_host and is_on_host(value))

    def _is_ours(self, value: object) -> TypeGuard[FakeTensor]:
        return type(value) is FakeTensor and value.fake_mode is self._mode

    def _part_of(self, made: torch.Tensor) -> MemoryPart:
        found = super()._part_of(made)
        return MemoryPart.BUFFERS if self.forms_gradients and found is MemoryPart.ACTIVATIONS else found

    def _take_stock(self) -> None:
        super()._take_stock()
        if self._offloads:
            for item in gc.get_objects():
                self._count_on_host(item)

    def _count_on_host(self, value: object) -> None:
        """What lies in the host's memory is counted from now until it is freed."""
        if not self._is_ours(value) or not is_on_host(value):
            return
        storage = value.untyped_storage()
        key = storage_key(storage)
        if key not in self._on_host:
            size = float(storage.nbytes())
            self._on_host[key] = weakref.ref(storage, partial(self._left_host, key, size))
            self._raw.append((None, Event(Kind.HOST, "", size)))

    def _left_host(self, key: int, size: float, _reference: object) -> None:
        del self._on_host[key]
        self._raw.append((None, Event(Kind.HOST, "", -size)))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to say so at every operator takes long."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE:
            return device_of(args[0])
        if any(is_distributed(kind) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        self._work = None
        result = func(*args, **kwargs) if self._mode is None else self._mode.run(func, args, kwargs)
        does = self._does.get(id(func)) or self._look_at(func)
        if does is _Does.COMMUNICATE:
            self._collective(func, args, kwargs, result)
        elif does is _Does.MULTIPLY and (flops := flops_of(func, args, kwargs, result)):
            self._raw.append((None, Event(Kind.FLOPS, self._compute_line().value, flops)))
        for leaf in (result,) if isinstance(result, torch.Tensor) else leaves(result):
            if self._is_plain(leaf):
                self._follow(leaf, self._part_of(leaf))
            elif self._offloads:
                self._count_on_host(leaf)
        return result

    def _look_at(self, func: Any) -> _Does:
        does = _Does.MULTIPLY if multiplies(func) else _Does.NEITHER
        # Operators are never freed; to hash one by its value takes as long as all that is done here.
        self._does[id(func)] = _Does.COMMUNICATE if func.namespace in NAMESPACES else does
        return self._does[id(func)]

    def _compute_line(self) -> LineName:
        if self.updates:
            return LineName.OPTIMIZER
        if not in_backward():
            return LineName.BACKWARD if self.forms_gradients else LineName.FORWARD
        return LineName.RECOMPUTE if runs_again() else LineName.BACKWARD

    def _collective(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func.overloadpacket.__name__
        operation = operation_of(name)
        if name in WAITS or operation is None:
            return
        group = group_among(args, kwargs)
        if group is None or group.size() < 2:
            return
        if operation in ("send", "recv") and not any(_is_float(leaf) for leaf in leaves(args)):
            # Stages ask each other once, before their first step, whether shapes are known: no part of a step.
            return
        num_bytes = whole_bytes(args, result)
        axes = self._axes(group)
        described = group.group_desc
        line = line_of(operation, axes=axes, num_bytes=num_bytes, described=described, counts=only_counts(args))
        line = LineName.OUTER if self._meets and described != MEETING else line
        what = f"{line.value}|{operation}|{'+'.join(sorted(axes))}"
        self._raw.append((None, Event(Kind.COLLECTIVE, what, float(num_bytes))))
        if operation == "recv" and line is LineName.TRANSFER:
            self._receive(args)
        self._keep(args, result)

    def _axes(self, group: dist.ProcessGroup) -> frozenset[AxisName]:
        name = group.group_name
        if name not in self._spanned:
            self._spanned[name] = axes_spanned(self._plan, ranks=tuple(dist.get_process_group_ranks(group)))
        return self._spanned[name]

    def _receive(self, args: Any) -> None:
        for leaf in leaves(args):
            entry = self._live.get(storage_key(leaf.untyped_storage())) if self._is_plain(leaf) else None
            if entry is not None:
                self._received.add(id(entry))

    def _keep(self, args: Any, result: Any) -> None:
        """What the collective works on lives until its handle is dropped."""
        tensors = [leaf for leaf in leaves(args) if isinstance(leaf, torch.Tensor)]
        for leaf in leaves(result):
            if isinstance(leaf, torch.ScriptObject) and (work := unboxed(dist.Work, leaf)) is not None:
                weakref.finalize(work, tensors.clear)
                # The handle that the caller is given is this one as long as it lives.
                self._work = work


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
