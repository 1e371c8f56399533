"""Cluster files in short: a device by its name in the catalog, and the rest of its usual node where it is not said; or
one that the catalog does not have, as a device that it has is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.catalog.devices import SHEETS, find_device
from meshwright.catalog.names import suggest
from meshwright.catalog.nodes import nodes
from meshwright.spec.cluster import DeviceSpec
from meshwright.spec.codec import encode
from meshwright.spec.errors import ConfigError, Problem

_MARK, _FILE = "device", "the cluster file"
_LIKE = "like"
# What is of one device alone: its name, what it costs and draws, how many units it has, rates that were measured on it.
_ITS_OWN = ("name", "price_per_hour", "watts", "tiles", "attention_rates", "optimizer_bandwidth", "sources")
OWN_DEVICE = (
    'describe it in a cluster file (like = "A100-80GB", and what differs), as docs/cluster.md does under A device of '
    "your own"
)


def spelt_out(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values of a cluster file with every `device = "H100"` replaced by what the catalog says of it.

    Such a group takes what it does not say (links, adapters, the host's memory, its name, one node) from the device's
    usual node; a table that it says in part, as `nic.bandwidth`, is filled up. A device that is a table with `like`
    takes what it does not say from that device of the catalog. Raises ConfigError with every name that is not known.
    """
    groups = values.get("groups")
    if not isinstance(groups, list):
        return values
    problems: list[Problem] = []
    found = [_spelt_out(group, f"groups[{index}]", problems) for index, group in enumerate(groups)]
    if problems:
        raise ConfigError(problems)
    return {**values, "groups": found}


def _spelt_out(group: Any, where: str, problems: list[Problem]) -> Any:
    name = group.get(_MARK) if isinstance(group, Mapping) else None
    if isinstance(name, Mapping) and _LIKE in name:
        return {**group, _MARK: _as_another(name, f"{where}.{_MARK}.{_LIKE}", problems)}
    if not isinstance(name, str):
        return group
    device = _known(name, f"{where}.{_MARK}", problems)
    if device is None:
        return group
    count = group.get("devices_per_node")
    per_node = count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None
    usual = encode(nodes()[device.name].group(device, nodes=1, per_node=per_node))
    return _over(usual, {key: value for key, value in group.items() if key != _MARK})


def _known(name: str, where: str, problems: list[Problem]) -> DeviceSpec | None:
    device = find_device(name)
    if device is None:
        problems.append(Problem(what=f"no device is called {name!r}", where=where, fix=nearest_devices(name)))
    return device


def nearest_devices(name: str) -> str:
    """The devices of the catalog that `name` may mean, or all of them, and how one that it does not have is told."""
    known = [spelt for sheet in SHEETS for spelt in (sheet.name, *sheet.aliases)]
    near = suggest(name, known, see=", ".join(sheet.name for sheet in SHEETS))
    return f"{near} {OWN_DEVICE}" if near.endswith("?") else f"{OWN_DEVICE}, or {near}"


def _as_another(said: Mapping[str, Any], where: str, problems: list[Problem]) -> Mapping[str, Any]:
    """What is `said` of a device, and of the rest what the catalog says of the one it is like: shares of peaks and of
    bandwidth, sizes at which they are reached, times of the host."""
    if not isinstance(said[_LIKE], str):
        what, fix = f"expected the name of a device, got {said[_LIKE]!r}", 'write like = "A100-80GB", or another'
        problems.append(Problem(what=what, where=where, fix=fix))
        return said
    device = _known(said[_LIKE], where, problems)
    if device is None:
        return said
    usual = {key: value for key, value in encode(device).items() if key not in _ITS_OWN}
    peaks = said.get("peak_flops")
    if isinstance(peaks, Mapping) and "matrix" not in said:
        usual["matrix"] = {name: curve for name, curve in usual["matrix"].items() if name in peaks}
    own = {key: value for key, value in said.items() if key != _LIKE}
    analogy = f"by analogy with {device.name}: "
    whose = {key: analogy + text for key, text in device.sources.items() if key not in (*own, *_ITS_OWN)}
    named = own.pop("sources", {})
    if not isinstance(named, Mapping):
        return {**usual, **own, "sources": named}
    sources = {**whose, **dict.fromkeys(own.keys() - {"name"}, _FILE), **named}
    return {**usual, **own, "sources": {**sources, "kind": f"{analogy}no run of it was replayed"}}


def _over(usual: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """`usual` with what is `said` in its place, tables key by key. A link said otherwise keeps no times measured."""
    found = dict(usual)
    for key, value in said.items():
        before = usual.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            whose = {**before["sources"], **dict.fromkeys(value, _FILE)} if "sources" in before else {}
            own = {"fits": [], "sources": whose} if "fits" in before else {}
            found[key] = {**before, **own, **value}
        else:
            found[key] = value
    return found
