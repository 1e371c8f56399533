"""Which blocks of a user's module can be sharded alone: those whose parameters only their own calls read.

FSDP2 gathers the parameters of a block when the block is called, and in backward when a gradient comes to what the call
returned. A forward that reads them elsewhere would meet shards. It runs once without memory to find such blocks, which
are then sharded with what holds them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from meshwright.parallel.divided import Deciding
from meshwright.parallel.divided_functions import LOOKS, SIZES, function_name
from meshwright.parallel.torch_compat import plain, tree_map
from meshwright.parallel.trace import Example, backward_of, imagined, without_memory
from meshwright.spec.errors import ConfigError


def units_of(module: nn.Module, example: Example | None, *, blocks: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """Those of `blocks` that can be sharded alone, found from one forward of `example` and its backward.

    All of them where there is no `example`, or where the forward does not run without memory.
    """
    if example is None or not blocks:
        return tuple(blocks)
    names = dict(module.named_parameters())
    reads = _Reads(names, blocks)
    watched = {name: _watched(name, reads, without_memory(x)) for name, x in names.items()}
    try:
        with reads:
            imagined(module, example, watched, after=backward_of)
    except ConfigError:
        return tuple(blocks)
    return tuple(block for place, block in enumerate(blocks) if place not in reads.elsewhere)


class _Reads:
    """While entered, follows which of `blocks` run; `elsewhere` are the places of those read outside of their calls."""

    def __init__(self, names: Mapping[str, Tensor], blocks: Sequence[nn.Module]) -> None:
        self.elsewhere: set[int] = set()
        self._blocks, self._name = blocks, {id(x): name for name, x in names.items()}
        self._holder = {self._name[id(x)]: place for place, block in enumerate(blocks) for x in block.parameters()}
        self._running: list[int] = []
        self._in_backward: set[int] = set()
        self._handles = ExitStack()

    def __enter__(self) -> _Reads:
        for place, block in enumerate(self._blocks):
            own = {key: self._name[id(x)] for key, x in block.named_parameters(remove_duplicate=False)}
            before = block.register_forward_pre_hook(self._entering(place, own))
            after = block.register_forward_hook(self._leaving(place), always_call=True)
            self._handles.callback(before.remove)
            self._handles.callback(after.remove)
        return self

    def __exit__(self, *_failure: object) -> None:
        self._handles.close()

    def _entering(self, place: int, own: Mapping[str, str]) -> Any:
        def hook(block: nn.Module, _args: Any) -> None:
            self._running.append(place)
            lent = dict(block.named_parameters(remove_duplicate=False))
            if any(getattr(lent[key], "parameter", None) != name for key, name in own.items()):
                self.elsewhere.add(place)  # FSDP2 would put its own parameters back

        return hook

    def _leaving(self, place: int) -> Any:
        def hook(_block: nn.Module, _args: Any, output: Any) -> None:
            self._running.pop()
            _on_gradient(output, lambda: self._in_backward.add(place))

        return hook

    def read(self, name: str, result: Any) -> None:
        """A function took the parameter `name` and gave `result`."""
        place = self._holder.get(name)
        if place is None:
            return
        if place not in self._running and place not in self._in_backward:
            self.elsewhere.add(place)
        _on_backward(result, lambda: self._needed(place))

    def _needed(self, place: int) -> None:
        if place not in self._in_backward:
            self.elsewhere.add(place)


def _on_gradient(output: Any, call: Any) -> None:
    """`call` is called in backward when a gradient comes to a tensor of `output`."""

    def look(x: Any) -> Any:
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(lambda _gradient: call())
        return x

    tree_map(look, output)


def _on_backward(result: Any, call: Any) -> None:
    """`call` is called when backward comes to the function that gave `result`, after the hooks on what it gave: what
    gathers a block whose output it is comes first."""

    def look(x: Any) -> Any:
        if isinstance(x, Tensor) and x.grad_fn is not None:
            x.grad_fn.register_prehook(lambda _gradients: call())
        return x

    tree_map(look, result)


class _Watched(Deciding):
    """A parameter that tells `reads` what is worked out with it."""

    parameter: str
    reads: _Reads

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        found: list[_Watched] = []

        def bare(x: Any) -> Any:
            if not isinstance(x, _Watched):
                return x
            found.append(x)
            return plain(x)

        near, named = tree_map(bare, (tuple(args), dict(kwargs or {})))
        result = func(*near, **named)
        if function_name(func) not in LOOKS | SIZES:
            for x in found:
                x.reads.read(x.parameter, result)
        return result


def _watched(name: str, reads: _Reads, x: Tensor) -> _Watched:
    found = plain(x).as_subclass(_Watched)
    found.parameter, found.reads = name, reads
    return found
