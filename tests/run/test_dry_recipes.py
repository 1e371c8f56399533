"""What a recipe makes of other arguments is what torch makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from meshwright.run.dry.recipes import Recipes

aten = torch.ops.aten
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def row(begin: int) -> torch.Tensor:
    return torch.empty(64)[begin : begin + 12]


def parameter(begin: int) -> torch.Tensor:
    return torch.nn.Parameter(row(begin))


# What tells an operator's recipe, of arguments that differ in nothing but where they begin in their memory.
CASES: dict[str, tuple[Any, Callable[[int], Arguments]]] = {
    "a view": (aten.view.default, lambda begin: ((row(begin), [3, 4]), {})),
    "a slice": (aten.slice.Tensor, lambda begin: ((row(begin), 0, 2, 9), {})),
    "strides": (aten.as_strided.default, lambda begin: ((row(begin), [2, 2], [4, 1]), {})),
    "strides from a place": (aten.as_strided.default, lambda begin: ((row(3), [2, 2], [4, 1], begin), {})),
    "a named output": (aten.cat.out, lambda begin: (([row(begin), row(2)],), {"out": row(begin).new_empty(24)})),
    "a parameter that is drawn": (
        aten.normal_.default,
        lambda begin: ((parameter(begin),), {"generator": torch.Generator()}),
    ),
    "like one of device meta": (
        aten.empty_like.default,
        lambda begin: ((torch.empty(begin + 1, device="meta")[:1],), {"device": torch.device("cpu")}),
    ),
    "chosen entries": (aten.index.Tensor, lambda begin: ((row(begin), [torch.empty(5, dtype=torch.int64)]), {})),
    "a type": (aten.promote_types.default, lambda _begin: ((torch.float32, torch.bfloat16), {})),
}


def facts(value: Any) -> object:
    if not isinstance(value, FakeTensor):
        return value
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device


@pytest.mark.parametrize("name", CASES)
def test_it_is_known_the_second_time_and_the_same(name: str) -> None:
    func, made = CASES[name]
    recipes, mode = Recipes(), FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        for begin in (5, 9):
            args, options = made(begin)
            found = recipes.run(mode, func, args, options, lambda: func(*args, **options))  # noqa: B023  # called now
        known = recipes.known(mode, func, args, options)
        assert known is not None
        assert facts(found) == facts(func(*args, **options))
        assert facts(known.make(mode, args, options)) == facts(found)


def test_what_masks_choose_is_never_known() -> None:
    recipes, mode = Recipes(), FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        args = (row(0), [torch.empty(12, dtype=torch.bool)])
        recipes.run(mode, aten.index.Tensor, args, {}, lambda: torch.empty(3))
        assert recipes.known(mode, aten.index.Tensor, args, {}) is None
