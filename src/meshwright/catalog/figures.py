"""Figures that no model, machine, job or plan has: what is not a number, has no end, or is below nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.codec import encode
from meshwright.spec.errors import Problem

_ABOVE_ZERO = frozenset(
    {
        "num_nodes",
        "devices_per_node",
        "nics",
        "cores",
        "rack_nodes",
        "units",
        "sizes",
        "step",
        "scaling",
        "together",
        "memory_bytes",
        "memory_bandwidth",
        "optimizer_bandwidth",
        "host_bandwidth",
        "storage_bandwidth",
        "bandwidth",
        "bytes_per_second",
        "oversubscription",
        "peers",
        "torus",
        "wraps",
        "across_sockets",
        "forward_flops",
        "backward_flops",
        "hours_between_failures",
        "fraction",
        "attention_fraction",
        "attention_backward_fraction",
    }
)
_MOST, _MOST_SECONDS = 1e21, 1e5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """What a bare number is read as, the unit it was meant in below a thousand and above, and what machines have."""

    read_as: str
    meant: tuple[str, str]
    least: float = 0.0
    most: float = math.inf


_BYTES = _Unit(read_as="bytes", meant=("GiB", "MiB"), least=2.0**20)
_A_SECOND = _Unit(read_as="bytes a second", meant=("GB/s", "MB/s"), least=1e4)
_DELAY = _Unit(read_as="seconds", meant=("us", "ns"), most=1.0)
_UNITS: Mapping[str, _Unit] = MappingProxyType(
    {
        **dict.fromkeys(("memory_bytes", "host_bytes"), _BYTES),
        **dict.fromkeys(
            (
                *("bandwidth", "across_sockets", "memory_bandwidth", "optimizer_bandwidth"),
                *("host_bandwidth", "storage_bandwidth"),
            ),
            _A_SECOND,
        ),
        **dict.fromkeys(("latency_seconds", "launch_seconds"), _DELAY),
        "peak_flops": _Unit(read_as="FLOP/s", meant=("TFLOP/s", "GFLOP/s"), least=1e6),
    }
)
_MOST_OF: Mapping[str, float] = MappingProxyType(
    {"cores": 1e5, "nics": 1e4, "peers": 1e4, "torus": 6, "wraps": 1e6, "step_error": 7.0, "spread": 1.0}
)
_SHARES = frozenset({"efficiency", "misaligned", "sums", "usable_fraction", "memory_fraction"})


def is_finite(number: float) -> bool:
    """Whether arithmetic has a number for it: one of a thousand digits is as good as infinite."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def brief(number: float) -> str:
    """`number`, 1 or more, in three digits, however many it has."""
    return f"{number:.3g}" if is_finite(number) else f"1e+{int(math.log10(number))}" if number < math.inf else "inf"


def figure_problems(value: Any, where: str) -> Iterator[Problem]:
    """Every number in `value`, a specification, that is not finite or is below 0, by its path under `where`."""
    for path, number in numbers(value, where):
        if not is_finite(number):
            yield Problem(what=f"{str(number)[:40]} is not a finite number", where=path)
        elif number < 0:
            yield Problem(what=f"{number} is below 0", where=path)


def machine_problems(cluster: ClusterSpec) -> Iterator[Problem]:
    """As figure_problems; and what is divided by is above 0, shares from above 0 to 1."""
    for path, number in numbers(cluster):
        names = re.sub(r"\[\d+\]", "", path).split(".")
        divides = names[-1] in _ABOVE_ZERO or "peak_flops" in names
        if not is_finite(number):
            yield Problem(what=f"{str(number)[:40]} is not a finite number", where=path)
        elif number > (_MOST_SECONDS if names[-1].endswith("_seconds") else _MOST_OF.get(names[-1], _MOST)):
            yield Problem(what=f"{number:.3g} is more than any machine has", where=path)
        elif names[-1] in _SHARES and not 0 < number <= 1:
            yield Problem(what=f"{number} is not a share above 0 and up to 1", where=path)
        elif number < 0 or (number == 0 and divides):
            yield Problem(what=f"{number} is {'not positive' if divides else 'below 0'}", where=path)
        else:
            yield from _implausible(number, names, path)
    for index, group in enumerate(cluster.groups):
        tiles = group.device.tiles
        for name, entries in (("scaling", group.device.scaling), ("tiles.sizes", tiles.sizes if tiles else (1,))):
            if not entries:
                where = f"groups[{index}].device.{name}"
                yield Problem(what="is empty", where=where, fix="give at least one, or leave it out")


def _implausible(number: float, names: Sequence[str], path: str) -> Iterator[Problem]:
    """A number that only a forgotten unit explains: 50 bytes/s of a link, 5 seconds of latency."""
    unit = _UNITS.get("peak_flops" if "peak_flops" in names else names[-1])
    if unit is None or number == 0 or unit.least <= number < unit.most:
        return
    side = "less" if number < unit.least else "more"
    what = f"{number:,g} {unit.read_as} is {side} than any machine has"
    why = f"a number without a unit is {unit.read_as}"
    yield Problem(what=what, where=path, why=why, fix=f"write {number:g}{unit.meant[number >= 1000]}")


def numbers(value: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a specification, with its path under `where`."""
    return _numbers(encode(value), where)


def _numbers(document: Any, where: str) -> Iterator[tuple[str, float]]:
    if isinstance(document, Mapping):
        for name, value in document.items():
            yield from _numbers(value, f"{where}.{name}" if where else str(name))
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield from _numbers(value, f"{where}[{index}]")
    elif isinstance(document, (int, float)) and not isinstance(document, bool):
        yield where, document
