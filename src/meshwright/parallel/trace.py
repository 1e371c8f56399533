"""One forward of a module on tensors without memory, and where in the module it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.hooks import RemovableHandle

from meshwright.parallel.divided import Deciding, Divided, Indivisible, origins_of, parts_among
from meshwright.parallel.torch_compat import plain, tree_map
from meshwright.spec.errors import ConfigError, Problem

Example = tuple[Any, ...] | Mapping[str, Any]

_SEEN = 3  # how many of what depends on data a trace pretends to find
_VIEWS = {"view", "reshape", "to", "long", "int", "contiguous", "unsqueeze", "squeeze", "flatten", "__getitem__"}
_READS = {
    "item": 0,
    "__int__": 0,
    "__index__": 0,
    "__float__": 0.0,
    **dict.fromkeys(("__bool__", "__contains__", "equal", "allclose", "is_nonzero"), False),
}
_LISTS = ("tolist", "numpy", "__array__")


class Given(Tensor):
    """What the module is given, as it is or viewed: tokens, and not what is computed of them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (Deciding, Divided)) for kind in types):
            return NotImplemented
        near, named = tree_map(lambda x: plain(x) if isinstance(x, Given) else x, (tuple(args), dict(kwargs or {})))
        result = func(*near, **named)
        if isinstance(args[0], Given) and getattr(func, "__name__", "") in _VIEWS and isinstance(result, Tensor):
            return result.as_subclass(Given)
        return result


class _Pretending(TorchFunctionMode):
    """Tensors of no memory where a forward makes or meets others, and few where their number depends on data."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.device.type == "meta":
            if name in _READS or name in _LISTS:
                return _read(name, (*args, *kwargs.values()))
            if name in ("cpu", "cuda"):
                return first
            if name in ("nonzero", "argwhere") or (name == "where" and len(args) == 1):
                found = _places(first.ndim)
                as_tuple = name == "where" or kwargs.get("as_tuple", False)
                return tuple(found) if as_tuple else torch.stack(found, dim=-1)
            if name == "__getitem__":
                args = (first, _numbered(args[1]))
        args, kwargs = tree_map(_without_memory, (args, kwargs))
        return func(*args, **kwargs)


def _read(name: str, given: tuple[Any, ...]) -> Any:
    """Numbers that a forward reads off a tensor, all of them zero; a rank has not all of what is divided."""
    if parts_among(given):
        raise Indivisible(f"{name} reads numbers of divided features", origins=origins_of(given))
    if name in _READS:
        return _READS[name]
    zeros = torch.zeros(given[0].shape, dtype=given[0].dtype, device="cpu")
    return zeros.tolist() if name == "tolist" else zeros.numpy()


def _places(dims: int) -> list[Tensor]:
    """Where something is found: as many indexes of each dim."""
    return [torch.empty(_SEEN, dtype=torch.int64, device="meta") for _ in range(dims)]


def _numbered(key: Any) -> Any:
    """Masks as the places that they pick, and one place as the first."""
    keys = key if isinstance(key, tuple) else (key,)
    found: list[Any] = []
    for entry in keys:
        if isinstance(entry, Tensor) and entry.dtype is torch.bool and entry.ndim:
            found += _places(entry.ndim)
        else:
            found.append(0 if isinstance(entry, Tensor) and entry.ndim == 0 else entry)
    return tuple(found) if isinstance(key, tuple) or len(found) > 1 else found[0]


def _without_memory(x: Any) -> Any:
    if isinstance(x, Tensor) and x.device.type != "meta" and x.ndim and not isinstance(x, nn.Parameter):
        return x.to("meta")
    return x


class Stood:
    """While entered, `place` is the path of the module whose forward is at work, and after a failure where it was."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self.place = module, ""
        self._path: list[str] = []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Stood:
        self._path, self.place = [], ""
        for name, module in self._module.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._entering(name)))
            self._handles.append(module.register_forward_hook(self._leaving))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.place = self._path[-1] if self._path else ""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _entering(self, name: str) -> Any:
        def hook(_module: nn.Module, _args: Any) -> None:
            self._path.append(name)

        return hook

    def _leaving(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._path.pop()


@contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """What a forward leaves in `module`, a mask for example that is made once, is gone afterwards."""
    before = [(owner, dict(vars(owner)), dict(owner._buffers)) for owner in module.modules()]
    try:
        yield
    finally:
        for owner, attributes, buffers in before:
            for name in vars(owner).keys() - attributes.keys():
                delattr(owner, name)
            vars(owner).update(attributes)
            owner._buffers.clear()
            owner._buffers.update(buffers)


class _Followed(nn.Module):
    """A module whose parameters stay as they are given until `after` is done with what it returns: blocks that its
    forward checkpoints are computed again in backward."""

    def __init__(self, module: nn.Module, after: Callable[[Any], None]) -> None:
        super().__init__()
        self.module, self.after = module, after

    def forward(self, *args: Any, **kwargs: Any) -> None:
        self.after(self.module(*args, **kwargs))


def imagined(
    module: nn.Module, example: Example, parameters: Mapping[str, Tensor], *, after: Callable[[Any], None]
) -> None:
    """`after` is called with what `module` returns of `example` with `parameters`, all on the meta device; the module
    is as it was.

    Raises ConfigError, with where in the module, for a forward that does not run so.
    """
    held: dict[str, Tensor] = {name: without_memory(x) for name, x in parameters.items()}
    held.update({name: x.detach().to("meta") for name, x in module.named_buffers()})
    held = {f"module.{name}": x for name, x in _in_every_place(module, held).items()}
    args, kwargs = ((), dict(example)) if isinstance(example, Mapping) else (tuple(example), {})
    args, kwargs = tree_map(_given, (args, kwargs))
    stood = Stood(module)
    try:
        with _kept(module), stood, torch.device("meta"), _Pretending(), set_checkpoint_early_stop(False):
            functional_call(_Followed(module, after), held, args, kwargs, tie_weights=False)
    except Indivisible:
        raise
    except Exception as error:  # whatever a user's forward raises is told with its place
        where = f"{stood.place or type(module).__name__}.forward"
        what = f"does not run on tensors without memory: {type(error).__name__}: {error}"
        fix = "pass an example that it takes, or use tensor 1"
        raise ConfigError(Problem(what=what.splitlines()[0], where=where, fix=fix)) from error


def _in_every_place(module: nn.Module, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`held` under every name that a tensor of `module` has; modules that it holds several times come once, so that
    each place is filled and emptied once."""
    mine = {id(x): name for name, x in (*module.named_parameters(), *module.named_buffers())}
    found = {}
    for path, owner in module.named_modules():
        entries = (owner.named_parameters, owner.named_buffers)
        own = [entry for named in entries for entry in named(recurse=False, remove_duplicate=False)]
        found.update({f"{path}.{key}" if path else key: held[mine[id(x)]] for key, x in own})
    return found


def backward_of(output: Any) -> None:
    """Gradients of ones flow back from every tensor of `output`."""
    results: list[Tensor] = []

    def look(x: Any) -> Any:
        if isinstance(x, Tensor) and x.requires_grad:
            results.append(x)
        return x

    tree_map(look, output)
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])


def without_memory(x: Tensor) -> Tensor:
    """x on the meta device; one that has rules of its own is as it is."""
    return x if type(x) not in (Tensor, nn.Parameter) else x.detach().to("meta").requires_grad_(x.requires_grad)


def _given(x: Any) -> Any:
    return x.detach().to("meta").as_subclass(Given) if isinstance(x, Tensor) else x
