"""What a cluster's name that is none was meant to be: the nearest name that is one, and how names are written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from meshwright.catalog.devices import find_device
from meshwright.catalog.named_devices import OWN_DEVICE, nearest_devices
from meshwright.catalog.names import suggest
from meshwright.spec.errors import Problem

FORMS = (
    "write COUNTxDEVICE (64xH100), NODESxPERxDEVICE (2x8xA100-80GB), parts joined by + (16xH100+32xA100), a preset or "
    "PRESET:DEVICES (selene:3072), local:4 or a file; see `meshwright clusters`"
)
_SIGN = r"[\sxX*×:\-]*"
_DEVICE_LAST = re.compile(rf"[xX*×]?\s*(\d+){_SIGN}(?:(\d+){_SIGN})?([A-Za-z].*)")
_DEVICE_FIRST = re.compile(rf"([A-Za-z].*?){_SIGN}(\d+)")
_COUNTED = re.compile(r"\s*(-?[\d.,_eE+]+?)\s*[xX*×]\s*([A-Za-z].*)")
_COUNTS_ALONE = re.compile(r"\d[\d\sxX*×]*")


def unknown_cluster(text: str, *, presets: Iterable[str]) -> Problem:
    """Why `text` names no cluster, with the nearest that it may mean."""
    problem = _of_form(text)
    if problem is not None:
        return problem
    known = ["local", *presets]
    what, found = f"no cluster is called {text!r}", nearest_form(text)
    if found:
        return Problem(where="cluster", what=what, fix=f"did you mean {found}? {FORMS}")
    if find_device(text) is not None:
        return Problem(where="cluster", what=what, why="that is a device", fix=f"say how many: 8x{text}")
    base, colon, size = text.partition(":")
    if colon and base in known:
        why = f"{size!r} is not a number of devices" if size else "no number is after the colon"
        return Problem(where="cluster", what=what, why=why, fix=f"write {base}, or {base}:8")
    near = suggest(base, known, see="")
    own = f"{FORMS}; a device of which there is no preset: {OWN_DEVICE}"
    return Problem(where="cluster", what=what, fix=own if near == "see " else f"{near} {own}")


def _of_form(text: str) -> Problem | None:
    """What is wrong with the form of `text`; None of what may be a name."""
    where = f"cluster {text[:40]}"
    if not text:
        return Problem(where="cluster", what="names nothing", fix=FORMS)
    if _COUNTS_ALONE.fullmatch(text):
        count = re.findall(r"\d+", text)[0]
        return Problem(where=where, what="is a count without a device", fix=f"name one: {count}xH100")
    counted = _COUNTED.fullmatch(text)
    if counted is None or re.fullmatch(r"\d{1,9}", counted[1]):
        return None
    name = counted[2] if find_device(counted[2]) else "H100"
    count = counted[1] if len(counted[1]) <= 20 else f"{counted[1][:20]}..."
    what, fix = f"{count} is not a number of devices", f"write a whole number from 1 to 999999999: 8x{name}"
    return Problem(where=where, what=what, fix=fix)


def empty_part(text: str) -> Problem:
    """Why `text`, with nothing on one side of a +, names no cluster."""
    parts = [part.strip() for part in text.split("+")]
    ends = [words for words, part in (("begins", parts[0]), ("ends", parts[-1])) if not part]
    what = f"{' and '.join(ends)} with +" if ends else "has nothing between one + and the next"
    whole = "+".join(part for part in parts if part)
    fix = f"write {whole}, or name another part: {whole}+8xA100" if whole else FORMS
    return Problem(where=f"cluster {text}", what=what, why="+ joins two parts", fix=fix)


def unknown_device(name: str, *, text: str) -> Problem:
    """Why the device `name` in `text` is none, with the nearest that it may mean."""
    where, what = f"cluster {text}", f"no device is called {name!r}"
    joined = [part.strip() for part in re.split(r"[,;&/]| and ", text)]
    if len(joined) > 1 and all(re.fullmatch(r"\d+\s*[xX*×].+", part) for part in joined):
        return Problem(where=where, what=what, why="parts are joined by +", fix=f"write {'+'.join(joined)}")
    if found := nearest_form(text):
        return Problem(where=where, what=what, fix=f"did you mean {found}?")
    if re.match(r"\d+\s*[xX*×]", name):
        return Problem(where=where, what="has three counts", why="nodes x devices of each are two", fix=FORMS)
    return Problem(where=where, what=what, fix=nearest_devices(name))


def nearest_form(text: str) -> str:
    """`8xH100` of x8H100, 8H100, H100x8 or H100:8; empty of what is nothing like it."""
    return next((form for form in _forms(text.strip()) if form != text), "")


def _forms(text: str) -> Iterator[str]:
    if (last := _DEVICE_LAST.fullmatch(text)) and find_device(last[3]) is not None:
        yield "x".join(part for part in last.groups() if part)
    if (first := _DEVICE_FIRST.fullmatch(text)) and find_device(first[1]) is not None:
        yield f"{first[2]}x{first[1]}"
