"""Rates of networks as sources write them: `8x200Gb/s`, `4 x 25 GB/s`, `400Gb/s per GPU`, `10 Gigabit Ethernet`."""

from __future__ import annotations

import re

REMOTE = re.compile(r"infiniband|\bib\b|roce|rdma|slingshot|omni|\befa\b", re.IGNORECASE)
SLOW = re.compile(r"ethernet|tcp|gbe\b|gig-?e\b|gbase|socket|\bgigabit\b(?!/s)", re.IGNORECASE)
GENERATIONS = {
    "sdr": 10.0,
    "ddr": 20.0,
    "qdr": 40.0,
    "fdr": 56.0,
    "edr": 100.0,
    "hdr": 200.0,
    "ndr": 400.0,
    "xdr": 800.0,
    "slingshot": 200.0,
    "omni-path": 100.0,
    "omnipath": 100.0,
}
_SCALES = {"M": 1e-3, "G": 1.0, "T": 1e3}  # in Gb/s
_COUNTS = {"single": 1, "one": 1, "two": 2, "dual": 2, "four": 4, "quad": 4, "six": 6, "eight": 8, "sixteen": 16}
_COUNT_WORD = "|".join(_COUNTS)
_ADAPTER = r"(?:NIC|HCA|adapter|port|rail|link|card|interface)s?"
_KIND = (  # words that may stand between a count, a rate and what it is of
    r"(?:(?:ConnectX|CX|BlueField)-?\d\w*|Mellanox|NVIDIA|Broadcom|Intel|AWS|Cassini|InfiniBand|IB"
    r"|RoCE(?:[ -]?v2)?|RDMA|Ethernet|EFA(?:[ -]?v\d)?|Slingshot(?:[ -]?1[01])?|Omni-?Path|[SDQFEHNX]DR)"
)
_FILLER = rf"(?:(?:(?:{_KIND}|{_ADAPTER}|of|at|with)\b|[@,(:])[\s-]*)*"
_COUNT = (
    rf"(?<![\w.-])(?:(?P<times>\d+)\s*[x×*]\s*{_FILLER}"
    rf"|(?<!slingshot )(?P<count>\d+)[\s-]+(?={_KIND}|{_ADAPTER}){_FILLER}"
    rf"|(?P<word>{_COUNT_WORD})[\s-]+{_FILLER})"
)
_UNIT = (
    r"(?-i:(?P<bytes>(?P<large>[MGT])(?:B|[Bb]ytes?)(?:/s(?:ec)?|ps))"
    r"|(?:(?P<scale>[GTgt])(?:b(?:it)?s?|(?i:iga(?:bits?|b)|era(?:bits?|b)|ig))?(?:/s(?:ec)?|ps|[Ee])?(?:BASE-\w+)?|GBE"
    r"|(?P<small>[Mm])(?:b(?:it)?s?|(?i:egabits?))(?:/s(?:ec)?|ps)))(?![A-Za-z])"
)
_EACH = (
    rf"(?:(?:(?:one|1)\s+)?(?:per|/)\s*(?:(?P<device>GPU|GCD|device|chip|accelerator)|(?P<adapter>{_ADAPTER})"
    r"|node|server|host|machine)\b|(?P<each>each\b))"
)
_AFTER = rf"\s*{_FILLER}(?:[x×*]\s*(?P<after>\d+)\b\s*)?{_FILLER}{_EACH}?"
_RATE = re.compile(rf"(?:{_COUNT})?(?<!\d)(?<!\d[.,])(?P<number>\d+(?:\.\d+)?)[\s-]*{_UNIT}{_AFTER}", re.IGNORECASE)
_PLAIN = re.compile(
    rf"(?:{_COUNT}|(?<![\w.]))(?P<number>25|40|50|56|100|200|400|800|1600|3200)\b(?!\s*(?:nodes?|GPUs?|slices?)\b){_AFTER}",
    re.IGNORECASE,
)
_ONE_GIGABIT = re.compile(r"\bgigabit\b|\bgig-?e\b|\bgbe\b", re.IGNORECASE)
_TIMES = re.compile(r"\b(\d+)\s*[x×*]")
_ADAPTERS = re.compile(
    rf"(?<![\w.-])(?:(\d+)|({_COUNT_WORD}))(?:\s*[x×*]\s*|[\s-]+)(?:{_KIND}\s+)*{_ADAPTER}\b"
    r"(?!\s*(?:per|/)\s*(?:GPU|GCD|device|chip|accelerator))",
    re.IGNORECASE,
)
_NAMES = re.compile(  # numbers that say no rate
    r"slingshot[ -]?1[01]|(?<!\d)\d+\s*slices?(?:\s+of\s+\d+)?|nv-?link[ -]?\d(?!\d)|\d:\d|(?<![a-z])[a-z]+-\d\w*"
    r"|\d-?d\b|\bpci\w*[ -]?\S*|gen ?\d",
    re.IGNORECASE,
)
_OF_NODES = re.compile(r"(?:per|/|a)\s*(?:node|server|host|machine)\b", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\w.])\d+(?:[.,]\d+)*")


