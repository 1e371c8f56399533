"""Bytes of live tensors on this rank, by part, at their peak: by storages as they are made, resized and freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.parallel.torch_compat import summed_gradients
from meshwright.spec.report import MemoryPart
from meshwright.train.observe.samples import MemoryPeak
from meshwright.train.torch_compat import (
    TorchDispatchMode,
    around_resizes,
    in_backward,
    is_distributed,
    leaves,
    local_part,
    storage_key,
)

_PLAIN = (torch.Tensor, nn.Parameter)
_UNKNOWN = (MemoryPart.ACTIVATIONS, MemoryPart.BUFFERS)
CPU_NOTE = (
    "live tensor bytes; not seen: temporaries inside one operator (gloo's copies, fused kernels) and allocator slack"
)
AS_WRITTEN_NOTE = "its parts are of a step that was not compiled"
ALLOCATOR_NOTE = "the allocator's peak; what no operator returned is under buffers"


class MemoryTracker(TorchDispatchMode):
    """While watching, follows the bytes of every storage that operators of this thread and its backward touch.

    A tensor is counted once by its storage, from when an operator returns it until the storage is freed, so tensors
    that autograd saved count as long as autograd holds them. Parameters, gradients, optimizer state and buffers are
    told apart by asking the modules and the optimizer; whole gradients that units add up before they reduce them are
    gradients; tensors whose last dim is the local vocabulary are logits; storages that are resized in place hold
    gathered parameters and are `gathered`. What forward made is activations. Buffers are what passes: what backward
    makes, what it computes again with it, and the optimizer's step; and what existed unexplained before. Tensor
    subclasses are followed through their plain local tensors.
    """

    def __init__(
        self,
        *,
        parts: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None = None,
        vocab: int | None = None,
        gathered: MemoryPart = MemoryPart.BUFFERS,
    ) -> None:
        super().__init__()
        self._parts = tuple(parts)
        self._optimizer = optimizer
        self._vocab = vocab
        self._gathered = gathered
        self._live: dict[int, Followed] = {}
        self._log: list[tuple[Followed, int]] = []
        self._units = [unit for part in parts for unit in part.modules() if isinstance(unit, FSDPModule)]
        self._is_after = False

    @contextmanager
    def watching(self) -> Iterator[MemoryTracker]:
        """Counts what lives already, then follows what is made and freed until the block ends."""
        self._take_stock()
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._mark_gradient)
            for part in self._parts
            for parameter in part.parameters()
            if parameter.requires_grad
        ]
        try:
            with around_resizes(self._resized), self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()
            self.mark_owned()

    def mark_owned(self) -> None:
        """Files gradients and optimizer state that exist now under their parts; call it between backward and step."""
        for part in self._parts:
            for parameter in part.parameters():
                self._mark_gradient(parameter)
        for tensor in _optimizer_tensors(self._optimizer):
            self._mark(tensor, MemoryPart.OPTIMIZER)
        self.mark_summed()
        self._is_after = True

    def mark_summed(self) -> None:
        """Files whole gradients that units add up now; call it between microbatches."""
        for tensor in summed_gradients(self._units):
            self._mark(tensor, MemoryPart.GRADIENTS)

    @property
    def current_bytes(self) -> int:
        """Live bytes that are followed now."""
        return sum(entry.bytes for entry in self._live.values())

    def peak(self) -> MemoryPeak:
        """The moment of most live bytes, by part; parts are as they were known at the end of watching."""
        totals = dict.fromkeys(MemoryPart, 0)
        total, best = 0, 0
        best_parts = dict(totals)
        for entry, change in self._log:
            totals[entry.part] += change
            total += change
            if total > best:
                best, best_parts = total, dict(totals)
        parts = {part.value: float(count) for part, count in best_parts.items() if count}
        return MemoryPeak(parts=parts, events=len(self._log), note=CPU_NOTE)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_distributed(kind) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in leaves(result):
            if self._is_plain(leaf):
                self._follow(leaf, self._part_of(leaf))
        return result

    def _part_of(self, made: torch.Tensor) -> MemoryPart:
        """What `made` is, as far as the moment tells."""
        if self._vocab is not None and made.ndim >= 2 and made.shape[-1] == self._vocab:
            return MemoryPart.LOGITS
        return MemoryPart.BUFFERS if self._is_after or in_backward() else MemoryPart.ACTIVATIONS

    def _is_plain(self, value: object) -> bool:
        """Whether `value` is a tensor whose storage this follows: one with memory of its own, no subclass."""
        return type(value) in _PLAIN

    def _take_stock(self) -> None:
        for part in self._parts:
            for parameter in part.parameters():
                self._mark(parameter, MemoryPart.PARAMETERS)
                if parameter.grad is not None:
                    self._mark(parameter.grad, MemoryPart.GRADIENTS)
            for buffer in part.buffers():
                self._mark(buffer, MemoryPart.BUFFERS)
        for tensor in _optimizer_tensors(self._optimizer):
            self._mark(tensor, MemoryPart.OPTIMIZER)
        gc.collect()
        for item in gc.get_objects():
            if self._is_plain(item):
                self._follow(item, MemoryPart.BUFFERS)

    def _mark_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._mark(parameter.grad, MemoryPart.GRADIENTS)

    def _mark(self, tensor: torch.Tensor, part: MemoryPart) -> None:
        local = local_part(tensor)
        self._follow(local, part)
        entry = self._live.get(storage_key(local.untyped_storage())) if self._is_plain(local) else None
        if entry is not None and entry.part not in (MemoryPart.PARAMETERS, MemoryPart.OPTIMIZER):
            entry.part = part

    def _follow(self, tensor: torch.Tensor, part: MemoryPart) -> None:
        if not self._is_plain(tensor) or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._live:
            self._resized(storage)
            return
        if tensor.is_meta:
            return
        entry = Followed(part=part, num_bytes=storage.nbytes())
        entry.reference = weakref.ref(storage, partial(self._freed, key))
        self._live[key] = entry
        self._note(entry, entry.bytes)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        entry = self._live.get(storage_key(storage))
        if entry is None:
            return
        change = storage.nbytes() - entry.bytes
        if change:
            entry.bytes += change
            entry.part = self._gathered if entry.part in _UNKNOWN else entry.part
            self._note(entry, change)

    def _freed(self, key: int, _reference: object) -> None:
        entry = self._live.pop(key, None)
        if entry is not None:
            self._note(entry, -entry.bytes)

    def _note(self, entry: Followed, change: int) -> None:
        """`entry` has grown by `change` bytes."""
        self._log.append((entry, change))


class Followed:
    """One storage: its bytes now and the part it is known to be, which may be learnt after it was made."""

    __slots__ = ("bytes", "part", "reference")

    def __init__(self, *, part: MemoryPart, num_bytes: int) -> None:
        self.part = part
        self.bytes = num_bytes
        self.reference: weakref.ref[torch.UntypedStorage] | None = None


def _optimizer_tensors(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    states = optimizer.state.values() if optimizer is not None else ()
    return [tensor for state in states for tensor in leaves(state) if isinstance(tensor, torch.Tensor)]


def of_allocator(peak: MemoryPeak, allocated: float) -> MemoryPeak:
    """Parts that sum to what the allocator had at most: what no operator returned is buffers, and what compiled layers
    did without is taken from activations."""
    unseen = allocated - peak.total
    part = MemoryPart.BUFFERS if unseen >= 0.0 else MemoryPart.ACTIVATIONS
    parts = {**peak.parts, part: max(0.0, peak.parts.get(part, 0.0) + unseen)}
    return replace(peak, parts=parts, note=ALLOCATOR_NOTE)
