"""What the hosts of a lab are: what each says of itself, and its devices as it measures them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.lab.hosts import Host
from meshwright.lab.lab import Lab
from meshwright.spec.cluster import ClusterSpec, DeviceKind, NodeGroup
from meshwright.spec.codec import decode
from meshwright.spec.errors import ConfigError, EnvironmentUnfit, Problem
from meshwright.spec.json_text import parse_json

# What a measurement may take beside its own budget: processes that start, import and call everything once.
_SLACK_SECONDS = 600.0


def detected(lab: Lab) -> tuple[NodeGroup, ...]:
    """What every host says of itself by its own `cluster detect`; EnvironmentUnfit where one cannot."""
    return tuple(_told(lab, host, "detect") for host in lab.hosts)


def require_processors(said: Sequence[NodeGroup]) -> None:
    """Raises ConfigError where hosts that are made here are to have devices that this machine lends to none."""
    others = dict.fromkeys(node.device.name for node in said if node.device.kind is not DeviceKind.CPU)
    if others:
        what = f"{', '.join(others)} cannot be measured on hosts that are made of this machine's processors"
        fix = "`meshwright lab` measures the links alone; ssh:ONE,TWO names hosts that have such devices"
        raise ConfigError(Problem(what=what, where="--across", fix=fix))


def measured(
    lab: Lab, said: Sequence[NodeGroup], *, made: bool, seconds: float, say: Callable[[str], None]
) -> tuple[NodeGroup, ...]:
    """`said`, host by host, with devices and links inside a node as hosts measure them by their own `cluster measure`.

    One host after another, each for about `seconds`; hosts that say the same of themselves are measured once. Hosts
    that are `made` here keep nothing of it in this machine's cache, and have its processors alone. Raises
    EnvironmentUnfit where a host cannot measure.
    """
    found: list[tuple[NodeGroup, NodeGroup]] = []
    for host, node in zip(lab.hosts, said, strict=True):
        if not any(_alike(node, other) for other, _ in found):
            say(f"{host.name}: devices are measured, for about {seconds:.0f} s")
            found.append((node, _measured(lab, host, node, made=made, seconds=seconds)))
    by_host = [next(seen for other, seen in found if _alike(node, other)) for node in said]
    return tuple(_filled(node, seen) for node, seen in zip(said, by_host, strict=True))


def _measured(lab: Lab, host: Host, node: NodeGroup, *, made: bool, seconds: float) -> NodeGroup:
    words, within = ["measure", "--seconds", f"{seconds:g}"], 3 * seconds + _SLACK_SECONDS
    if not made:
        return _told(lab, host, *words, within_seconds=within)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        apart = {"MESHWRIGHT_CACHE": str(Path(folder)), "CUDA_VISIBLE_DEVICES": ""}
        words += ["--devices", str(node.devices_per_node)]
        return _told(lab, host, *words, within_seconds=within, environment=apart)


def _told(
    lab: Lab, host: Host, *words: str, within_seconds: float = 60.0, environment: Mapping[str, str] | None = None
) -> NodeGroup:
    asked = (lab.python, "-m", "meshwright", "cluster", *words, "--json", "--quiet")
    told = host.read(*asked, environment=environment or {}, within_seconds=within_seconds)
    try:
        return decode(ClusterSpec, parse_json(told), host.name).groups[0]
    except (ValueError, ConfigError) as error:
        what, fix = "does not say what it is as this version does", "install this version of meshwright there"
        raise EnvironmentUnfit(Problem(what=what, where=host.name, why=str(error), fix=fix)) from error


def _alike(one: NodeGroup, other: NodeGroup) -> bool:
    """Nodes of the same insides, whatever they are called and wherever they are."""
    return replace(one, name="", num_nodes=1, site="", nic=other.nic, nics=other.nics) == replace(
        other, name="", num_nodes=1, site=""
    )


def _filled(node: NodeGroup, seen: NodeGroup) -> NodeGroup:
    """The node with what was measured of it; its name, memory, price and failures are as it said."""
    own = node.device
    device = replace(
        seen.device,
        name=own.name,
        memory_bytes=own.memory_bytes,
        price_per_hour=own.price_per_hour,
        hours_between_failures=own.hours_between_failures,
        watts=own.watts,
    )
    return replace(node, device=device, inside=seen.inside, cores=seen.cores, together=seen.together)
