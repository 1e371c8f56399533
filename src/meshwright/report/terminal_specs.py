"""Models and clusters on the terminal: names that are known, and one of them with the source of every number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rich.console import Group
from rich.table import Table
from rich.text import Text

from meshwright.catalog import Entry
from meshwright.report.terminal_parts import plain, table, title
from meshwright.spec import codec
from meshwright.spec.blocks import Attention, FeedForward, LatentAttention, Layer, Mixture, Recurrence
from meshwright.spec.cluster import ClusterSpec, Link, NodeGroup
from meshwright.spec.model import ModelSpec
from meshwright.spec.units import format_bytes, format_count, format_flops, format_seconds


def names(known: Iterable[Entry]) -> Table:
    """Names with their one-line descriptions."""
    rows = table(columns=[("name", "left"), ("what it is", "left")])
    for entry in known:
        rows.add_row(entry.name, entry.description)
    return rows


def model(spec: ModelSpec) -> Group:
    """A model: parameters total and active, and its layers by kind."""
    head = plain(spec.name, style="bold")
    active = "" if spec.active_parameters == spec.parameters else f", {format_count(spec.active_parameters)} active"
    embedding = spec.embedding.parameters
    head.append(
        f"\n{spec.parameters:,} parameters ({format_count(spec.parameters)}{active}), "
        f"{format_count(embedding)} of them in the embedding\n"
        f"width {spec.width:,}, {len(spec.layers)} layers, vocabulary {spec.vocab:,}, "
        f"up to {spec.max_positions:,} positions, {'tied' if spec.head.tied else 'untied'} head",
        style="not bold",
    )
    rows = table(columns=[("layers", "right"), ("mixer", "left"), ("feed-forward", "left"), ("parameters", "right")])
    for layer, count in spec.layer_kinds:
        thin = f" ({len(layer.ranks)} thin matrices)" if layer.ranks else ""
        rows.add_row(str(count), _mixer(layer), _transform(layer), f"{format_count(layer.parameters)}{thin}")
    towers = [plain(f"beside it: {tower.name}, {format_count(tower.parameters)} parameters") for tower in spec.towers]
    source = [plain(f"source: {spec.source}", style="dim")] if spec.source else []
    return Group(head, rows, *towers, *source)


def _mixer(layer: Layer) -> str:
    mixer = layer.mixer
    if isinstance(mixer, Attention):
        reach = f", window {mixer.window:,}" if mixer.window else f", chunks of {mixer.chunk:,}" if mixer.chunk else ""
        kind = f"{', gated' if mixer.gated else ''}{'' if mixer.causal else ', sees all'}"
        heads = f"{mixer.heads} heads of {mixer.head_dim}, {mixer.kv_heads} key-value"
        return f"attention {heads}{reach}{kind}{_prefix(mixer)}"
    if isinstance(mixer, LatentAttention):
        return f"latent attention {mixer.heads} heads, key-value rank {mixer.kv_rank}{_prefix(mixer)}"
    if isinstance(mixer, Recurrence):
        return f"recurrence {mixer.heads} heads, state {mixer.state}{', delta rule' if mixer.delta else ''}"
    return "none"


def _prefix(mixer: Attention | LatentAttention) -> str:
    return f", prompts both ways ({mixer.prefix:.0%} of a sequence)" if mixer.prefix else ""


def _transform(layer: Layer) -> str:
    part = layer.transform
    if isinstance(part, FeedForward):
        return f"{part.hidden:,}, {'gated ' if part.gated else ''}{part.activation.value}"
    if isinstance(part, Mixture):
        everywhere = [branch.hidden for branch in (part.shared, layer.dense) if branch]
        shared = f", {', '.join(f'{hidden:,}' for hidden in everywhere)} for all" if everywhere else ""
        return f"{part.top_k} of {part.experts} experts of {part.hidden:,}{shared}"
    return "none"


def cluster(spec: ClusterSpec) -> Group:
    """A cluster: its machines, links and prices, and where every number is from."""
    head = plain(spec.name, style="bold")
    head.append(
        f"\n{_counted(spec.num_devices, 'device')} in {_counted(len(spec.groups), 'group')} of machines",
        style="not bold",
    )
    if spec.price_per_hour is not None:
        head.append(f", ${spec.price_per_hour:,.2f} an hour", style="not bold")
    parts: list[Text | Table] = [head]
    shown: dict[str, str] = {}
    for group in spec.groups:
        parts += [title(f"{group.name}: {group.num_nodes:,} x {group.devices_per_node} {group.device.name}")]
        kind = _kind(group)
        parts += [plain(f"machines as in {shown[kind]}") if kind in shown else _machine(group)]
        shown.setdefault(kind, group.name)
    if spec.wide_area is not None:
        parts.append(plain(f"between sites {', '.join(spec.sites)}: {_link(spec.wide_area)}"))
    parts += [plain(f"from site {site} to others: {_link(link)}") for site, link in spec.uplinks.items()]
    if spec.source:
        parts.append(plain(f"source: {spec.source}", style="dim"))
    return Group(*parts)


def _kind(group: NodeGroup) -> str:
    """Equal for groups whose machines are alike, however many there are of them and wherever they stand."""
    return codec.canonical(replace(group, name="", num_nodes=1, site=""))


def _machine(group: NodeGroup) -> Table:
    device = group.device
    rows = table(columns=[("what", "left"), ("figure", "left"), ("source", "left")])
    for precision, peak in device.peak_flops.items():
        name = precision.value
        source = device.sources.get(f"peak_flops.{name}", device.sources.get("peak_flops", ""))
        rows.add_row(f"peak {name}", f"{format_flops(peak)}/s", source)
    rows.add_row("memory", format_bytes(device.memory_bytes), device.sources.get("memory_bytes", ""))
    bandwidth = _rate(device.memory_bandwidth)
    rows.add_row("memory bandwidth", bandwidth, device.sources.get("memory_bandwidth", ""))
    rows.add_row("link inside a node", _link(group.inside), _source(group.inside))
    each = "" if group.nics == 1 else ", each"
    rows.add_row(f"{_counted(group.nics, 'adapter')} a node{each}", _link(group.nic), _source(group.nic))
    if group.rack is not None:
        rows.add_row(f"link of {group.rack_nodes} nodes", _link(group.rack), _source(group.rack))
    if device.price_per_hour is not None:
        rows.add_row("price", f"${device.price_per_hour:.2f} an hour", device.sources.get("price_per_hour", ""))
    shown = {"memory_bytes", "memory_bandwidth", "price_per_hour"}
    for name, source in device.sources.items():
        if name not in shown and not name.startswith("peak_flops"):
            rows.add_row(name.replace("_", " "), _value(name, getattr(device, name, "")), source)
    return rows


def _value(name: str, value: object) -> str:
    """A figure of a device by its name, in the unit that the name says."""
    if isinstance(value, float) and name.endswith("_seconds"):
        return format_seconds(value)
    if isinstance(value, float) and name.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, float) and name.endswith("bandwidth"):
        return _rate(value)
    return f"{value:g}" if isinstance(value, float) else str(value) if isinstance(value, (int, str)) else "see --json"


def _link(link: Link) -> str:
    fits = f", {_counted(len(link.fits), 'measured collective')}" if link.fits else ""
    return f"{_rate(link.bandwidth)}, {format_seconds(link.latency_seconds)}{fits}"


def _rate(bytes_per_second: float) -> str:
    """`450 GB/s`: decimal, as data sheets write it."""
    return f"{format_count(bytes_per_second).replace(' B', ' G')}B/s"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _source(link: Link) -> str:
    """Where the bandwidth is from, and the latency where that is from elsewhere."""
    rate = link.sources.get("bandwidth", next(iter(link.sources.values()), ""))
    late = link.sources.get("latency_seconds", rate)
    return rate if late == rate else f"{rate}; latency: {late}"
