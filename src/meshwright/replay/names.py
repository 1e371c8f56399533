"""Devices by the names that sources write: with a maker, a board, a form factor and memory, or several with counts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshwright.catalog.devices import find_device
from meshwright.spec.cluster import DeviceSpec

_UNSAID = {
    *("nvidia", "amd", "google", "cloud", "tesla", "geforce", "instinct", "custom"),  # makers and their lines
    *("hgx", "dgx", "oam", "module", "gpu", "gpus", "chip", "chips", "node", "nodes"),  # boards and machines
}
_FORMS = ("pcie", "nvl")
_PLAIN_SIZES = ("16", "24", "32", "40", "48", "64", "80", "96", "141", "180", "192", "256", "288")
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
        return float(text) if (text := _words(self.name)[1]) else None


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


def known_device(name: str, *, memory_gb: float | None = None) -> DeviceSpec | None:
    """The device that begins `name`, in the form and with the memory said there or by `memory_gb`.

    Makers and boards before it, and what a source writes after it (a site, a power limit), are not read.
    """
    family, memory, form = _words(name)
    sizes = [f"{round(memory_gb)}GB"] if memory_gb else []
    sizes += [f"{memory}GB"] if memory else []
    ends = [(size, form) for size in sizes] + [(form,)] + [(size,) for size in sizes] + [()]
    for count in range(len(family), 0, -1):
        for end in ends if form else [(size,) for size in sizes] + [()]:
            found = find_device("-".join((*family[:count], *end)))
            if found is not None:
                return found
    return None


def _words(name: str) -> tuple[tuple[str, ...], str, str]:
    """The words of `name` that may name a device, its memory in GB and its form; blank where they are not said."""
    family: list[str] = []
    memory = form = ""
    for word in re.split(r"[\s(),;/_-]+", name.lower()):
        size = re.fullmatch(r"(\d+)\s*(?:gb?|gib)", word)
        if size or (family and not family[0].startswith("tpu") and word in _PLAIN_SIZES):
            memory = memory or (size[1] if size else word)
        elif word in _FORMS:
            form = form or word
        elif word and word not in _UNSAID and not re.fullmatch(r"sxm\d?", word):
            family.append(word)
    return tuple(family), memory, form
