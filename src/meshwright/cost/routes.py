"""Routes: the way every missing byte takes from a process that holds it to all that need it, and in which round.

A part that several processes need goes along a chain: each passes on what came to it, so that no process sends a byte
twice and every process is sent a byte once, which is the least there is (`cost.moved`). Where several hold the same
part, each begins a chain of its own and those that have sent least send first. A chain visits the processes of one node
one after another, and enters no node where someone holds the part already. All of it is a function of what is held and
needed, the same on every process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from meshwright.cost.holdings import Box, Holding


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A part of the tensor `name` goes from the first of `chain`, which holds it, to each of the others in turn."""

    name: str
    box: Box
    item_bytes: int
    chain: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.box.elements * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """`sender` sends a part to `receiver`; the `first` hop of a route is from the source, others pass on."""

    name: str
    box: Box
    item_bytes: int
    sender: int
    receiver: int
    first: bool

    @property
    def bytes(self) -> int:
        return self.box.elements * self.item_bytes


@dataclass(frozen=True, slots=True)
class _Atom:
    """A part that every process has all or nothing of: who holds it, and who needs it and does not."""

    box: Box
    holders: tuple[int, ...]
    needing: tuple[int, ...]


def routes(
    source: Mapping[str, Holding], target: Mapping[str, Holding], *, nodes: Sequence[int] | None = None
) -> list[Route]:
    """Routes of all that processes of `target` need and do not hold; `nodes[p]` is the node of process p, None one
    node for all. The largest parts choose first, so that what senders send is even.
    """
    known: dict[tuple[int, int, int, tuple[int, ...]], list[_Atom]] = {}
    wanted: list[tuple[int, str, _Atom]] = []
    for name, want in target.items():
        held = source[name]
        key = id(held.parts), id(held.spares), id(want.parts), held.shape
        if key not in known:
            known[key] = _atoms(held, want)
        wanted += [(atom.box.elements * held.item_bytes, name, atom) for atom in known[key]]
    wanted.sort(key=lambda entry: -entry[0])
    sent: dict[int, int] = {}
    found: list[Route] = []
    for size, name, atom in wanted:
        chains = _chains(atom, size, sent=sent, nodes=nodes)
        width = source[name].item_bytes
        found += [Route(name=name, box=atom.box, item_bytes=width, chain=chain) for chain in chains]
    return found


def rounds(found: Sequence[Route], *, staging_bytes: int) -> list[list[Hop]]:
    """The hops of all routes in rounds: in one, no process sends or receives more than `staging_bytes`.

    A process passes on in a later round what came to it in an earlier one; the longest chains go first.
    """
    made: list[list[Hop]] = []
    staging_bytes = max(staging_bytes, *(route.item_bytes for route in found)) if found else staging_bytes
    out: dict[tuple[int, int], int] = {}
    into: dict[tuple[int, int], int] = {}
    open_from: dict[int, int] = {}
    for route in sorted(found, key=lambda route: -len(route.chain)):
        for box in _pieces(route.box, most=max(1, staging_bytes // route.item_bytes)):
            ready, size = 0, box.elements * route.item_bytes
            for place, (sender, receiver) in enumerate(pairwise(route.chain)):
                turn = max(ready, open_from.get(sender, 0))
                while (
                    out.get((sender, turn), 0) + size > staging_bytes
                    or into.get((receiver, turn), 0) + size > staging_bytes
                ):
                    turn += 1
                made += [[] for _ in range(turn + 1 - len(made))]
                hop = Hop(
                    name=route.name,
                    box=box,
                    item_bytes=route.item_bytes,
                    sender=sender,
                    receiver=receiver,
                    first=place == 0,
                )
                made[turn].append(hop)
                out[sender, turn] = out.get((sender, turn), 0) + size
                into[receiver, turn] = into.get((receiver, turn), 0) + size
                while out.get((sender, open_from.get(sender, 0)), 0) >= staging_bytes:
                    open_from[sender] = open_from.get(sender, 0) + 1
                ready = turn + 1
    return made


def _atoms(held: Holding, want: Holding) -> list[_Atom]:
    """The tensor cut wherever a part of either side begins or ends; what nobody is missing is left out."""
    ours: dict[Box, list[int]] = {}
    theirs: dict[Box, list[int]] = {}
    for process, box in held.boxes:
        ours.setdefault(box, []).append(process)
    for process, box in want.parts.items():
        theirs.setdefault(box, []).append(process)
    found = []
    for box in _cells((*ours, *theirs), dims=len(held.shape)):
        holders = sorted(process for part, ranks in ours.items() if part.meet(box) for process in ranks)
        wanting = {process for part, ranks in theirs.items() if part.meet(box) for process in ranks}
        needing = sorted(wanting - set(holders))
        if needing:
            found.append(_Atom(box, tuple(holders), tuple(needing)))
    return found


def _cells(boxes: Sequence[Box], *, dims: int) -> Iterator[Box]:
    edges = [sorted({edge for box in boxes for edge in (box.starts[dim], box.stops[dim])}) for dim in range(dims)]
    for runs in product(*(pairwise(marks) for marks in edges)):
        yield Box(tuple(first for first, _ in runs), tuple(last - first for first, last in runs))


def _chains(atom: _Atom, size: int, *, sent: dict[int, int], nodes: Sequence[int] | None) -> list[tuple[int, ...]]:
    """Who passes an atom of `size` bytes to whom; what each sends is added to `sent`."""
    chains = [[holder] for holder in atom.holders]
    homes: dict[int, list[list[int]]] = {}
    for chain in chains:
        homes.setdefault(_node(chain[0], nodes), []).append(chain)
    near = [process for process in atom.needing if _node(process, nodes) in homes]
    far: dict[int, list[int]] = {}
    for process in atom.needing:
        if _node(process, nodes) not in homes:
            far.setdefault(_node(process, nodes), []).append(process)

    def add(process: int, to: Sequence[list[int]]) -> list[int]:
        chain = min(to, key=lambda chain: (len(chain), sent.get(chain[-1], 0), chain[-1]))
        sent[chain[-1]] = sent.get(chain[-1], 0) + size
        chain.append(process)
        return chain

    for process in near:
        add(process, homes[_node(process, nodes)])
    for there in far.values():
        chain = add(there[0], chains)
        for process in there[1:]:
            add(process, [chain])
    return [tuple(chain) for chain in chains if len(chain) > 1]


def _node(process: int, nodes: Sequence[int] | None) -> int:
    return 0 if nodes is None else nodes[process]


def _pieces(box: Box, *, most: int) -> Iterator[Box]:
    """`box` in boxes of at most `most` elements, cut along its first dims."""
    if box.elements <= most:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    row = box.elements // box.sizes[dim]
    step = max(1, most // row)
    for first in range(0, box.sizes[dim], step):
        yield from _pieces(box.along(dim, first=first, size=min(step, box.sizes[dim] - first)), most=most)
