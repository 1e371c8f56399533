"""The lab's network: hosts as network namespaces of this machine, switches as bridges in one of their own, cables as
virtual links with a rate.

A namespace lives as long as a process in it, which ends with the pipe to this one: whatever ends the lab, nothing of it
is left. No cable leads out, so no traffic does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

from meshwright.lab.hosts import Host
from meshwright.lab.topology import Topology, Uplink
from meshwright.spec.errors import EnvironmentUnfit, Problem

_NEEDED = ("ip", "tc", "nsenter", "setpriv", "unshare")
_WITH_THE_LAB = ("setpriv", "--pdeathsig", "TERM", "--")  # however the lab ends, what runs in it is asked to end
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21
_INTERFACE = "eth0"
_TRIAL = "ip link add try type bridge; tc qdisc add dev lo root tbf rate 1mbit burst 64kb latency 400ms"
_LEAST_BURST_BYTES = 128 * 1024  # more than a packet that the kernel has not yet cut, with the headers of its pieces
_BURST_SECONDS = 2e-3
_QUEUE = "400ms"


def unfit() -> str:
    """Why no lab can be made here; "" where one can."""
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if sys.platform != "linux":
        return "namespaces are Linux's"
    if missing:
        return f"{', '.join(missing)} is missing; install iproute2 and util-linux"
    lacking = [name for name, bit in (("network", _CAP_NET_ADMIN), ("system", _CAP_SYS_ADMIN)) if not _has(bit)]
    if lacking:
        return f"this process may not administer the {' or the '.join(lacking)}; run it as root"
    tried = subprocess.run(["unshare", "-n", "sh", "-ec", _TRIAL], capture_output=True, text=True)
    return tried.stderr.strip().partition("\n")[0] if tried.returncode else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """A network namespace with the process that holds it."""

    holder: subprocess.Popen[bytes]

    @classmethod
    def make(cls) -> Namespace:
        """One with nothing in it but its own loopback, which is up."""
        # cat ends when the pipe does, and the namespace with it.
        holder = subprocess.Popen(["unshare", "-n", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        found = cls(holder=holder)
        try:
            _await_namespace(holder)
            # Else hosts greet each other on every cable, and what they say is counted.
            found.run("sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 || true")
            found.run("ip", "link", "set", "lo", "up")
        except BaseException:
            found.end()
            raise
        return found

    @property
    def enter(self) -> tuple[str, ...]:
        """The words before a command that run it inside."""
        return ("nsenter", "-t", str(self.holder.pid), "-n", "--")

    def run(self, *words: str) -> None:
        """Raises EnvironmentUnfit with what the command says where it fails."""
        done = subprocess.run([*self.enter, *words], capture_output=True, text=True)
        if done.returncode:
            why = done.stderr.strip().partition("\n")[0]
            raise EnvironmentUnfit(Problem(what=f"{' '.join(words)} fails in the lab", why=why))

    def end(self) -> None:
        """Its holder has ended; what else runs inside keeps it."""
        if self.holder.stdin is not None:
            self.holder.stdin.close()
        self.holder.wait()


class Fabric:
    """Namespaces, bridges and cables of a topology; up from its making to `down`."""

    def __init__(self, topology: Topology) -> None:
        why = unfit()
        if why:
            raise EnvironmentUnfit(Problem(what="a lab cannot be made here", why=why))
        self._namespaces: list[Namespace] = []
        self._relays: list[subprocess.Popen[bytes]] = []
        self._cables: dict[str, str] = {}
        self._ends: dict[str, list[tuple[Namespace, str]]] = {}
        try:
            self._switches = self._namespace()
            self.hosts = self._build(topology)
        except BaseException:
            self.down()
            raise

    def pull(self, host: Host) -> None:
        """The cable of the host is pulled: nothing comes from it or to it any more."""
        self._switches.run("ip", "link", "set", self._cables[host.name], "down")

    def slow(self, host: Host, bandwidth: float) -> None:
        """What the host sends and is sent crosses its uplink at so many bytes a second from now on."""
        for inside, end in self._ends[host.name]:
            inside.run("tc", "qdisc", "change", "dev", end, "root", *_rate(bandwidth))

    def down(self) -> None:
        """Nothing of it is left."""
        for relay in self._relays:
            assert relay.stdin is not None
            relay.stdin.close()
            relay.wait()
        for namespace in self._namespaces:
            namespace.end()
        self._relays, self._namespaces = [], []

    def _namespace(self) -> Namespace:
        found = Namespace.make()
        self._namespaces.append(found)
        return found

    def _build(self, topology: Topology) -> tuple[Host, ...]:
        bridges = {name: self._bridge(f"sw{index}") for index, name in enumerate(topology.switches)}
        hosts: dict[str, Host] = {}
        for index, name in enumerate(topology.hosts):
            inside = self._namespace()
            address = f"10.77.{index // 250}.{index % 250 + 1}"
            enter = (*inside.enter, *_WITH_THE_LAB)
            hosts[name] = Host(name=name, address=address, interface=_INTERFACE, enter=enter)
        holders = dict(zip(topology.hosts, self._namespaces[1:], strict=True))
        for index, uplink in enumerate(topology.uplinks):
            above, below = bridges[uplink.above], bridges.get(uplink.below)
            ends = (f"d{index}", f"u{index}")
            if below is None and not uplink.is_delayed:
                held = self._plug(hosts[uplink.below], holders[uplink.below], above, ends)
                self._limit(uplink, held)
                continue
            if below is None:
                # The ends of a relay cannot move to a host, which hangs on a switch of its own instead.
                below = self._bridge(f"b{index}")
                feet = (f"h{index}", f"f{index}")
                self._plug(hosts[uplink.below], holders[uplink.below], below, feet)
            if uplink.is_delayed:
                self._relay(ends, uplink)
            else:
                self._switches.run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for end, bridge in zip(ends, (below, above), strict=True):
                self._switches.run("ip", "link", "set", end, "master", bridge, "up")
            self._limit(uplink, [(self._switches, end) for end in ends])
        return tuple(hosts.values())

    def _limit(self, uplink: Uplink, ends: list[tuple[Namespace, str]]) -> None:
        """Each end sends at no more than the uplink's rate."""
        for inside, end in ends:
            inside.run("tc", "qdisc", "add", "dev", end, "root", *_rate(uplink.bandwidth))
        self._ends[uplink.below] = ends

    def _bridge(self, name: str) -> str:
        self._switches.run("ip", "link", "add", name, "type", "bridge")
        self._switches.run("ip", "link", "set", name, "up")
        return name

    def _plug(self, host: Host, inside: Namespace, bridge: str, ends: tuple[str, str]) -> list[tuple[Namespace, str]]:
        """The host hangs on the bridge by a cable with these ends."""
        down, up = ends
        self._switches.run("ip", "link", "add", down, "type", "veth", "peer", "name", up)
        self._switches.run("ip", "link", "set", up, "master", bridge, "up")
        self._cables[host.name] = up
        self._switches.run("ip", "link", "set", down, "netns", str(inside.holder.pid))
        inside.run("ip", "link", "set", down, "name", _INTERFACE)
        inside.run("ip", "address", "add", f"{host.address}/16", "dev", _INTERFACE)
        inside.run("ip", "link", "set", _INTERFACE, "up")
        return [(self._switches, up), (inside, _INTERFACE)]

    def _relay(self, ends: tuple[str, str], uplink: Uplink) -> None:
        words = ["-m", "meshwright.lab.relay", *ends, str(uplink.latency_seconds), str(uplink.loss)]
        command = [*self._switches.enter, sys.executable, *words]
        relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._relays.append(relay)
        assert relay.stdout is not None
        if relay.stdout.readline() != b"ready\n":
            where = f"{uplink.below} to {uplink.above}"
            what = "the relay that delays packets did not start"
            raise EnvironmentUnfit(Problem(what=what, where=where, why="it needs /dev/net/tun"))


def _rate(bandwidth: float) -> tuple[str, ...]:
    burst = max(_LEAST_BURST_BYTES, int(_BURST_SECONDS * bandwidth))
    return ("tbf", "rate", f"{int(8 * bandwidth)}bit", "burst", str(burst), "latency", _QUEUE)


def _await_namespace(holder: subprocess.Popen[bytes]) -> None:
    """The process has left the namespace of this one. Raises EnvironmentUnfit where it has ended instead."""
    own = os.readlink("/proc/self/ns/net")
    while holder.poll() is None:
        if os.readlink(f"/proc/{holder.pid}/ns/net") != own:
            return
        os.sched_yield()
    raise EnvironmentUnfit(Problem(what="a namespace of the lab could not be made", why="unshare -n failed"))


def _has(capability: int) -> bool:
    with open("/proc/self/status") as file:
        effective = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff"))
    return bool(effective >> capability & 1)
