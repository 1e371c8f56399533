"""List prices of devices by the hour, on demand, each with its source. Prices move: a cluster file says its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from meshwright.spec.cluster import DeviceSpec

_NEBIUS = "on demand in 8-device nodes at Nebius, as the SkyPilot catalog has it (v8, commit 0082b043)"
_LAMBDA = "on demand at Lambda, as the SkyPilot catalog has it (v8, commit 0f407038)"
_OLDER_LAMBDA = "on demand in 8-device nodes at Lambda, as the SkyPilot catalog has it (v7, commit 11580132)"
_MODAL = "Modal's list on 7 May 2026, as techbytes.app collected it"

PRICES: Mapping[str, tuple[float, str]] = MappingProxyType(
    {
        "B200": (5.50, _NEBIUS),
        "H200": (3.50, _NEBIUS),
        "H100": (2.95, _NEBIUS),
        "L40S": (1.8172, _NEBIUS.replace("8-device nodes", "1-device nodes")),
        "H100-PCIe": (3.29, _LAMBDA),
        "A100-80GB": (2.79, _LAMBDA),
        "A100-40GB": (1.99, _LAMBDA),
        "A100-40GB-PCIe": (1.99, _LAMBDA),
        "V100-16GB": (0.55, _OLDER_LAMBDA),
        "L4": (0.7992, _MODAL),
        "T4": (0.5904, _MODAL),
    }
)


def priced(device: DeviceSpec) -> DeviceSpec:
    """`device` with its list price; as it is where none is known, or it has one."""
    if device.price_per_hour is not None or device.name not in PRICES:
        return device
    dollars, source = PRICES[device.name]
    return replace(device, price_per_hour=dollars, sources={**device.sources, "price_per_hour": source})
