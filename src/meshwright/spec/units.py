"""Numbers with units: read what a person writes (`80GiB`, `4Mi`, `450GB/s`, `15us`), write what a person reads."""

from __future__ import annotations

import math
import re
from enum import Enum

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_TIME = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BASES = ("FLOP/s", "FLOPS", "FLOP", "B/s", "bit/s", "b/s", "B", "tokens", "")
_MEANINGS = {"s": "seconds", "B": "bytes", "B/s": "bytes a second", "bit/s": "bits a second", "b/s": "bits a second"}


class NotRead(ValueError):
    """A text that is no number of what is expected: `what` is wrong with it, and `fix`, which may be empty, what to
    write. Its words are both."""

    def __init__(self, what: str, fix: str = "") -> None:
        self.what, self.fix = what, fix
        super().__init__(f"{what}; {fix}" if fix else what)


class Measure(Enum):
    """What a number with a unit may measure, in words."""

    SECONDS = "a time"
    BYTES = "a number of bytes"
    RATE = "bytes a second"
    FLOPS = "FLOP/s"
    PLAIN = "a plain number"


_UNITS = {
    Measure.SECONDS: ("s",),
    Measure.BYTES: ("B",),
    Measure.RATE: ("B/s", "bit/s", "b/s"),
    Measure.FLOPS: ("FLOP/s", "FLOPS"),
    Measure.PLAIN: (),
}
_EXAMPLES = {
    Measure.SECONDS: "for example 15us, 2ms or 1.5",
    Measure.BYTES: "for example 80GiB or 512MB",
    Measure.RATE: "for example 450GB/s or 400Gbit/s",
    Measure.FLOPS: "for example 989TFLOP/s",
    Measure.PLAIN: "it without a unit, as 0.5 or 40000",
}
_LONGEST = 100  # characters of a text that a message repeats
# What is written of one measure where the other is wanted is most often meant to be it.
_ADDED = {("B", Measure.RATE): "/s", ("FLOP", Measure.FLOPS): "/s"}
_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d_,]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*?)\s*$")


def parse_count(text: str) -> float:
    """What is counted (tokens, steps, devices): `4Mi`, `300G`, `4Mi tokens`.

    Raises NotRead, with the number as it should be written, for seconds, bytes and FLOPs.
    """
    number, unit = _read(text)
    if unit not in ("", "tokens"):
        what = "billions are written G, as in 15G" if unit == "B" else "a count has no unit"
        raise NotRead(f"{_quoted(text)} is in {_MEANINGS.get(unit, unit)} and a count is expected: {what}")
    return number


def parse_seconds(text: str) -> float:
    """A time: `15us`, `3h`, or a plain number of seconds. Raises NotRead for other units."""
    return parse_measure(text, Measure.SECONDS)


def parse_measure(text: str, measure: Measure) -> float:
    """The number that `text` says in base units: bytes, bytes/s, FLOP/s, seconds or what is plain.

    Bits a second become bytes a second, and a number without a unit is in base units. Raises NotRead, with what to
    write, for a unit of another measure: bytes where bytes a second are expected.
    """
    number, unit = _read(text)
    if unit in ("", *_UNITS[measure]):
        return number
    written = text.strip()
    is_rate = unit == "B/s" and measure is Measure.BYTES
    added = _ADDED.get((unit, measure), "")
    fix = written.removesuffix("/s") if is_rate else f"{written}{added}" if added else _EXAMPLES[measure]
    raise NotRead(f"{_quoted(text)} is not {measure.value}", f"write {fix}")


def as_written(text: str) -> float | str:
    """The floating-point number that `text` says; the text itself where that is larger than a computer has, so that
    whoever reads it can tell what was written."""
    number = float(text)
    return text if math.isinf(number) and "inf" not in text.lower() else number


def _read(text: str) -> tuple[float, str]:
    """The number in base units, and the unit without its prefix: `s` for every time."""
    number, unit = _in_base_units(text)
    if math.isinf(number):
        raise NotRead(f"{_quoted(text)} is too large for any computer")
    return number, unit


def _quoted(text: str) -> str:
    """The text in quotes, or how it begins."""
    text = text.strip()
    return repr(text) if len(text) <= _LONGEST else f"{text[:_LONGEST]!r}..."


def _in_base_units(text: str) -> tuple[float, str]:
    match = _NUMBER.match(text)
    if not match:
        raise NotRead(f"{_quoted(text)} is not a number")
    number, unit = float(match[1].replace(",", "").replace("_", "")), match[2]
    if unit in _TIME:
        return number * _TIME[unit], "s"
    for base in _BASES:
        if not unit.endswith(base):
            continue
        prefix = unit[: len(unit) - len(base)].rstrip() if base else unit
        scale = _BINARY.get(prefix) or (_DECIMAL.get(prefix) if prefix != "B" or not base else None)
        if scale is not None:
            return number * scale / (8.0 if base in ("bit/s", "b/s") else 1.0), base
    raise NotRead(f"{_quoted(unit)} is not a unit", "write for example 80GiB, 4Mi, 450GB/s, 400Gbit/s or 15us")


