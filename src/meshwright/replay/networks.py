"""What joins the machines of a published run, as its source writes it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from meshwright.catalog.node_links import BRIDGES, GB, NVLINK_V100, ethernet, network, omni_path, pcie
from meshwright.replay.rates import (
    REMOTE,
    SLOW,
    counts_adapters,
    generation,
    generation_gigabits,
    node_gigabits,
    says_rate,
    unread_numbers,
)
from meshwright.replay.runs import Run
from meshwright.spec.cluster import DeviceKind, Link, NodeGroup, Precision

_NVLINK = re.compile(r"nv-?link", re.IGNORECASE)
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
    kinds = (SLOW, REMOTE, _HOST_DRIVEN, _NAMED)
    return any(kind.search(text) for kind in kinds) or says_rate(text) or generation(text) is not None


def says_nvlink(text: str) -> bool:
    return _NVLINK.search(text) is not None


def unread(text: str) -> tuple[str, ...]:
    """Numbers in `text` that are no part of what is read there of the network or of several."""
    apart = islands(text)
    return tuple(number for part in (*apart.each, apart.between) for number in unread_numbers(part))


def joined(run: Run, group: NodeGroup, *, link: str, gigabits: float | None) -> NodeGroup:
    """`group` with the network that `link` and Gb/s of a node say; its preset's where they say nothing."""
    group = _inside(run, group)
    said = node_gigabits(link, devices=group.devices_per_node, adapters=group.nics)
    rate = gigabits or said or generation_gigabits(link, adapters=group.nics)
    kind = _kind(link, group)
    if not rate:
        return replace(group, nic=kind)
    made = replace(kind, bandwidth=rate / 8 * GB / group.nics)
    if _over_sockets(made) and not made.staged:
        made = replace(made, efficiency=ethernet(gigabits=rate, title=link).efficiency)
    return replace(group, nic=made)


def network_assumed(group: NodeGroup, *, link: str, gigabits: float | None) -> str:
    """What of the network of `group` its source left open, in words; nothing where it says all or one node is all."""
    if group.num_nodes == 1 or gigabits is not None or group.device.kind is DeviceKind.TPU:
        return ""
    said, each = node_gigabits(link, devices=group.devices_per_node, adapters=group.nics), generation(link)
    rate = group.nic.bandwidth * group.nics * 8 / GB
    if said is None and each is None:
        adapters = f"{group.nics} adapter{'s' * (group.nics > 1)}"
        return f"{adapters} of {rate / group.nics:.4g} Gb/s a node, for no network is told"
    if said is not None and said == each and not counts_adapters(link):
        return f"{rate:.4g} Gb/s are those of a node, not of every adapter"
    return ""


def _over_sockets(link: Link) -> bool:
    return "sockets" in link.sources.get("latency_seconds", "")


def _kind(link: str, group: NodeGroup) -> Link:
    """The adapters of `group`, without remote memory access where `link` says Ethernet, with it where it says so.

    Omni-Path is a kind of its own.
    """
    remote, now = bool(REMOTE.search(link)), group.nic
    if _HOST_DRIVEN.search(link):
        return omni_path(gigabits=now.bandwidth * 8 / GB, title=f"{link} (the source of the run)")
    if remote == (not _over_sockets(now)) or not (remote or SLOW.search(link)):
        return now
    made, gigabits = network if remote else ethernet, now.bandwidth * 8 / GB
    return made(gigabits=gigabits, title=f"{link} (the source of the run)")


def _inside(run: Run, group: NodeGroup) -> NodeGroup:
    """`group` with the link in its nodes where the source says PCI Express, a bridge, or a switch that it lacks."""
    text = run.text("intra_link").lower()
    if "pci" in text and "nvlink" not in text:
        number = re.search(r"(?:gen\s*|express\s*|pcie\s*)([345])(?![.\d]*\s*g)", text)
        return replace(group, inside=_lanes(run.text("intra_link"), int(number[1]) if number else _generation(group)))
    if says_nvlink(text) and _on_boards(group):
        bridge = BRIDGES.get(group.device.name)
        return group if bridge is None or _joined_by_more(run, group) else replace(group, inside=bridge)
    if group.inside.fits == NVLINK_V100.fits and (group.devices_per_node > 8 or "switch" in text):
        return replace(group, inside=_SWITCHED_V100)
    return group


def unbridged(run: Run, group: NodeGroup) -> str:
    """Why what `intra_link` says of boards joined by NVLink is not taken, in words; nothing where it is."""
    if not says_nvlink(run.text("intra_link")) or not _on_boards(group):
        return ""
    if group.device.name not in BRIDGES:
        return f"no bridge of NVLink joins {group.device.name}"
    return "a bridge joins two boards, and more are in a node" if _joined_by_more(run, group) else ""


def _on_boards(group: NodeGroup) -> bool:
    """Whether devices meet over PCI Express in the nodes of the catalog."""
    return "PCI Express" in group.inside.sources.get("bandwidth", "")


def _joined_by_more(run: Run, group: NodeGroup) -> bool:
    """Whether more than the two devices that a bridge joins are used in a node."""
    return min(group.devices_per_node, run.whole("n_gpus") or group.devices_per_node) > 2


def _lanes(text: str, generation: int) -> Link:
    """PCI Express of `generation`, as many lanes as are said; a rate below what they carry is what is reached."""
    link, lanes = pcie(generation=generation), re.search(r"(?<![\d.])(?:x\s*(1|2|4|8|16)|(1|2|4|8|16)\s*lanes)\b", text)
    share = int(lanes[1] or lanes[2]) / 16 if lanes else 1.0
    across = (link.across_sockets or link.bandwidth) * share
    link = replace(link, bandwidth=share * link.bandwidth, across_sockets=across)
    said = re.search(r"(\d+(?:\.\d+)?)\s*G(?:(b(?:it)?)|B(?:yte)?)/s", text)
    rate = float(said[1]) / (8 if said[2] else 1) * GB if said else link.bandwidth
    if rate >= link.bandwidth:
        return link
    return replace(link, bandwidth=rate, efficiency=1.0, across_sockets=across * rate / link.achieved)


def _generation(group: NodeGroup) -> int:
    """Of PCI Express: the third with devices before bf16, the fifth with those of eight bits, else the fourth."""
    peaks = group.device.peak_flops
    return 5 if Precision.FP8 in peaks else 4 if Precision.BF16 in peaks else 3


def between_sites(text: str, *, nodes: int) -> Link | None:
    """What joins a site of `nodes` nodes to the others, each with an adapter for it; None where no rate is said."""
    gigabits = node_gigabits(text, devices=1, adapters=1)
    if gigabits is None:
        return None
    made = network if REMOTE.search(text) else ethernet
    return made(gigabits=gigabits * nodes, title=f"{text} a node, {nodes} nodes (the source of the run)")


_SWITCHED_V100 = replace(
    NVLINK_V100,
    efficiency=0.74,
    peers=None,
    across_sockets=None,
    fits=(),
    sources={
        "bandwidth": "NVIDIA DGX-2 data sheet: six NVLinks a V100 through NVSwitch, 300 GB/s both ways",
        "efficiency": "by analogy with A100 behind NVSwitch; not measured",
        "latency_seconds": NVLINK_V100.sources["latency_seconds"],
    },
)
