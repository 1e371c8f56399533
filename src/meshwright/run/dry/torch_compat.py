"""The private parts of torch that a dry run stands on, in one place; torch 2.11 to 2.13."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.autograd.profiler import record_function
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.flop_counter import flop_registry

from meshwright.nn.routing import Routed
from meshwright.parallel import dispatch
from meshwright.train.torch_compat import is_distributed, leaves

__all__ = [
    "ACCELERATOR", "ASKS_DEVICE", "DecidedMode", "FakeTensor", "FakeTensorMode", "as_fake",
    "device_of", "fake_mode", "fake_world", "flop_formula", "fresh_meta", "is_on_host", "kernels_of", "lonely_world",
    "real", "view_on_meta",
]  # fmt: skip

# The name of a device that has no kernels: an accelerator to every piece of code that asks, whichever its vendor.
ACCELERATOR = "meshdry"
_LARGE = 1e30
_ARRIVALS = dispatch.arrivals
# Most of what is dispatched under fake tensors: every look at a tensor's device.
ASKS_DEVICE = torch.ops.prim.device.default
_META, _HOST = torch.device("meta"), torch.device("cpu")
_get_dispatch_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE


class _Event:
    """Work is done when it is issued: nothing is ever late."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None: ...

    def record(self, *_arguments: Any) -> None: ...

    def wait(self, *_arguments: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Stream:
    def __init__(self, *_arguments: Any, **_options: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_arguments: Any) -> None: ...

    def wait_stream(self, _other: Any) -> None: ...

    def wait_event(self, _event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


def _stream(*_arguments: Any) -> _Stream:
    return _Stream()


class _Device:
    """What torch asks of the module of a device: one device, one stream, no random state of its own."""

    Stream, Event = _Stream, _Event

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, _device: Any) -> None: ...

    def synchronize(self, *_arguments: Any) -> None: ...

    def current_stream(self, *_arguments: Any) -> _Stream:
        return _Stream()

    def stream(self, stream: Any) -> Any:
        return stream

    def device(self, _device: Any) -> Any:
        return nullcontext()

    def manual_seed_all(self, _seed: int) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, *_arguments: Any) -> Any:
        return None

    def set_rng_state(self, *_arguments: Any) -> None: ...

    def _is_in_bad_fork(self) -> bool:
        return False


def _register_accelerator() -> None:
    """The device exists in this process; once, for torch knows no way back."""
    if torch._C._get_privateuse1_backend_name() != ACCELERATOR:
        _setup_privateuseone_for_python_backend(rename=ACCELERATOR, backend_module=_Device())


