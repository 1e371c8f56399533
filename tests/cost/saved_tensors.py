"""What our own modules keep for backward, counted under fake tensors: nothing is computed and no memory is taken.

Fake tensors have no accelerator in a build of torch without one. `accelerator` puts in the kernels that torch chooses
there (run/dry/kernels.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from meshwright.nn import token_losses
from meshwright.nn.context import Context
from meshwright.nn.decoder import DecoderLayer, OutputHead, TokenEmbedding
from meshwright.nn.linear import Table
from meshwright.nn.weights import Weighted
from meshwright.parallel.recompute import apply_recompute
from meshwright.run.dry.kernels import accelerator_kernels
from meshwright.spec.model import Block, Embedding, Layer, attends
from meshwright.spec.plan import Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a block is run; parameters are fp32 at the least, and cast where less precision computes."""

    batch: int = 2
    sequence: int = 1024
    compute: torch.dtype = torch.float32
    recompute: Recompute = Recompute.NONE
    accelerator: bool = False
    documents: bool = False

    @property
    def master(self) -> torch.dtype:
        return torch.promote_types(self.compute, torch.float32)


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators made while this is on and that live now, each once; and the most so far."""

    def __init__(self, *, apart: Iterable[Tensor]) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._apart = {tensor.untyped_storage()._cdata for tensor in apart}
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._follow(leaf.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known and key not in self._apart:
            self._known[key] = weakref.ref(storage, partial(self._freed, key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def _freed(self, key: int, size: int, _reference: object) -> None:
        del self._known[key]
        self.now -= size


def kept(block: Block, setting: Setting) -> int:
    """Bytes of its own that `block` holds from forward to backward: a head with the loss, a layer without the angles
    and masks that all layers of a pass share."""
    with _run(block, setting) as (module, call, context):
        call(module, context)
        live = LiveBytes(apart=_apart(module, context))
        with live:
            result = call(module, context)
            node = result.grad_fn
            del result
            found = live.now
        assert node is not None
    return found


def peak(block: Block, setting: Setting) -> int:
    """The most bytes beside parameters during forward and backward, gradients of parameters among them."""
    with _run(block, setting) as (module, call, context):
        call(module, context)
        live = LiveBytes(apart=_apart(module, context))
        with live:
            result = call(module, context)
            result.backward(torch.ones_like(result))
    return live.peak


def saved_once(block: Block, setting: Setting) -> int:
    """The same bytes by autograd's own hooks, which do not see inside a recomputed region."""
    found: dict[int, Tensor] = {}
    with _run(block, setting) as (module, call, context):
        call(module, context)
        apart = {tensor.untyped_storage()._cdata for tensor in _apart(module, context)}

        def note(tensor: Tensor) -> Tensor:
            found[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            call(module, context)
        return sum(tensor.untyped_storage().nbytes() for key, tensor in found.items() if key not in apart)


def _apart(module: nn.Module, context: Context) -> list[Tensor]:
    angles = [tensor for turn in context.known_angles.values() for tensor in (turn.cos, turn.sin)]
    return [*module.parameters(), *module.buffers(), *angles, *context._masks.values()]


def count_flops(block: Block, setting: Setting) -> int:
    """Forward FLOPs of products and attention as torch counts them."""
    with _run(block, setting) as (module, call, context), FlopCounterMode(display=False) as counter:
        call(module, context)
    return counter.get_total_flops()


def count_step_flops(block: Block, setting: Setting) -> int:
    """FLOPs of forward and backward, and of what backward computes again."""
    with _run(block, setting) as (module, call, context), FlopCounterMode(display=False) as counter:
        result = call(module, context)
        result.backward(torch.ones_like(result))
    return counter.get_total_flops()


Call = Callable[[nn.Module, Context], Tensor]


@contextmanager
def _run(block: Block, setting: Setting) -> Iterator[tuple[nn.Module, Call, Context]]:
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(mock.patch.object(torch, "bincount", even_counts))
        if setting.accelerator:
            stack.enter_context(mock.patch.object(Context, "lengths", _unknown))
            stack.enter_context(accelerator_kernels())
        with default_dtype(setting.master):
            module, call = _build(block, setting)
        shape = (setting.batch, setting.sequence)
        documents = torch.zeros(shape, dtype=torch.int32) if setting.documents else None
        mixer = attends(block) if isinstance(block, Layer) else None
        ahead = torch.zeros(shape, dtype=torch.int32) if mixer and mixer.prefix else None
        yield module, call, Context(documents=documents, ahead=ahead)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New tensors have `dtype` inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _build(block: Block, setting: Setting) -> tuple[nn.Module, Call]:
    shape = (setting.batch, setting.sequence)

    anchor = torch.zeros((), dtype=setting.compute, requires_grad=True)

    def tokens() -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    def hidden() -> Tensor:
        result: Tensor = _Given.apply(anchor, (*shape, block_width(block)))
        return result

    module: nn.Module
    if isinstance(block, Embedding):
        module = TokenEmbedding(block, positions=True)

        def call(module: nn.Module, context: Context) -> Tensor:
            result: Tensor = module(tokens(), context)
            return result
    elif isinstance(block, Layer):
        module = DecoderLayer(block)
        apply_recompute(module, setting.recompute)

        def call(module: nn.Module, context: Context) -> Tensor:
            result: Tensor = module(hidden(), context)
            return result
    else:
        module = OutputHead(block)
        table = Table(block.vocab, block.width) if block.tied else None
        module.table = table

        def call(module: nn.Module, _context: Context) -> Tensor:
            return token_losses(module(hidden(), table), tokens())

    if setting.compute is not setting.master:
        for part in module.modules():
            if isinstance(part, Weighted):
                part.reader = lambda weight: weight.to(setting.compute)
    return module, call


def block_width(block: Block) -> int:
    return block.parts[0].width if isinstance(block, Layer) else block.width


class _Even:
    """Counts of tokens by expert as if every expert were given as many as the others."""

    def __init__(self, total: int, experts: int) -> None:
        self._counts = [total // experts + (index < total % experts) for index in range(experts)]

    def tolist(self) -> list[int]:
        return self._counts

    def __add__(self, other: _Even) -> _Even:
        """Of two passes: nobody reads it here."""
        return self


def even_counts(chosen: Tensor, minlength: int) -> _Even:
    return _Even(chosen.numel(), minlength)


def _unknown(_context: Context, **_limits: int | None) -> None:
    """Accelerators do not read the lengths of documents."""


class _Given(torch.autograd.Function):
    """Hidden features as a layer before would give them: nothing else keeps them."""

    @staticmethod
    def forward(_ctx: Any, anchor: Tensor, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=anchor.dtype)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.zeros((), dtype=grads[0].dtype), None
