"""Clusters in one word: a preset, `64xH100`, `2x8xA100-80GB`, `8xH100+8xA100`, `selene:3072`, `local:4`, or a file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType

from meshwright.catalog import documents
from meshwright.catalog.calibrations import calibration_path
from meshwright.catalog.cluster_presets import PRESETS, ClusterPreset
from meshwright.catalog.cluster_words import empty_part, unknown_cluster, unknown_device
from meshwright.catalog.decoders.load import Entry
from meshwright.catalog.devices import find_device
from meshwright.catalog.figures import machine_problems
from meshwright.catalog.local import local_cluster, with_devices
from meshwright.catalog.machine import this_machine
from meshwright.catalog.named_devices import spelt_out
from meshwright.catalog.names import normal
from meshwright.catalog.nodes import nodes
from meshwright.catalog.racks import in_segments
from meshwright.spec.cluster import MOST_DEVICES, ClusterSpec, NodeGroup
from meshwright.spec.codec import nearest
from meshwright.spec.errors import ConfigError, Problem

_COUNT = r"([0-9]{1,3}(?:_[0-9]{3}){0,2}|[0-9]{1,9})"
_PRODUCT = re.compile(rf"(?:{_COUNT}\s*[xX*×]\s*)?{_COUNT}\s*[xX*×]\s*([A-Za-z0-9].*)")
_SIZED = re.compile(rf"(.+):{_COUNT}")
_INSIDE = MappingProxyType(
    {
        "torus": "a torus",
        "wraps": "rings of a torus",
        "peers": "links to every other device",
        "across_sockets": "the halves of a node",
        "sums": "a switch that adds",
    }
)


def load_cluster(name: str, *, cache: Path | None = None) -> ClusterSpec:
    """The cluster that `name` says: a preset, shorthand for devices, `local` or a TOML or JSON file.

    `local` is this machine, with one worker a core or as many as `local:4` says; when the cache folder `cache` holds
    a calibration of it, that is what comes back, and its `source` says so. Raises ConfigError.
    """
    found = _named(str(name).strip(), cache=cache)
    if problems := _too_many(found):
        raise ConfigError(problems)
    return found


def _named(text: str, *, cache: Path | None) -> ClusterSpec:
    if "+" in text and not os.path.exists(text) and any(map(_PRODUCT.fullmatch, map(str.strip, text.split("+")))):
        return _mixed(text, cache=cache)
    if Path(text).suffix.lower() in (".toml", ".json"):
        return _file(text)
    if "+" in text and not os.path.exists(text):
        return _mixed(text, cache=cache)
    base, devices = _split(text)
    if text.endswith(":"):
        raise ConfigError(unknown_cluster(text, presets=[preset.name for preset in PRESETS]))
    if normal(base) == "local":
        return _local(devices, cache=cache)
    preset = by_name().get(normal(base))
    if preset is not None:
        return preset.build() if devices is None else _resized(preset, devices)
    if product := _PRODUCT.fullmatch(text):
        return _devices(text, product)
    if os.path.exists(text):
        return _file(text)
    raise ConfigError(unknown_cluster(text, presets=[preset.name for preset in PRESETS]))


def clusters() -> tuple[Entry, ...]:
    """Every preset with what it is; `local` first."""
    local = Entry(name="local", description="this machine: one worker process a core, or as many as local:N says")
    return (local, *(Entry(name=preset.name, description=preset.description) for preset in PRESETS))


@cache
def by_name() -> Mapping[str, ClusterPreset]:
    """Presets by the normal form of their names and aliases."""
    return MappingProxyType({normal(name): preset for preset in PRESETS for name in (preset.name, *preset.aliases)})


def checked(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster itself. Raises ConfigError with every number in it that no machine has."""
    problems = [] if cluster.groups else [Problem(what="a cluster needs at least one group", where="groups")]
    problems += [*machine_problems(cluster), *_too_many(cluster)]
    for index, group in enumerate(cluster.groups):
        place = f"groups[{index}]"
        if not group.device.peak_flops:
            problems.append(Problem(what="no precision has a peak", where=f"{place}.device.peak_flops"))
        if group.rack_nodes is not None and group.rack is None:
            fix = "say what joins the nodes of a rack: rack.bandwidth and rack.latency_seconds; or leave it out"
            problems.append(Problem(what="nothing joins a rack of nodes", where=f"{place}.rack_nodes", fix=fix))
        if group.inside.peers is not None and group.inside.peers >= _board(group) > 1:
            what = f"{group.inside.peers} peers in a node of {group.devices_per_node} devices"
            problems.append(Problem(what=what, where=f"{place}.inside.peers"))
        missing = [entry.value for entry in group.device.peak_flops if entry not in group.device.matrix]
        if missing:
            what = f"no curve for {', '.join(missing)}"
            problems.append(Problem(what=what, where=f"{place}.device.matrix", why="peak_flops has it"))
    alone = [site for site in cluster.sites if cluster.uplink(site) is None]
    if len(cluster.sites) > 1 and alone:
        what = f"nothing joins site {alone[0]}" if cluster.uplinks else "sites are apart and no wide_area joins them"
        problems.append(Problem(what=what, where="groups", fix="give a wide_area, or an uplink of each site"))
    for site in cluster.uplinks:
        if site not in cluster.sites:
            fix = nearest(site, cluster.sites)
            problems.append(Problem(what=f"there is no site {site}", where=f"uplinks.{site}", fix=fix))
    problems += [*_wide_problems(cluster)]
    if problems:
        raise ConfigError(problems)
    return cluster


