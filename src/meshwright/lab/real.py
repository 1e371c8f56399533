"""Real hosts as a lab: machines over ssh and containers, whose links are what they are."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from meshwright.lab.hosts import Host
from meshwright.lab.lab import Lab
from meshwright.spec.cluster import ClusterSpec, NodeGroup
from meshwright.spec.codec import decode
from meshwright.spec.errors import ConfigError, EnvironmentUnfit, Problem
from meshwright.spec.json_text import parse_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How hosts of one sort are entered, and where one has its address."""

    enter: tuple[str, ...]
    address: Callable[[Host], str]
    quotes: bool = False


def _by_name(host: Host) -> str:
    name = host.name.rpartition("@")[2]
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise EnvironmentUnfit(Problem(what=f"no address of {name} is known", why=str(error))) from error


def _by_itself(host: Host) -> str:
    return host.read("hostname", "-i").split()[0]


WAYS: Mapping[str, Way] = {
    "ssh": Way(enter=("ssh", "-o", "BatchMode=yes"), address=_by_name, quotes=True),
    "docker": Way(enter=("docker", "exec"), address=_by_itself),
    "podman": Way(enter=("podman", "exec"), address=_by_itself),
}


def is_real(where: str) -> bool:
    """`where` names hosts by one of WAYS, and no cluster."""
    return ":" in where and where.partition(":")[0] in WAYS


def real_lab(where: str) -> Lab:
    """The lab of `ssh:ONE,TWO,…`, `docker:ONE,TWO,…` or `podman:…`.

    Raises ConfigError where no host is named, EnvironmentUnfit where one cannot be entered.
    """
    sort, _, names = where.partition(":")
    told = [name for name in names.split(",") if name]
    if not told:
        raise ConfigError(Problem(what="no host is named", where=where, fix=f"{sort}:ONE,TWO names two"))
    return Lab([_found(name, WAYS[sort]) for name in told])


def node_of(host: Host) -> NodeGroup:
    """What the host says of itself by its own `meshwright cluster detect`; EnvironmentUnfit where it has none."""
    told = host.read("meshwright", "cluster", "detect", "--json", "--quiet")
    return decode(ClusterSpec, parse_json(told), host.name).groups[0]


def _found(name: str, way: Way) -> Host:
    unknown = Host(name=name, address="", interface="", enter=(*way.enter, name), quotes=way.quotes)
    known = replace(unknown, address=way.address(unknown))
    return replace(known, interface=_interface(known))


def _interface(host: Host) -> str:
    """The one that has the host's address; "" where none says so, as behind a translated address."""
    for line in host.read("ip", "-o", "-4", "address").splitlines():
        words = line.split()
        if len(words) > 3 and words[3].partition("/")[0] == host.address:
            return words[1]
    return ""
