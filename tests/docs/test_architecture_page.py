"""Names and signatures that docs/architecture.md gives are those of the code."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import meshwright

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "docs" / "architecture.md").read_text()
ROOMS = "|".join(sorted(path.parent.name for path in Path(meshwright.__file__).parent.glob("*/__init__.py")))
NAME = re.compile(rf"(?<![\w./])((?:{ROOMS})(?:\.[A-Za-z_]\w*)+)(?:\(((?:[^()]|\([^()]*\))*)\))?")
NAMED = list(dict.fromkeys((found[1], found[2]) for found in NAME.finditer(TEXT)))
SIGNED = [(name, given) for name, given in NAMED if given is not None and "..." not in given]


def meant(name: str) -> Any:
    """What `name` is, from inside meshwright: what a room offers comes before a module of that name."""
    room, *rest = name.split(".")
    found: Any = importlib.import_module(f"meshwright.{room}")
    for part in rest:
        if not hasattr(found, part):
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    return found


def parameters(given: str) -> list[str]:
    """Names of parameters in a signature as the page writes it, without what stands behind them."""
    words = re.split(r",(?![^\[(]*[\])])", given)
    names = [re.split(r"[:=]", word)[0].strip().lstrip("*") for word in words]
    return [name for name in names if name]


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in NAMED))
def test_what_the_page_names_is_there(name: str) -> None:
    assert meant(name) is not None


@pytest.mark.parametrize(("name", "given"), SIGNED, ids=[name for name, _ in SIGNED])
def test_what_the_page_calls_is_called_so(name: str, given: str) -> None:
    found = inspect.signature(meant(name)).parameters
    named = parameters(given)
    assert set(named) <= set(found)
    needed = [key for key, entry in found.items() if entry.default is inspect.Parameter.empty and key != "self"]
    assert set(needed) <= set(named)
