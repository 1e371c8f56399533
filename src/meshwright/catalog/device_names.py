"""Devices by what others call them: with a maker, a board, a form factor and memory, as sources and drivers do."""

from __future__ import annotations

import re
from functools import lru_cache

from meshwright.catalog.devices import find_device
from meshwright.spec.cluster import DeviceSpec

_UNSAID = {
    *("nvidia", "amd", "google", "cloud", "tesla", "geforce", "instinct", "custom"),  # makers and their lines
    *("hgx", "dgx", "oam", "module", "gpu", "gpus", "chip", "chips", "node", "nodes"),  # boards and machines
}
_FORMS = ("pcie", "nvl")
_PLAIN_SIZES = ("16", "24", "32", "40", "48", "64", "80", "96", "141", "180", "192", "256", "288")


@lru_cache(maxsize=4096)
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


def memory_said(name: str) -> str:
    """GB of memory that `name` says; blank where it says none."""
    return _words(name)[1]
