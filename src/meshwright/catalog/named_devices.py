"""Cluster files in short: a device by its name in the catalog, and the rest of its usual node where it is not said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.catalog.devices import SHEETS, find_device
from meshwright.catalog.names import suggest
from meshwright.catalog.nodes import nodes
from meshwright.spec.codec import encode
from meshwright.spec.errors import ConfigError, Problem

_MARK, _FILE = "device", "the cluster file"


def spelt_out(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values of a cluster file with every `device = "H100"` replaced by what the catalog says of it.

    Such a group takes what it does not say (links, adapters, the host's memory, its name, one node) from the device's
    usual node; a table that it says in part, as `nic.bandwidth`, is filled up. Raises ConfigError with every name that
    is not known.
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
    if not isinstance(name, str):
        return group
    device = find_device(name)
    if device is None:
        known = [entry for sheet in SHEETS for entry in (sheet.name, *sheet.aliases)]
        fix = suggest(name, known, see=", ".join(sheet.name for sheet in SHEETS))
        problems.append(Problem(what=f"no device is called {name!r}", where=f"{where}.{_MARK}", fix=fix))
        return group
    count = group.get("devices_per_node")
    per_node = count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None
    usual = encode(nodes()[device.name].group(device, nodes=1, per_node=per_node))
    return _over(usual, {key: value for key, value in group.items() if key != _MARK})


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