def says_rate(text: str) -> bool:
    return _RATE.search(text) is not None


def node_gigabits(text: str, *, devices: int, adapters: int) -> float | None:
    """Gb/s of a node of `devices` and `adapters` as `text` writes them; None where it says no rate.

    One rate is the node's; `per GPU` is every device's, `per NIC` or `each` of as many adapters as are said, else all.
    """
    found = _rate(text)
    if found is None:
        alone = "nvlink" not in text.lower() and not REMOTE.search(text) and not generation(text)
        return 1.0 if alone and _ONE_GIGABIT.search(text) else None
    said, rate = found.groupdict(), _gigabits(found)
    times = int(said["times"] or said["after"] or 0)
    if said["device"]:
        return rate * devices * (times if times and times != devices else 1)
    count = times or int(said["count"] or 0) or (_COUNTS[said["word"].lower()] if said["word"] else 0)
    if not count and (said["adapter"] or said["each"]):
        count = adapters_said(text) or adapters
    return rate * (count or 1)


def generation_gigabits(text: str, *, adapters: int) -> float | None:
    """As many adapters as `text` says, else `adapters`, of the generation that it names; None where it names none."""
    rate, said = generation(text), _TIMES.search(text)
    return None if rate is None else rate * (int(said[1]) if said else adapters_said(text) or adapters)


def generation(text: str) -> float | None:
    """Gb/s of an adapter of the generation that `text` names, or of part of one as in `HDR100`."""
    if part := re.search(r"\b[ehnx]dr\s?([1248]00)\b", text, re.IGNORECASE):
        return float(part[1])
    return next((rate for name, rate in GENERATIONS.items() if name in text.lower()), None)


def counts_adapters(text: str) -> bool:
    """Whether `text` tells of how many adapters, devices or nodes its rate is."""
    found = _rate(text)
    said = found.groupdict() if found is not None else {}
    told = ("times", "after", "count", "word", "device", "adapter", "each")
    return any(said.get(name) for name in told) or adapters_said(text) is not None or _OF_NODES.search(text) is not None


def adapters_said(text: str) -> int | None:
    """Adapters of a node: `8 NICs`, `dual-rail`, `4 links/node`."""
    found = _ADAPTERS.search(text)
    return None if found is None else int(found[1] or _COUNTS[found[2].lower()])


def unread_numbers(text: str) -> tuple[str, ...]:
    """Numbers of `text` that are no part of the rate that is read in it, of a count of adapters, or of a name."""
    found, left = _rate(text), text
    if found is not None:
        left = f"{text[: found.start()]} {text[found.end() :]}"
    if found is None or found["adapter"] or found["each"]:
        counts = found is not None or generation(text) is not None
        left = _ADAPTERS.sub(" ", _TIMES.sub(" ", left)) if counts else left
    return tuple(_NUMBER.findall(_NAMES.sub(" ", left)))


def _rate(text: str) -> re.Match[str] | None:
    """The first rate with a unit, or where a network is named one without; none where the link is inside nodes."""
    if "nvlink" in text.lower():
        return None
    return _RATE.search(text) or (_PLAIN.search(text) if REMOTE.search(text) or SLOW.search(text) else None)


def _gigabits(found: re.Match[str]) -> float:
    said = found.groupdict()
    scale = said.get("large") or said.get("scale") or said.get("small") or "G"
    return float(said["number"]) * _SCALES[scale.upper()] * (8.0 if said.get("bytes") else 1.0)
