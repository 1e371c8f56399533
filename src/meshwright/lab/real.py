"""Real hosts as a lab: machines over ssh and containers, whose links are what they are."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from meshwright.lab.hosts import Host
from meshwright.lab.lab import Lab
from meshwright.spec.errors import ConfigError, EnvironmentUnfit, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How hosts of one sort are entered, and where one has its address."""

    enter: tuple[str, ...]
    address: Callable[[Host], str]
    quotes: bool = False


def _by_name(host: Host) -> str:
    """That of the name; of one that ssh alone knows, the one at which it was reached."""
    name = host.name.rpartition("@")[2]
    try:
        return socket.gethostbyname(name)
    except OSError:
        what = f"no address of {name} is known"
    try:
        return host.read("sh", "-c", "echo $SSH_CONNECTION").split()[2]
    except IndexError as error:
        raise EnvironmentUnfit(Problem(what=what, why="its daemon does not say where it was reached")) from error


def _by_itself(host: Host) -> str:
    return host.read("hostname", "-i").split()[0]


WAYS: Mapping[str, Way] = {
    "ssh": Way(enter=("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"), address=_by_name, quotes=True),
    "docker": Way(enter=("docker", "exec"), address=_by_itself),
    "podman": Way(enter=("podman", "exec"), address=_by_itself),
}


def is_real(where: str) -> bool:
    """`where` names hosts by one of WAYS, and no cluster."""
    return ":" in where and where.partition(":")[0] in WAYS


def real_lab(where: str, *, python: str = sys.executable) -> Lab:
    """The lab of `ssh:ONE,TWO,…`, `docker:ONE,TWO,…` or `podman:…`, whose hosts have meshwright in `python`.

    Raises ConfigError where no host is named, EnvironmentUnfit where one cannot be entered, and why.
    """
    sort, _, names = where.partition(":")
    told = [name for name in names.split(",") if name]
    if not told:
        raise ConfigError(Problem(what="no host is named", where=where, fix=f"{sort}:ONE,TWO names two"))
    return Lab([_found(name, WAYS[sort]) for name in told], python=python)


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
