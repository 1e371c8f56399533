"""Meeting: the nodes of a launch find each other at node 0 and compare what they are about to run, before any worker
starts. There is one place to meet and nothing is tried in its stead.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import psutil
from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler

from meshwright.run.launching import token
from meshwright.run.launching.gate import Door, Gate, knows, leave_a_note
from meshwright.run.rendezvous import LOOPBACK_ADDRESS, Assigned, server_at, store_here
from meshwright.spec import codec
from meshwright.spec.errors import ConfigError, EnvironmentUnfit, Problem
from meshwright.spec.json_text import parse_json

MEETING_SECONDS = 900.0  # machines of clouds start minutes apart
_SEEING_SECONDS = 60.0  # the longest that NFS keeps what it knows of a folder (acdirmax)
_LEAVING_SECONDS = 10.0
_LOOK_SECONDS = 0.2
_ALIKE = {
    "session": "is of another launch",
    "nodes": "was told of another number of nodes",
    "design": "reads another design",
    "meshwright": "has another version of meshwright",
    "torch": "has another version of torch",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """What a node says of itself: its number of `nodes`, the launch and the design that it is of, versions, the address
    it speaks from, whether it sees what node 0 wrote into the run directory, and what hinders it."""

    node: int
    nodes: int
    host: str
    session: str
    design: str
    meshwright: str
    torch: str
    address: str = ""
    sees_run: bool = True
    problems: tuple[Problem, ...] = ()

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """All nodes have come and agree: `store` is theirs, they know `word`, and this one reaches others from `address`,
    by `interface`."""

    store: Store
    word: str = field(repr=False)
    address: str
    interface: str
    rendezvous: RendezvousHandler


def meet(
    mine: Greeting, *, head: str, run_dir: Path, say: Callable[[str], None], seconds: float = MEETING_SECONDS
) -> Met:
    """Every node of the launch has come to `head`, HOST:PORT of node 0, and all run the same. Node 0 may `say` who else
    came.

    Raises EnvironmentUnfit, on every node that came, with what hinders any of them, with each difference and with the
    nodes that did not come within `seconds`.
    """
    host, port = _endpoint(head)
    gate: Gate | None = None
    if mine.node == 0:
        word = token.leave(run_dir)
        found, gate = _behind_a_gate(host, port, word=word, say=say, seconds=seconds)
    else:
        found, word = _through_the_gate(mine, host, port, run_dir=run_dir, seconds=seconds)
    store, address = PrefixStore("meeting", found), _address_towards(host, port)
    mine = replace(mine, address=address)
    if store.add(f"came/{mine.node}", 1) > 1:
        what = f"two nodes say that they are node {mine.node}; the second is {mine.host}"
        fix = "give each node its own number, from 0 on"
        raise EnvironmentUnfit(Problem(what=what, where=head, fix=fix))
    problems = _as_other(store, mine, seconds) if gate is None else _as_head(store, mine, gate, seconds)
    if problems:
        raise EnvironmentUnfit(problems)
    far = parse_json(store.get("far")) if mine.node == 0 and store.check(["far"]) else ""
    address, interface = interface_towards(far, port) if far else (address, _interface(address))
    agents = PrefixStore("agents", found)
    rendezvous = Assigned(agents, node=mine.node, nodes=mine.nodes, host=LOOPBACK_ADDRESS, port=found.port)
    return Met(store=store, word=word, address=address, interface=interface, rendezvous=rendezvous)


def interface_towards(host: str, port: int) -> tuple[str, str]:
    """The address from which this machine speaks to `host`, and the interface that has it."""
    address = _address_towards(host, port)
    return address, _interface(address)


def agree_on_end(store: Store, code: int | None, *, node: int, nodes: int, seconds: float) -> int:
    """The exit code of the run, which one node says and all give back; None of those that do not know it.

    Node 0, which holds the store, is the last to leave. Raises EnvironmentUnfit where nobody says within `seconds`.
    """
    if code is not None:
        store.set("code", str(code))
    try:
        store.wait(["code"], timedelta(seconds=seconds))
    except DistError:
        raise EnvironmentUnfit(Problem(what="the node of rank 0 does not say how the run ended")) from None
    found = int(store.get("code"))
    _leave(store, node=node, others=nodes - 1)
    return found


def _as_head(store: Store, mine: Greeting, gate: Gate, seconds: float) -> list[Problem]:
    """What node 0 finds wrong, which the others now know too."""
    end, came, missing = time.monotonic() + seconds, [mine], list[int]()
    outside: dict[int, Greeting] = {}
    for node in range(1, mine.nodes):
        while node not in outside and not _came(store, f"hello/{node}", min(end - time.monotonic(), _LOOK_SECONDS)):
            outside = {each.node: each for each in _strangers(gate, mine)}
            if time.monotonic() >= end:
                missing.append(node)
                break
        if node in outside:
            came.append(outside[node])
        if node in outside or node in missing:
            continue
        came.append(codec.decode(Greeting, parse_json(store.get(f"hello/{node}")), f"node {node}"))
    problems = [*_of_each(came), *_differences(came)]
    if missing:
        numbers = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        what = f"node {numbers} of {mine.nodes} did not come within {seconds:g} s"
        why = f"those that came are {', '.join(map(str, came[:8]))}"
        fix = "see why it did not start, and that it was given this place to meet"
        problems.append(Problem(what=what, where="meeting", why=why, fix=fix))
    far = [each.address for each in came if not _is_loopback(each.address)]
    if far and _is_loopback(mine.address):
        store.set("far", json.dumps(far[0]))
    store.set("verdict", json.dumps(codec.encode(tuple(problems))))
    if problems:
        _leave(store, node=0, others=len(came) - 1 - len(outside))
    return problems


def _strangers(gate: Gate, mine: Greeting) -> Iterator[Greeting]:
    """Nodes of this launch, as they say, that do not know the word."""
    for text in gate.strangers:
        with suppress(ValueError, ConfigError):
            told = codec.decode(Greeting, parse_json(text))
            if told.session == mine.session:
                yield replace(told, sees_run=False)


def _as_other(store: Store, mine: Greeting, seconds: float) -> list[Problem]:
    """What node 0 says is wrong, once it knows this node."""
    store.set(f"hello/{mine.node}", json.dumps(codec.encode(mine)))
    if not _came(store, "verdict", seconds):
        what = f"node 0 does not answer within {seconds:g} s"
        return [Problem(what=what, where=str(mine), why="it may wait for other nodes, or have ended")]
    told = parse_json(store.get("verdict"))
    problems = list(codec.decode(tuple[Problem, ...], told, "verdict"))
    if problems:
        _leave(store, node=mine.node, others=0)
    return problems


def _of_each(came: Iterable[Greeting]) -> Iterator[Problem]:
    for each in came:
        for problem in each.problems:
            yield replace(problem, where=f"{each}: {problem.where}" if problem.where else str(each))
        if not each.sees_run:
            yield _unseeing(each)


def _differences(came: list[Greeting]) -> Iterator[Problem]:
    head = came[0]
    for each in came[1:]:
        for name, what in _ALIKE.items():
            ours, theirs = getattr(head, name), getattr(each, name)
            # A node that could not read its design has said so.
            if ours != theirs and not (name == "design" and not (ours and theirs)):
                yield Problem(what=what, where=str(each), why=f"{theirs}; node 0 has {ours}")


def _unseeing(each: Greeting) -> Problem:
    what = "does not see what node 0 writes into the run directory"
    fix = "--run names a directory on storage that all nodes mount at one place"
    return Problem(what=what, where=str(each), fix=fix)


def _behind_a_gate(
    host: str, port: int, *, word: str, say: Callable[[str], None], seconds: float
) -> tuple[TCPStore, Gate]:
    """Node 0's store, and the gate at its one open port."""
    try:
        listening = server_at(host, port)
    except OSError as error:
        what = f"node 0 cannot hold the meeting at {host}:{port}"
        fix = "node 0 must be the host of that address, and the port free on it"
        raise EnvironmentUnfit(Problem(what=what, why=error.strerror or str(error), fix=fix)) from None
    store = store_here(timeout=timedelta(seconds=seconds))
    gate = Gate(listening, word=word, store_port=store.port, say=say)
    gate.start()
    return store, gate


