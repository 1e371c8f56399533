"""Plans spoilt in one place: a number, a word or a member of a list is another than a legal draw has."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from random import Random
from typing import Any

from meshwright.search import Scope, check
from meshwright.spec import codec
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.exchange import ExchangeKind, TokenLayout
from meshwright.spec.plan import (
    AxisName,
    Design,
    Dispatch,
    Offload,
    Plan,
    Recompute,
    ScheduleKind,
    Sharding,
    TensorGrid,
    Training,
)
from tests.parallel import draws
from tests.parallel.drawn import FIXED

Path = tuple[str | int, ...]
WORDS: tuple[type[Enum], ...] = (
    *(AxisName, Dispatch, ExchangeKind, Offload, Precision, Recompute, ScheduleKind, Sharding),
    *(TensorGrid, TokenLayout, Training),
)


def spoilt(random: Random) -> tuple[str, Design | ConfigError]:
    """Where a legal draw was spoilt, and the design with that plan, or why the plan cannot be read."""
    draw = random.choice(FIXED)
    design = draws.build(draw)
    document = codec.encode(design.plan)
    path: Path = ()
    changed = document
    while changed == document:
        path = random.choice(list(_paths(document)))
        changed = _changed(document, path, random)
    told = f"{draw} at {'.'.join(map(str, path))}"
    try:
        plan = codec.decode(Plan, changed, "plan")
    except ConfigError as error:
        return told, error
    return f"{told}: {_at(changed, path)}", replace(design, plan=plan)


def refusals(design: Design) -> tuple[Problem, ...]:
    """What stands against a design, but for its memory."""
    return check(design, scopes=frozenset({Scope.PLAN, Scope.RUNTIME}))


def _paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Every number, word and list under `value`; names that the design is filed under are left alone."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("model", "cluster", "schema"):
                yield from _paths(inner, (*path, key))
        return
    yield path
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _paths(inner, (*path, index))


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key] if isinstance(value, dict) or key < len(value) else None
    return value


def _changed(document: Any, path: Path, random: Random) -> Any:
    """`document` with something else at `path`."""
    document = copy.deepcopy(document)
    holder = _at(document, path[:-1])
    holder[path[-1]] = _other(holder[path[-1]], random)
    return document


def _respelt(words: list[str], random: Random) -> str:
    """A row of a table with a word less, a word more, another word or two words the other way round."""
    place, other = random.randrange(len(words)), random.randrange(len(words))
    letter = random.choice("FBIW)*")
    changed = words[place].translate(dict.fromkeys(map(ord, "FBIW"), letter))
    swapped = list(words)
    swapped[place], swapped[other] = swapped[other], swapped[place]
    turns = ([*words[:place], *rest] for rest in (words[place + 1 :], [*words[place:], words[place]], [changed]))
    return " ".join(random.choice([*turns, swapped]))


def _other(value: Any, random: Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return random.choice([0, -1, value + 1, max(value - 1, 0), 2 * value, 3, 10**9])
    if isinstance(value, str) and " " in value:
        return _respelt(value.split(), random)
    if isinstance(value, str):
        words = next((list(kind) for kind in WORDS if value in set(kind)), [])
        return random.choice([word.value for word in words] or ["none", "every_other"])
    if isinstance(value, list) and value:
        turns = [value[1:], value[:-1], value + value[-1:], value[::-1], []]
        return random.choice(turns)
    return random.choice([[1, 0], [], {"expert": 2, "tensor": 1}, 7])
