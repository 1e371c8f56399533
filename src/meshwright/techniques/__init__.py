"""The registry of techniques: a module of this package or an entry point of `meshwright.techniques`, by name.

A technique's module has a function `build(design) -> Technique`. Nothing is imported before it is asked for by name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import TYPE_CHECKING

from meshwright.spec.codec import nearest
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.plan import Design

if TYPE_CHECKING:
    from meshwright.train.technique import Technique

GROUP = "meshwright.techniques"


def available() -> tuple[str, ...]:
    """Names of every technique that can be built here, sorted."""
    own = (module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    return tuple(sorted({*own, *(entry.name for entry in metadata.entry_points(group=GROUP))}))


def check(names: Iterable[str]) -> None:
    """Raises ConfigError with every name that is not known."""
    known = available()
    problems = [
        Problem(
            what=f"technique {name!r} is unknown",
            where=f"job.techniques[{index}]",
            fix=nearest(name, known) if known else "no technique is installed",
        )
        for index, name in enumerate(names)
        if name not in known
    ]
    if problems:
        raise ConfigError(problems)


def build(names: Iterable[str], *, design: Design) -> tuple[Technique, ...]:
    """The named techniques in order. Raises as `check` does."""
    names = tuple(names)
    if names:
        check(names)
    return tuple(_builder(name)(design) for name in names)


def _builder(name: str) -> Callable[[Design], Technique]:
    for entry in metadata.entry_points(group=GROUP):
        if entry.name == name:
            found: Callable[[Design], Technique] = entry.load()
            return found
    module = importlib.import_module(f"{__name__}.{name}")
    builder: Callable[[Design], Technique] = module.build
    return builder