def _through_the_gate(mine: Greeting, host: str, port: int, *, run_dir: Path, seconds: float) -> tuple[TCPStore, str]:
    """Node 0's store, for a node that finds the word, and the word. It may be late: network file systems show files
    late, and until node 0 has come the word is that of another launch."""
    end, sees_until = time.monotonic() + seconds, None
    while True:
        word = token.read(run_dir)
        try:
            if knows(word, head=(host, port)):
                break
        except OSError as error:
            if time.monotonic() >= end:
                raise EnvironmentUnfit(_unreached(mine, host, port, error, seconds=seconds)) from None
        else:
            sees_until = sees_until or time.monotonic() + min(_SEEING_SECONDS, seconds / 2)
        if sees_until is not None and time.monotonic() >= sees_until:
            leave_a_note(json.dumps(codec.encode(mine)), head=(host, port))
            raise EnvironmentUnfit(_unseeing(mine))
        time.sleep(_LOOK_SECONDS)
    door = Door(head=(host, port), word=word)
    door.start()
    waits = timedelta(seconds=seconds)
    return TCPStore(LOOPBACK_ADDRESS, door.port, is_master=False, timeout=waits, wait_for_workers=False), word


def _unreached(mine: Greeting, host: str, port: int, error: OSError, *, seconds: float) -> Problem:
    what = f"{mine} does not reach node 0 at {host}:{port} within {seconds:g} s"
    fix = "see that node 0 started, that the address is its, and that nodes may connect to that port"
    return Problem(what=what, why=error.strerror or str(error), fix=fix)


def _came(store: Store, key: str, seconds: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=max(seconds, 0.01)))
    except DistError:
        return False
    return True


def _leave(store: Store, *, node: int, others: int) -> None:
    """This node needs the store no more; node 0, which holds it, waits until that is so of `others`."""
    if node:
        store.add("left", 1)
        return
    end = time.monotonic() + _LEAVING_SECONDS
    while others and store.add("left", 0) < others and time.monotonic() < end:
        time.sleep(0.02)


def _endpoint(head: str) -> tuple[str, int]:
    host, _, port = head.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise EnvironmentUnfit(Problem(what=f"{head!r} is no HOST:PORT to meet at", where="--head"))
    return host, int(port)


def _address_towards(host: str, port: int) -> str:
    """The address from which this machine speaks to `host`; nothing is sent. "" where there is no way."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _interface(address: str) -> str:
    """The network interface that has `address`; the loopback's where none has."""
    for name, held in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in held):
            return name
    return "lo"


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("", "::1")
