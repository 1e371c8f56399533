"""Which dims a function of torch works along, however it is called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NAMES = ("dim", "dims", "axis")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """Where a function is told its dims: the `place` among its arguments behind the tensor, or by a name.

    `absent` are those of a call that names none; None is all of them. `spread`: from the place on each argument may be
    one dim.
    """

    place: int
    absent: tuple[int, ...] | None = None
    spread: bool = False

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, ndim: int) -> tuple[int, ...]:
        """The dims of a call with `args` behind a tensor of `ndim` dims, counted from the first."""
        asked = next((kwargs[name] for name in _NAMES if name in kwargs), None)
        behind = args[self.place :]
        if asked is None and behind:
            asked = behind if self.spread and len(behind) > 1 else behind[0]
        if asked is None or isinstance(asked, bool):
            asked = self.absent
        dims = asked if asked is None or isinstance(asked, (tuple, list)) else (asked,)
        if not dims:
            return tuple(range(ndim))
        return tuple(dim + ndim if dim < 0 else dim for dim in dims)
