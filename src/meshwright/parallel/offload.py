"""Offload: what lies in the host's memory until it is needed. On a processor that memory is the device's own.

Optimizer state and masters stay there and are updated by its processors (ZeRO-Offload, 2101.06840). Activations of a
layer go there as forward makes them and come back before its backward; those of the layer before are fetched while one
works (Capuchin, 2002.09398, swaps so). On an accelerator copies run on streams of their own through pinned memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.nn.context import Context
from meshwright.nn.decoder import DecoderLayer
from meshwright.nn.weights import Reader, Weighted
from meshwright.parallel.clip import local_part
from meshwright.parallel.torch_compat import with_local

_LEAST_BYTES = 4096  # smaller ones stay: starting a copy takes longer than what they free is worth


class Copies:
    """Ways between a device and the host's memory. `always` copies where both are one memory too, as tests do."""

    def __init__(self, device: torch.device, *, always: bool = False) -> None:
        self._cuda = device.type == "cuda"
        self.device, self.needed = device, always or device.type != "cpu"
        self._out = torch.cuda.Stream(device) if self._cuda else None
        self._back = torch.cuda.Stream(device) if self._cuda else None
        self._begun: deque[torch.cuda.Event] = deque()

    def to_host(self, x: Tensor, *, into: Tensor | None = None) -> Tensor:
        """A copy in the host's memory, there when `wait` returns, `into` a tensor that is there where one is given; x
        may be freed or written over at once."""
        copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=self._cuda) if into is None else into
        if self._out is None:
            return copy.copy_(x)
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            copy.copy_(x, non_blocking=True)
        x.record_stream(self._out)
        return copy

    def to_device(self, x: Tensor) -> Tensor:
        """A copy on the device; only after `ready` may the device's work read it."""
        if self._back is None or self._out is None:
            return x.to(self.device, copy=True)
        self._back.wait_stream(self._out)
        with torch.cuda.stream(self._back):
            copy = torch.empty(x.shape, dtype=x.dtype, device=self.device)
            copy.copy_(x, non_blocking=True)
        copy.record_stream(torch.cuda.current_stream(self.device))
        return copy

    def ready(self) -> None:
        """The device's later work comes after every copy to it."""
        if self._back is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._back)

    def pace(self) -> None:
        """The host begins another layer when copies of the layer before the last are there, and what they free is free:
        a host that runs ahead of its device would find all of it taken."""
        if self._out is not None:
            self._begun.append(self._out.record_event())
            if len(self._begun) > 1:
                self._begun.popleft().synchronize()

    def settle(self) -> None:
        """The device has done all that it was asked, and what that read is free."""
        if self._back is not None:
            torch.cuda.current_stream(self.device).synchronize()

    def wait(self) -> None:
        """Every copy to the host is there."""
        if self._out is not None:
            self._out.synchronize()


class Passage:
    """What one pass through one layer saved for backward, in the host's memory; `before` is the layer's before it."""

    def __init__(self, copies: Copies, before: Passage | None) -> None:
        self._copies, self.before = copies, before
        self._away: dict[int, Tensor] = {}
        self._fetched: dict[int, Tensor] = {}
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, int]] = {}

    def pack(self, x: Tensor) -> Packed:
        """Where x will be: its storage goes away once, however many operators save views of it."""
        storage = _storage(x)
        known = (storage.cdata, x.dtype, x._version)
        if known not in self._known or self._known[known][0].expired():
            key = len(self._away) + 1
            self._away[key] = self._copies.to_host(_whole(x))
            self._known[known] = storage, key
        return Packed(
            passage=self, key=self._known[known][1], shape=x.shape, stride=x.stride(), offset=int(x.storage_offset())
        )

    def fetch(self) -> None:
        """Everything that is away is on its way back."""
        self._known.clear()
        for key in list(self._away):
            self._fetched[key] = self._copies.to_device(self._away.pop(key))

    def unpack(self, kept: Packed) -> Tensor:
        """A saved tensor, on the device. What is asked for twice (by a backward that keeps its graph) is kept."""
        if kept.key not in self._fetched:
            self.fetch()
        self._copies.ready()
        if self.before is not None:
            self._copies.settle()
            self.before.fetch()
            self.before = None
        return self._fetched[kept.key].as_strided(kept.shape, kept.stride, kept.offset)


