"""Devices by the names that sources write: with a maker, a board, a form factor and memory, or several with counts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from meshwright.catalog.device_names import known_device, memory_said
from meshwright.spec.cluster import DeviceSpec

_BETWEEN = re.compile(r"\s*(?:[+&,;/]|\band\b)\s*(?![^(]*\))")
_LEADING = re.compile(r"(?:(\d+)\s*(?:nodes?\s*(?:of)?)?\s*[x×*]\s*)?(\d+)\s*(?:[x×*]\s*|\s)([A-Za-z].*)")
_TRAILING = re.compile(
    r"(.*?[A-Za-z].*?)\s*(?:(?<![AC-Z])[x×*:]\s*(\d+)|\(\s*(\d+)(?:\s*(?:GPUs?|devices?))?\s*\))", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A device as a source names it: `count` of them, `per_node` a node, and GB of memory, None where not said."""

    name: str
    count: int | None = None
    per_node: int | None = None

    @property
    def device(self) -> DeviceSpec | None:
        return known_device(self.name)

    @property
    def memory_gb(self) -> float | None:
        return float(text) if (text := memory_said(self.name)) else None


@lru_cache(maxsize=4096)
def named_devices(text: str) -> tuple[Named, ...]:
    """Every kind of device that `text` names: `A100-80GB`, `8xV100-32GB + 8xT4`, `2x8xA100, 16xV100`, `V100/T4`.

    One where it names no second one that is known, but what a plus joins are several whatever they are.
    """
    plain = re.sub(r"^(?:mixed|heterogeneous)\s*[:\s]\s*", "", text.strip(), flags=re.IGNORECASE)
    parts = [_counted(part) for part in _BETWEEN.split(plain) if part]
    several = [part for part in parts if part.device is not None or "+" in plain]
    return tuple(several) if len(several) > 1 else (_counted(plain),)


def _counted(text: str) -> Named:
    if found := _LEADING.fullmatch(text):
        per_node = int(found[2]) if found[1] else None
        return Named(name=found[3], count=int(found[1] or 1) * int(found[2]), per_node=per_node)
    found = _TRAILING.fullmatch(text)
    return Named(name=found[1], count=int(found[2] or found[3])) if found else Named(name=text)