def format_bytes(count: float) -> str:
    """`3.25 GiB`: binary units, three figures."""
    return _scaled(count, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_rate(bytes_per_second: float) -> str:
    """`100 Mbit/s`: bits a second, as links are sold, three figures."""
    return _scaled(8.0 * bytes_per_second, 1000.0, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def format_count(count: float) -> str:
    """`8.03 B`: decimal units for counts of parameters or tokens, three figures."""
    return _scaled(count, 1000.0, ("", "K", "M", "B", "T", "Q")).rstrip()


def counted(count: int, noun: str) -> str:
    """`1 device`, `2,048 devices`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_tokens(count: int) -> str:
    """`2,048`, `4Mi`, `300G`: the shortest that parse_count reads back as the same number."""
    scales = {**_BINARY, **{name: scale for name, scale in _DECIMAL.items() if name not in ("", "B", "K")}}
    short = [f"{count // int(scale)}{name}" for name, scale in scales.items() if count and count % int(scale) == 0]
    return min([f"{count:,}", *(short if count >= 10**5 else [])], key=len)


def format_flops(count: float) -> str:
    """`312 TFLOP`: decimal units."""
    return _scaled(count, 1000.0, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP", "YFLOP"))


_LEAST_SECONDS = 5e-9  # less than that is shown as nothing
# A unit of a time, by the seconds from which the next one is read better, as figures are rounded.
_SHOWN_BELOW = {"us": 0.9995e-3, "ms": 0.9995, "s": 119.5, "min": 7199.5, "h": 172770.0, "d": math.inf}
_PARTS = {"min": "s", "h": "min", "d": "h"}


def format_seconds(seconds: float) -> str:
    """`1.24 ms`, `3 min 20 s`, `2 d 4 h`: what a person would say, rounded."""
    if not math.isfinite(seconds):
        return "never"
    if seconds < 0:
        return f"-{format_seconds(-seconds)}" if seconds <= -_LEAST_SECONDS else format_seconds(0.0)
    return _in_unit(seconds, _unit_of(seconds))


def format_interval(low: float, high: float) -> str:
    """`1 min 23 s to 3 min 15 s`: two times, the shorter first, in the units of the longer; in those of the shorter
    where that is less than one of them."""
    if not (0.0 <= low <= high < math.inf):
        return f"{format_seconds(low)} to {format_seconds(high)}"
    unit = _unit_of(high)
    if 0.0 < low < _TIME[unit]:
        unit = _unit_of(low)
    return f"{_in_unit(low, unit)} to {_in_unit(high, unit)}"


def _unit_of(seconds: float) -> str:
    return next(unit for unit, limit in _SHOWN_BELOW.items() if seconds < limit)


def _in_unit(seconds: float, unit: str) -> str:
    part = _PARTS.get(unit)
    if part is None:
        return f"{_three(seconds / _TIME[unit])} {unit}"
    whole, rest = divmod(math.floor(seconds / _TIME[part] + 0.5), round(_TIME[unit] / _TIME[part]))
    return f"{whole:,} {unit} {rest} {part}"


LEAST_SHARE = 0.0005  # a share of less is shown as 0.0 %


def format_percent(fraction: float, *, digits: int = 1) -> str:
    """`42.0 %`, with so many digits behind the point; what rounds to nothing has no sign."""
    told = f"{100.0 * fraction:.{digits}f}"
    return f"{told.removeprefix('-') if float(told) == 0.0 else told} %"


def format_times(ratio: float) -> str:
    """`8.84 times`: three figures."""
    return f"{_three(ratio)} times"


MANIFOLD = 2.0  # what is more by a larger share than that is told in times it


def format_change(change: float, *, noun: str = "", than: str = "") -> str:
    """`12.0 % less time than this` or, of what is much more, `8.84 times the time of this`: a change as a share."""
    if change > MANIFOLD:
        words = f"{format_times(1.0 + change)} the {noun}" if noun else format_times(1.0 + change)
        return f"{words} of {than}" if than else words
    words = f"{format_percent(abs(change))} {'more' if change > 0 else 'less'}"
    return " ".join([words, *([noun] if noun else []), *([f"than {than}"] if than else [])])


def _scaled(count: float, base: float, names: tuple[str, ...]) -> str:
    if not math.isfinite(count):
        return "unknown"
    sign, count, index = ("-" if count < 0 else ""), abs(count), 0
    while count >= 0.9995 * base and index + 1 < len(names):
        count, index = count / base, index + 1
    whole = f"{count:,.0f}" if count == int(count) else _three(count)
    return f"{sign}{whole} {names[index]}"


def _three(number: float) -> str:
    if number >= 99.95 or number == 0:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"
