"""What a page of the docs names, and the files that it shows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def unnamed(kind: type, text: str) -> list[str]:
    """Fields of `kind` that `text` does not name."""
    named = set(re.findall(r"`([a-z_]+)`", text))
    return [field.name for field in fields(kind) if field.name not in named]


def shown(text: str) -> list[str]:
    """The TOML files in `text`."""
    return re.findall(r"^```toml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def shows(text: str, files: Iterable[Path]) -> bool:
    """What `text` shows is what is in `files`."""
    return sorted(shown(text)) == sorted(path.read_text() for path in files)
