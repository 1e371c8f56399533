"""What joins the machines of a published run, as its source writes it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from meshwright.catalog.node_links import GB, NVLINK_V100, ethernet, network, omni_path, pcie
from meshwright.replay.runs import Run
from meshwright.spec.cluster import Link, NodeGroup, Precision

_GENERATIONS = {
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
_RATE = re.compile(
    r"(?:(\d+)\s*[x×]\s*)?(\d+(?:\.\d+)?)\s*(T|G)(?:b(?:it)?(?:/s|ps|E)?|E)?(?![A-Za-z/])\s*(?:RoCE(?:v2)?|IB|InfiniBand)?"
    r"\s*(?:[x×]\s*(\d+)\b)?(\s*(?:per|/)\s*(?:GPU|device|chip))?",
)
_PLAIN_RATE = re.compile(r"(?:(\d+)\s*[x×]\s*|(?<![\w.]))(25|40|50|56|100|200|400|800|1600|3200)\b")
_COUNT = re.compile(r"\b(\d+)\s*[x×]")
_SLOW = re.compile(r"ethernet|tcp|gbe\b|socket", re.IGNORECASE)
_REMOTE = re.compile(r"infiniband|\bib\b|roce|rdma|slingshot|omni|\befa\b|rocev2", re.IGNORECASE)
_HOST_DRIVEN = re.compile(r"omni-?path|\bopa\b", re.IGNORECASE)
_PIECES = re.compile(r"(?=[;,+])")  # each with what sets it apart
_BETWEEN = re.compile(r"\bbetween\b", re.IGNORECASE)
_NAMED = re.compile(r"nv-?link|nvl\d|\bici\b|\bdcn\b|data cent|torus|pci|none|single node", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Islands:
    """The network of each part of a cluster, and in words what joins them where that is another one."""

    each: tuple[str, ...]
    between: str = ""


def islands(text: str) -> Islands:
    """`IB 200Gb/s + RoCE 200Gb/s, Ethernet 25Gb/s between` are two networks with a third one between them."""
    pieces = _PIECES.split(text)
    between = [piece for piece in pieces if _BETWEEN.search(piece)]
    rest = "".join(piece for piece in pieces if piece not in between)
    each = tuple(part.strip() for part in rest.split("+") if part.strip())
    joined = _BETWEEN.split(between[0])[0].strip(";,+").strip() if between else ""
    return Islands(each=each or ("",), between=joined)


def says_network(text: str) -> bool:
    """Whether a kind of network, a generation or a rate is read in `text`."""
    kinds = (_SLOW, _REMOTE, _HOST_DRIVEN, _NAMED, _RATE)
    return any(kind.search(text) for kind in kinds) or any(name in text.lower() for name in _GENERATIONS)


def node_gigabits(link: str, devices: int) -> float | None:
    """Gb/s of a node as `link` writes them: `8x200Gb/s`, `400Gb/s per GPU`, `EFA 400`, or one rate, the node's."""
    if "nvlink" in link.lower():
        return None
    found = _RATE.search(link)
    if found is None:
        plain = _PLAIN_RATE.search(link) if _REMOTE.search(link) or _SLOW.search(link) else None
        return float(plain[1] or 1.0) * float(plain[2]) if plain else None
    count = float(found[1] or found[4] or (devices if found[5] else 1))
    return count * float(found[2]) * (1000.0 if found[3] == "T" else 1.0)


def joined(run: Run, group: NodeGroup, *, link: str, gigabits: float | None) -> NodeGroup:
    """`group` with the network that `link` and Gb/s of a node say; its preset's where they say nothing."""
    group = _inside(run, group)
    rate = gigabits or node_gigabits(link, group.devices_per_node) or _by_generation(link, group)
    kind = _kind(link, group)
    if not rate:
        return replace(group, nic=kind)
    made = replace(kind, bandwidth=rate / 8 * GB / group.nics)
    if _over_sockets(made) and not made.staged:
        made = replace(made, efficiency=ethernet(gigabits=rate, title=link).efficiency)
    return replace(group, nic=made)


def _over_sockets(link: Link) -> bool:
    return "sockets" in link.sources.get("latency_seconds", "")


def _by_generation(link: str, group: NodeGroup) -> float | None:
    """As many adapters as `link` says, else as the preset has, of the generation that it names."""
    named = next((rate for name, rate in _GENERATIONS.items() if name in link.lower()), None)
    if named is None:
        return None
    said = _COUNT.search(link)
    if "hdr100" in link.lower().replace(" ", ""):
        named = 100.0
    return named * (float(said[1]) if said else group.nics)


def _kind(link: str, group: NodeGroup) -> Link:
    """The adapters of `group`, without remote memory access where `link` says Ethernet, with it where it says so.

    Omni-Path is a kind of its own.
    """
    remote, now = bool(_REMOTE.search(link)), group.nic
    if _HOST_DRIVEN.search(link):
        return omni_path(gigabits=now.bandwidth * 8 / GB, title=f"{link} (the source of the run)")
    if remote == (not _over_sockets(now)) or not (remote or _SLOW.search(link)):
        return now
    made, gigabits = network if remote else ethernet, now.bandwidth * 8 / GB
    return made(gigabits=gigabits, title=f"{link} (the source of the run)")


def _inside(run: Run, group: NodeGroup) -> NodeGroup:
    """`group` with the link in its nodes where the source says PCI Express, or a switch that its preset lacks."""
    text = run.text("intra_link").lower()
    if "pci" in text and "nvlink" not in text:
        number = re.search(r"(?:gen\s*|express\s*|pcie\s*)([345])", text)
        return replace(group, inside=_lanes(run.text("intra_link"), int(number[1]) if number else _generation(group)))
    if group.inside.fits == NVLINK_V100.fits and (group.devices_per_node > 8 or "switch" in text):
        return replace(group, inside=_SWITCHED_V100)
    return group


def _lanes(text: str, generation: int) -> Link:
    """PCI Express of `generation`; where the source says bits a second, and not lanes, that is what it reaches."""
    link, said = pcie(generation=generation), re.search(r"(\d+(?:\.\d+)?)\s*Gb(?:it)?/s", text)
    if said is None:
        return link
    rate = float(said[1]) / 8 * GB
    across = (link.across_sockets or rate) * rate / (link.bandwidth * link.efficiency)
    return replace(link, bandwidth=rate, efficiency=1.0, across_sockets=across)


def _generation(group: NodeGroup) -> int:
    """Of PCI Express: the third with devices before bf16, the fifth with those of eight bits, else the fourth."""
    peaks = group.device.peak_flops
    return 5 if Precision.FP8 in peaks else 4 if Precision.BF16 in peaks else 3


def between_sites(text: str, *, nodes: int) -> Link | None:
    """What joins a site of `nodes` nodes to the others, each with an adapter for it; None where no rate is said."""
    gigabits = node_gigabits(text, 1)
    if gigabits is None:
        return None
    made = network if _REMOTE.search(text) else ethernet
    return made(gigabits=gigabits * nodes, title=f"{text} a node, {nodes} nodes (the source of the run)")


_SWITCHED_V100 = replace(
    NVLINK_V100,
    efficiency=0.74,
    fits=(),
    sources={
        "bandwidth": "NVIDIA DGX-2 data sheet: six NVLinks a V100 through NVSwitch, 300 GB/s both ways",
        "efficiency": "by analogy with A100 behind NVSwitch; not measured",
        "latency_seconds": NVLINK_V100.sources["latency_seconds"],
    },
)