def real(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` whose tensors are real although fake ones are made around it."""

    @wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return function(*arguments, **options)

    return run


@real
def _even_counts(chosen: torch.Tensor, _weights: object = None, minlength: int = 0) -> torch.Tensor:
    """As if every expert were given as many tokens as the others; the first ones take what is left over."""
    counts = torch.full((minlength,), chosen.numel() // minlength, dtype=torch.int64)
    counts[: chosen.numel() % minlength] += 1
    return counts


def _even_kept(routed: Routed, flat: torch.Tensor, *, experts: int) -> torch.Tensor:
    """As `_even_counts` where experts take no more choices than their capacity."""
    return _even_counts(flat[: math.ceil(len(flat) * routed.share)], minlength=experts)


def _even_arrivals(
    counts: torch.Tensor, *, experts: dist.ProcessGroup | None, slices: dist.ProcessGroup | None
) -> dispatch.Arrivals:
    """As if every rank sent its experts what this one sends them, and every slice were given the same."""
    _ARRIVALS(counts, experts=experts, slices=slices)
    holders = 1 if experts is None else experts.size()
    own = real(lambda: counts.view(holders, -1))()
    return real(_read_even)(own, 0 if experts is None else experts.rank(), slices)


def _read_even(own: torch.Tensor, rank: int, slices: dist.ProcessGroup | None) -> dispatch.Arrivals:
    chunks = own[rank].expand(own.shape).contiguous()
    every = chunks.expand(1 if slices is None else slices.size(), *chunks.shape)
    return dispatch.read(own, chunks, every)


def _number(tensor: torch.Tensor) -> float | int:
    return _LARGE if tensor.is_floating_point() else 1


_DECIDED: dict[object, Callable[..., Any]] = {
    torch.ops.aten.bincount.default: _even_counts,
    torch.ops.aten._local_scalar_dense.default: _number,
    torch.ops.aten._fused_sgd_.default: lambda *_arguments, **_options: None,  # of which torch has no form for it
}


def _is_counting(args: Any, options: Any) -> bool:
    """Whether an operator works on real whole numbers alone, which were decided and stay known."""
    tensors = [leaf for leaf in leaves(args) if isinstance(leaf, torch.Tensor)]
    here = options.get("device") is None
    return here and bool(tensors) and all(_is_known(tensor) for tensor in tensors)


def _is_known(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.dtype is torch.int64 and tensor.device.type == "cpu"


class Recipe(Protocol):
    """How to make what an operator gives back."""

    def make(self, mode: FakeTensorMode, args: Any, options: Any) -> Any:
        """That of these arguments."""


class Known(Protocol):
    """What tells what operators give back on fake tensors."""

    def known(self, mode: FakeTensorMode, func: Any, args: Any, options: Any) -> Recipe | None:
        """How to make what `func` gives back under `mode`, where that was learnt."""

    def run(self, mode: FakeTensorMode, func: Any, args: Any, options: Any, otherwise: Callable[[], Any]) -> Any:
        """What `func` gives back under `mode`, from `otherwise` where that is not known."""


class DecidedMode(FakeTensorMode):
    """What a step reads of its data is decided, for fake tensors hold none.

    Every expert is given as many tokens as the others; a norm of gradients is above the limit, so that they are
    scaled; and whole numbers, which pipeline stages ask each other whether shapes are known, are 1.
    """

    def __init__(self, recipes: Known) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._recipes = recipes

    def run(self, func: Any, args: Any, options: Any) -> Any:
        """What `func` gives back, from another mode around this one: what is known needs no dispatch.

        Where torch works out a layout of distributed tensors it has a fake mode of its own, and what is made is its.
        """
        recipe = self._recipes.known(self, func, args, options) if _get_dispatch_mode(_FAKE) is self else None
        return func(*args, **options) if recipe is None else recipe.make(self, args, options)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to say so at every operator takes long."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE:
            return device_of(args[0])
        if any(is_distributed(kind) for kind in types):
            return NotImplemented
        options = kwargs or {}
        return self._recipes.run(self, func, args, options, lambda: self._decided(func, types, args, options))

    def _decided(self, func: Any, types: Any, args: Any, options: Any) -> Any:
        if _is_counting(args, options):
            with unset_fake_temporarily():
                return func(*args, **options)
        if func.namespace == "c10d" and (result := self._communicated(func, args, options)) is not None:
            return result
        decided = _DECIDED.get(func)
        if decided is not None and any(isinstance(leaf, FakeTensor) for leaf in leaves(args[:1])):
            return decided(*args, **options)
        if func is torch.ops.aten._to_copy.default:
            if _is_known(args[0]) and torch._C._current_graph_task_id() != -1 and options.get("dtype") is None:
                # FSDP2 moves what a module is given to its device when backward computes it again.
                return args[0]
            # A known small tensor would be copied for real, which a device without kernels cannot do.
            x = args[0] if isinstance(args[0], FakeTensor) else self.from_tensor(args[0])
            x.constant = None
            args = (x, *args[1:])
        return super().__torch_dispatch__(func, types, args, options)

    def _communicated(self, func: Any, args: Any, options: Any) -> Any | None:
        """What a collective gives back; None where that is a new tensor, which has to be a fake one."""
        with in_kernel_invocation_manager(self):
            result = func(*args, **options)
        return None if any(type(leaf) is torch.Tensor for leaf in leaves(result)) else result


def device_of(tensor: FakeTensor) -> torch.device:
    """What ASKS_DEVICE gives of a fake tensor; torch's kernels are to take it for one of device meta."""
    return _META if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


def is_on_host(tensor: FakeTensor) -> bool:
    """Whether its memory would be the host's, were it real."""
    return bool(tensor.fake_device == _HOST)


def as_fake(meta: torch.Tensor, *, mode: FakeTensorMode, device: torch.device, state: dict[str, Any]) -> FakeTensor:
    """A tensor of device meta as a fake one of `device`, with the attributes of another of this device, `state`."""
    tensor = torch.Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    tensor.__dict__.update(state, fake_mode=mode)
    return tensor


def fresh_meta(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor of device meta, whatever modes there are."""
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def view_on_meta(tensor: FakeTensor, shape: torch.Size, stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """A view of a fake tensor that is of device meta: torch's in_kernel_invocation_manager without its generator."""
    mode = tensor.fake_mode
    with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
        mode.in_kernel_invocation = True
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            return torch.as_strided(tensor, shape, stride, offset)
        finally:
            mode.in_kernel_invocation = False


def kernels_of(tensor: torch.Tensor) -> object:
    """Which of an operator's kernels torch would choose for a tensor; equal objects, equal choices."""
    return torch._C._dispatch_key_set(tensor)


class _Chunks:
    """The chunks of a tensor along a dim, each made when it is asked for: a shard needs one or two of thousands."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._length = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, index: int) -> torch.Tensor:
        start, end = index * self._length, self._tensor.size(self._dim)
        if index and start >= end:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._length, end - start))


def _own_group(ranks: list[int], **options: Any) -> Any:
    """The group of these ranks if this one is among them: nobody asks a process without peers for those of others."""
    return dist.new_group(ranks, **options) if dist.get_rank() in ranks else dist.GroupMember.NON_GROUP_MEMBER


def _itself(value: Any) -> Any:
    return value


def _nothing(*_arguments: Any) -> None: ...


@contextmanager
def fake_world(*, rank: int, world_size: int, accelerator: bool, recipes: Known) -> Iterator[FakeTensorMode]:
    """Inside, this process is `rank` of `world_size` with no peers, and every new tensor is fake: it has a shape, a
    type and a device, and no memory. `recipes` are asked what operators give back, and learn it.

    Raises RuntimeError where the process has a process group already.
    """
    if accelerator:
        _register_accelerator()
    backend = f"cpu:fake,{ACCELERATOR}:fake" if accelerator else "fake"
    dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=world_size)
    before = torch._C._only_lift_cpu_tensors()
    try:
        with ExitStack() as stack:
            # Layouts of distributed tensors are worked out on fake tensors of a mode of their own, told apart so.
            stack.enter_context(mock.patch.object(_sharding_prop, "detect_fake_mode", return_value=None))
            stack.enter_context(mock.patch.object(DeviceMesh, "__init__", real(DeviceMesh.__init__)))
            stack.enter_context(mock.patch.object(device_mesh, "new_group", _own_group))
            stack.enter_context(mock.patch.object(Routed, "kept_counts", _even_kept))
            stack.enter_context(mock.patch.object(dispatch, "arrivals", _even_arrivals))
            stack.enter_context(mock.patch.object(_fsdp_param, "_chunk_with_empty", _Chunks))
            # Names for a profiler that nobody runs.
            stack.enter_context(mock.patch.object(record_function, "__enter__", _itself))
            stack.enter_context(mock.patch.object(record_function, "__exit__", _nothing))
            if accelerator:
                stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", _stream))
            torch._C._set_only_lift_cpu_tensors(True)
            # A device would have a thread of its own for backward, and there is nothing to overlap.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            yield stack.enter_context(DecidedMode(recipes))
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
        # Layouts that were worked out hold meshes, whose groups end here: another world's mesh may equal them.
        _clear_sharding_prop_cache()
        dist.destroy_process_group()


@contextmanager
def lonely_world(*, rank: int, world_size: int) -> Iterator[None]:
    """Inside, this process is `rank` of `world_size` with no peers; tensors are real and nothing arrives in them."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with mock.patch.object(torch.Tensor, "item", return_value=1):
            yield
    finally:
        dist.destroy_process_group()


def fake_mode() -> DecidedMode | None:
    """The mode under which new tensors are fake; None where they are real."""
    found = _get_dispatch_mode(_FAKE)
    assert found is None or isinstance(found, DecidedMode)
    return found


def flop_formula(func: Any) -> Any:
    """torch's own formula of the FLOPs of a product or an attention kernel, every score counted; None of anything
    else."""
    return flop_registry.get(getattr(func, "overloadpacket", func))