def _too_many(cluster: ClusterSpec) -> list[Problem]:
    if cluster.num_devices <= MOST_DEVICES:
        return []
    what = f"{cluster.num_devices:,} devices are more than anyone has"
    return [Problem(what=what, where="cluster", fix=f"at most {MOST_DEVICES:,}")]


def _board(group: NodeGroup) -> int:
    """Devices of the board that a node is, or is a part of."""
    usual = nodes().get(group.device.name)
    return max(group.devices_per_node, usual.devices if usual else 1)


def _wide_problems(cluster: ClusterSpec) -> Iterator[Problem]:
    """What is said of links between sites and is of those inside one alone."""
    index = {group.site: place for place, group in reversed([*enumerate(cluster.groups)])}
    named = {} if cluster.wide_area is None else {"wide_area": (cluster.wide_area, 0)}
    named |= {f"uplinks.{site}": (link, index.get(site, 0)) for site, link in cluster.uplinks.items()}
    for where, (link, group) in named.items():
        for field, words in _INSIDE.items():
            if getattr(link, field) is not None:
                what, fix = f"sites are not joined by {words}", f"leave it out, or say it of groups[{group}].inside"
                yield Problem(what=what, where=f"{where}.{field}", fix=fix)


def _file(path: str | Path) -> ClusterSpec:
    document = documents.read(path)
    values = documents.located(lambda: spelt_out(document.values), document)
    return documents.decode(ClusterSpec, replace(document, values=values), section="cluster", check=checked)


def _mixed(text: str, *, cache: Path | None) -> ClusterSpec:
    """The groups of every part on one network, each with its own adapters, in the order in which they are written."""
    where, names = f"cluster {text}", [part.strip() for part in text.split("+")]
    problems, groups, sources = [], [], []
    if not all(names):
        raise ConfigError(empty_part(text))
    for name in names:
        try:
            part = load_cluster(name, cache=cache)
        except ConfigError as error:
            problems += [replace(problem, where=where, what=_of_part(problem, name)) for problem in error.problems]
            continue
        if normal(_split(name)[0]) == "local" or len(part.sites) > 1:
            fix = "write devices, as in 16xH100+32xA100, or a cluster file (docs/cluster.md)"
            problems.append(Problem(what=f"{name!r} cannot be one part of a cluster", where=where, fix=fix))
        groups += list(part.groups)
        sources += [f"{name}: {part.source}"] if part.source else []
    if problems:
        raise ConfigError(problems)
    numbered = (replace(group, name=f"{group.name} {index}") for index, group in enumerate(groups, 1))
    source = f"parts on one network, each through its own adapters; {'. '.join(dict.fromkeys(sources))}"
    return ClusterSpec(name="+".join(names), groups=tuple(numbered), source=source)


