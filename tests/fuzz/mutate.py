"""Broken input, made from whole input: values, texts and bytes with something wrong in them, the same for one seed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

HUGE = 1 << 63
_EVEN = 256  # of a range no larger than this, hypothesis draws all alike
NAMES = (
    "",
    "a",
    "kind",
    "schema",
    "__proto__",
    "auto_map",
    "trust_remote_code",
    "../../x",
    "/etc/passwd",
    "a.b.c",
    "\0",
)
WORDS = (
    *("", " ", "0", "-1", "1e400", "nan", "none", "null", "true", "4Mi", "-4GiB", "1e999GiB", "0x10", "1_000", "½"),
    *(
        "../../x",
        "/dev/zero",
        "\0",
        "\ud800",
        "é" * 40,
        "x" * 5000,
        "{}",
        "[]",
        "${HOME}",
        "~",
        "%s%n",
        "a=b,c@d",
        "$(id)",
    ),
    *(
        "builtins.eval",
        "train:99999999999999999999",
        "bytes",
        "1,2,3",
        "512+114",
        "\u202e",
        "9" * 400,
        "٣",
        "²",
        "llama",
    ),
)
NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 255, 256, 65536, 2**31 - 1, 2**31, 2**32, 2**53 + 1, HUGE - 1, HUGE, -HUGE, 10**18, 10**30),
    *(0.0, -0.0, 0.5, -0.5, 1e-320, 1e308, -1e308, math.nan, math.inf, -math.inf, 10**400),
)


def once_in(times: int, rng: Random) -> bool:
    """True once in so many times; what is made smaller comes to be False."""
    return rng.randrange(times) == times - 1


def somewhere(length: int, rng: Random) -> int:
    """A place in so many, each about as likely as any other: hypothesis draws small numbers of large ranges."""
    if length <= _EVEN:
        return rng.randrange(length)
    return min(length - 1, rng.randrange(-(-length // _EVEN)) * _EVEN + rng.randrange(_EVEN))


def odd(rng: Random) -> Any:
    """A value that is seldom what is expected."""
    kind = rng.randrange(8)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 5:
        return rng.choice(WORDS)
    if kind == 5:
        return rng.choice((None, True, False))
    if kind == 6:
        return rng.choice(
            ([], {}, [[]], [{}], {"": None}, [None, 1, "a"], {"kind": []}, {"kind": {}}, {"a": {"b": [1]}})
        )
    return deep(rng.choice((3, 70, 400)), rng)


def deep(levels: int, rng: Random) -> Any:
    value: Any = rng.choice((1, "x", None))
    wrap: Callable[[Any], Any] = rng.choice((lambda inner: [inner], lambda inner: {"a": inner}))
    for _ in range(levels):
        value = wrap(value)
    return value


def break_value(rng: Random, value: Any) -> Any:
    """A copy of JSON values in which up to three things are other than they were."""
    broken = copied(value)
    for _ in range(rng.choice((0, 1, 1, 1, 1, 1, 2, 3))):
        broken = _break_once(rng, broken)
    return broken


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


def _break_once(rng: Random, value: Any) -> Any:
    place = value
    for _ in range(rng.randrange(8)):
        if not isinstance(place, dict | list):
            return value
        inner = [
            item for item in (place.values() if isinstance(place, dict) else place) if isinstance(item, dict | list)
        ]
        if not inner or once_in(5, rng):
            break
        place = rng.choice(inner)
    if isinstance(place, dict):
        _break_table(rng, place)
    elif isinstance(place, list):
        _break_list(rng, place)
    return odd(rng) if once_in(100, rng) else value


def _break_table(rng: Random, table: dict[Any, Any]) -> None:
    act, keys = rng.randrange(10), list(table)
    if act == 0 or not keys:
        table[rng.choice(NAMES)] = odd(rng)
        return
    key = rng.choice(keys)
    if act == 1:
        del table[key]
    elif act == 2:
        table[key[:-1] if once_in(2, rng) else f"{key}s"] = table.pop(key)
    elif act == 3:
        table[key] = table[rng.choice(keys)]
    elif act == 4:
        table[key] = [table[key]] * rng.choice((0, 1, 2, 50))
    elif act == 5 and isinstance(table[key], int | float) and not isinstance(table[key], bool):
        table[key] = nudged(rng, table[key])
    else:
        table[key] = odd(rng)


def _break_list(rng: Random, items: list[Any]) -> None:
    act = rng.randrange(6)
    if act == 0 or not items:
        items.insert(rng.randrange(len(items) + 1), odd(rng))
        return
    at = rng.randrange(len(items))
    if act == 1:
        del items[at]
    elif act == 2:
        items.append(items[at])
    elif act == 3:
        rng.shuffle(items)
    elif act == 4 and isinstance(items[at], int | float) and not isinstance(items[at], bool):
        items[at] = nudged(rng, items[at])
    else:
        items[at] = odd(rng)


def nudged(rng: Random, number: float) -> Any:
    """A number near another one, or the other one in other clothes."""
    made: Sequence[Callable[[], Any]] = (
        lambda: number + 1,
        lambda: number - 1,
        lambda: -number,
        lambda: number * rng.choice((2, 3, 1000, 10**9)),
        lambda: number / 3,
        lambda: str(number),
        lambda: f"{number}Ki",
        lambda: float(number),
    )
    try:
        return rng.choice(made)()
    except OverflowError:
        return 0


def json_text(rng: Random, value: Any) -> str:
    """The value as JSON, sometimes with something wrong in the text itself."""
    text = json.dumps(value)
    return break_text(rng, text) if once_in(5, rng) else text


def break_text(rng: Random, text: str) -> str:
    """The text cut off, with a piece gone, twice or foreign in it, or with a line twice."""
    act, at = rng.randrange(8), somewhere(len(text) + 1, rng)
    stop = min(len(text), at + rng.choice((1, 2, 8, 60)))
    if act == 7:
        return text
    if act == 0:
        return text[:at]
    if act == 1:
        return text[:at] + text[stop:]
    if act == 2:
        return text[:stop] + text[at:]
    if act == 3:
        return text[:at] + rng.choice("\"{}[],:=\n\\#'\t\r") + text[at:]
    if act == 4:
        return text[:at] + rng.choice(WORDS) + text[stop:]
    if act == 5:
        lines = text.splitlines(keepends=True) or [""]
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
        return "".join(lines)
    return text[:at] + rng.choice(("[", "{", '{"a":', "[[")) * rng.choice((5, 300, 30_000)) + text[at:]


def break_lines(rng: Random, text: str) -> str:
    """A text of `key = value` lines in which some values, keys or lines are other than they were."""
    lines = text.splitlines()
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        at = rng.randrange(len(lines))
        key, equals, _ = lines[at].partition("=")
        act = rng.randrange(8)
        if act == 0:
            del lines[at]
        elif act == 1:
            lines.insert(at, rng.choice(lines))
        elif act == 2:
            lines[at] = f"{rng.choice(NAMES[:4])}{lines[at]}"
        elif act == 3:
            lines.insert(at, rng.choice(("[a]", "[[a]]", "[a.b.c]", "[model]", "a.b.c = 1", "= 1", "a =", '"" = 1')))
        elif equals:
            lines[at] = f"{key}= {toml_value(rng)}"
        if not lines:
            return ""
    broken = "\n".join(lines)
    return break_text(rng, broken) if once_in(7, rng) else broken


def toml_value(rng: Random) -> str:
    value = odd(rng)
    if isinstance(value, bool) or value is None:
        return rng.choice(
            ("true", "false", "null", "1979-05-27T07:32:00Z", "07:32:00", "inf", "-nan", "0o17", "'''x'''")
        )
    if isinstance(value, dict):
        return rng.choice(
            ("{}", '{kind = "adamw"}', "{kind = []}", "{a = {b = 1}}", "{" + ".".join("a" * 300) + " = 1}")
        )
    return json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf")


def break_bytes(rng: Random, content: bytes) -> bytes:
    """Bytes cut off, with bits turned, pieces gone or doubled, or numbers in them that claim the largest there is."""
    broken = bytearray(content)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 5))):
        if not broken:
            return rng.randbytes(rng.randrange(40))
        act, at = rng.randrange(7), somewhere(len(broken), rng)
        stop = min(len(broken), at + rng.choice((1, 4, 8, 64)))
        if act == 0:
            del broken[at:]
        elif act == 1:
            broken[at] ^= 1 << rng.randrange(8)
        elif act == 2:
            del broken[at:stop]
        elif act == 3:
            broken[at:at] = broken[at:stop]
        elif act == 4:
            width = rng.choice((4, 8))
            number = rng.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, HUGE - 1, HUGE, 2**64 - 1)) % (1 << 8 * width)
            broken[at : at + width] = number.to_bytes(width, "little")
        elif act == 5:
            broken[at:stop] = rng.randbytes(stop - at)
        else:
            broken += rng.randbytes(rng.randrange(1, 20))
    return bytes(broken)
