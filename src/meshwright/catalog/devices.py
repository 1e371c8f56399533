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
    key = normal(name)
    for sheet in SHEETS:
        if key in (normal(sheet.name), *map(normal, sheet.aliases)):
            return devices()[sheet.name]
    return None