def _of_part(problem: Problem, name: str) -> str:
    """What is wrong, with the place in the file where the part `name` is one."""
    return f"{problem.where}: {problem.what}" if problem.where.startswith(name) else problem.what


def _split(text: str) -> tuple[str, int | None]:
    match = _SIZED.fullmatch(text)
    return (match[1], int(match[2])) if match else (text, None)


def _local(devices: int | None, *, cache: Path | None) -> ClusterSpec:
    machine = this_machine()
    count = machine.cores if devices is None else devices
    if count < 1:
        raise ConfigError(Problem(what="local:0 has no worker", where="cluster", fix="ask for at least one"))
    path = calibration_path(cache, machine.fingerprint) if cache is not None else None
    if path is not None and path.is_file():
        return with_devices(_file(path), devices=count)
    return local_cluster(
        cores=machine.cores, memory_bytes=machine.memory_bytes, devices=count, bf16_speed=machine.bf16_speed
    )


def _devices(text: str, product: re.Match[str]) -> ClusterSpec:
    device = find_device(product[3])
    if device is None:
        raise ConfigError(unknown_device(product[3], text=text))
    node, count = nodes()[device.name], int(product[2])
    if product[1] is not None:
        num_nodes, per_node = int(product[1]), count
    else:
        num_nodes, per_node = _whole_nodes(text, count, node.devices)
    if num_nodes < 1 or per_node < 1:
        fix = f"ask for at least one: 8x{device.name}"
        raise ConfigError(Problem(what=f"{text!r} has no device", where="cluster", fix=fix))
    full = node.group(device, nodes=num_nodes, per_node=per_node, whole=product[1] is not None)
    group = in_segments(full)
    source = f"{num_nodes} usual nodes of {per_node} {device.name}; numbers and their sources are the preset's"
    if group != full:
        source += f"; {group.rack_nodes} of the {full.rack_nodes} nodes of every rack, as batch systems give them out"
    return ClusterSpec(name=f"{num_nodes * per_node}x{device.name}", groups=(group,), source=source)


def _whole_nodes(text: str, count: int, per_node: int) -> tuple[int, int]:
    if count <= per_node:
        return 1, count
    if count % per_node:
        down, up = count - count % per_node, count + per_node - count % per_node
        why = f"nodes of this device hold {per_node}"
        even = next(nodes for nodes in range(up // per_node, count + 1) if count % nodes == 0)
        fix = f"ask for {down} or {up}, or say nodes x devices ({even}x{count // even}x...)"
        raise ConfigError(Problem(what=f"{count} devices do not fill nodes", where=f"cluster {text}", why=why, fix=fix))
    return count // per_node, per_node


def _resized(preset: ClusterPreset, devices: int) -> ClusterSpec:
    cluster = preset.build()
    if not preset.resizable:
        why = "its groups differ"
        raise ConfigError(
            Problem(what=f"{preset.name} has one size", where="cluster", why=why, fix=f"write {preset.name}")
        )
    group = cluster.groups[0]
    where = f"{preset.name}:{devices}"
    if devices < 1:
        raise ConfigError(Problem(what=f"{where} has no device", where="cluster", fix="ask for at least one"))
    num_nodes, per_node = _whole_nodes(where, devices, group.devices_per_node)
    nics = max(1, group.nics * per_node // group.devices_per_node)
    sized = replace(group, num_nodes=num_nodes, devices_per_node=per_node, nics=nics)
    return replace(cluster, name=where, groups=(sized,))
