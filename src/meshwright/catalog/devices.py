"""Devices by name. Peaks are dense, without sparsity; `sources` of each says where its numbers are from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from meshwright.catalog.board_sheets import BOARDS
from meshwright.catalog.names import normal
from meshwright.catalog.nvidia_sheets import NVIDIA
from meshwright.catalog.other_sheets import OTHERS
from meshwright.catalog.prices import priced
from meshwright.spec.cluster import DeviceSpec

SHEETS = (*NVIDIA, *BOARDS, *OTHERS)


@cache
def devices() -> Mapping[str, DeviceSpec]:
    """Every device preset by its name."""
    return MappingProxyType({sheet.name: priced(sheet.device()) for sheet in SHEETS})


def find_device(name: str) -> DeviceSpec | None:
    """The device that `name` means, whatever its case and punctuation; None when there is none."""
    return _by_spelling().get(normal(name))


@cache
def _by_spelling() -> Mapping[str, DeviceSpec]:
    """Every device by the normal forms of its name and aliases; the first sheet that has a form keeps it."""
    found: dict[str, DeviceSpec] = {}
    for sheet in SHEETS:
        for form in map(normal, (sheet.name, *sheet.aliases)):
            found.setdefault(form, devices()[sheet.name])
    return MappingProxyType(found)
