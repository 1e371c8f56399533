"""Functions with a backward that a user wrote (torch.autograd.Function): no rule sees what they do with gradients, so
they are given whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from meshwright.parallel.divided import Indivisible, origins_of
from meshwright.parallel.torch_compat import functions_given, tree_leaves, tree_map

_PASSES_ON = "torch.utils.checkpoint"  # what torch keeps of a block that is computed again goes to the block alone


def given_whole(whole: Callable[[str, Any], Any]) -> AbstractContextManager[None]:
    """While entered, functions with a backward of their own get `whole` of their name and each argument.

    Divided arguments raise Indivisible.
    """

    def given(kind: type, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if kind.__module__ == _PASSES_ON:
            return args
        origins = origins_of(tree_leaves(args))
        if origins:
            raise Indivisible(f"{kind.__name__} has a backward of its own", origins=origins)
        found: tuple[Any, ...] = tree_map(lambda x: whole(kind.__name__, x), args)
        return found

    return functions_given(given)