class Packed(NamedTuple):
    """A saved tensor as a view of what went away under `key`."""

    passage: Passage
    key: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Away:
    """Runs a layer so that what it saves for backward, but its weights and what all layers share, lies in the host's
    memory (a layer's `around`).

    `chain` is shared by the layers of one stage. It keeps no pass alive: what one fetched is free after its backward.
    """

    def __init__(self, layer: DecoderLayer, *, copies: Copies, chain: list[ref[Passage] | None], first: bool) -> None:
        self._around, self._copies, self._chain, self._first = layer.around, copies, chain, first
        self._weights: dict[int, StorageWeakRef] = {}
        for module in layer.modules():
            if isinstance(module, Weighted):
                module.reader = _noting(module.reader, self._weights)

    def __call__(self, body: Callable[..., Tensor], x: Tensor, context: Context) -> Tensor:
        inner = body if self._around is None else self._around
        call = (x, context) if self._around is None else (body, x, context)
        if not torch.is_grad_enabled():
            return inner(*call)
        self._copies.pace()
        before = None if self._first else self._chain[0]
        passage = Passage(self._copies, None if before is None else before())
        self._chain[0] = ref(passage)
        self._weights.clear()

        def pack(saved: Tensor) -> Tensor | Packed:
            if saved.device.type != self._copies.device.type or saved.nbytes < _LEAST_BYTES:
                return saved
            place = _storage(saved).cdata
            stays = place in self._weights or any(place == _storage(each).cdata for each in context.shared())
            return saved if stays else passage.pack(saved)

        with saved_tensors_hooks(pack, _unpack):
            return inner(*call)


def _unpack(kept: Tensor | Packed) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.passage.unpack(kept)


def _whole(x: Tensor) -> Tensor:
    """All of x's storage, flat."""
    return x.detach().as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)


def _noting(reader: Reader | None, seen: dict[int, StorageWeakRef]) -> Reader:
    """The same reader, which notes whose memory it gave out."""

    def read(weight: Tensor) -> Tensor:
        result = weight if reader is None else reader(weight)
        storage = _storage(result)
        seen[storage.cdata] = storage
        return result

    return read


def _storage(x: Tensor) -> StorageWeakRef:
    """A weak reference keeps the storage's place: while it is there, no other storage has it."""
    return StorageWeakRef(x.untyped_storage())


def keep_activations_away(layers: Sequence[DecoderLayer], *, copies: Copies) -> None:
    """Activations of `layers`, those of one stage in order, lie in the host's memory between forward and backward.

    Recompute stays as it is: what a checkpoint keeps is what goes. Nothing happens where the memory is the device's.
    """
    if not copies.needed:
        return
    chain: list[ref[Passage] | None] = [None]
    for place, layer in enumerate(layers):
        layer.around = Away(layer, copies=copies, chain=chain, first=place == 0)


class AwayRule:
    """A rule of an optimizer whose state, and a master of each parameter, lie in the host's memory.

    Its step runs there: gradients go, updated parameters come back. The master follows the parameter when anything
    else (a checkpoint) writes into it. `rule` looks at one parameter at a time and at no other rank.
    """

    def __init__(self, rule: Any, *, copies: Copies) -> None:
        self.rule, self._copies = rule, copies
        self._masters: dict[Tensor, tuple[nn.Parameter, int]] = {}

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """As the rule's own, laid out as the parameter is, with local parts in the host's memory."""
        return {name: _at_home(x, self._copies) for name, x in self.rule.state(parameter).items()}

    def step(
        self, held: Sequence[Tensor], states: Sequence[dict[str, Tensor]], *, rate: float, weight_decay: float
    ) -> None:
        masters = [self._master(parameter) for parameter in held]
        gradients = [self._copies.to_host(local_part(x.grad)) for x in held if x.grad is not None]
        self._copies.wait()
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        local = [{name: local_part(x) for name, x in state.items()} for state in states]
        self.rule.step(masters, local, rate=rate, weight_decay=weight_decay)
        for parameter, master in zip(held, masters, strict=True):
            master.grad = None
            kept = local_part(parameter.detach())
            kept.copy_(master.detach(), non_blocking=True)
            self._masters[parameter] = master, kept._version

    def _master(self, parameter: Tensor) -> nn.Parameter:
        local = local_part(parameter.detach())
        master, version = self._masters.get(parameter, (None, -1))
        if master is None:
            master = nn.Parameter(self._copies.to_host(local))
        elif version != local._version:
            self._copies.to_host(local, into=master.detach())
        return master


def _at_home(x: Tensor, copies: Copies) -> Tensor:
    return with_local(x, copies.to_host(local_part(x)))
