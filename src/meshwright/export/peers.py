"""Export: write the flags, read them back with the peer's own rules, compare; nothing leaves that is not equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from meshwright.export import (
    read_deepspeed,
    read_megatron,
    read_torchtitan,
    write_deepspeed,
    write_megatron,
    write_torchtitan,
)
from meshwright.export.columns import Columns
from meshwright.export.compare import Line, Verdict, compare
from meshwright.export.meaning import Meaning, meaning
from meshwright.export.peer import Peer, peer_named
from meshwright.export.priced import priced
from meshwright.export.refuse import NotExpressible, NotTheSame, Refusals, refuse_all, refuse_optimizer
from meshwright.export.rest import Reading, compare_rest
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The text of a peer's file, and line by line how it compares with the plan; every line is kept or lost."""

    to: Peer
    version: str
    text: str
    lines: tuple[Line, ...]


def export(design: Design, *, to: Peer | str) -> Exported:
    """The plan of `design` in the words of `to`.

    Raises NotExpressible with everything that `to` cannot say, and NotTheSame, a fault of this system, when what was
    written does not come back as the plan.
    """
    peer = peer_named(to)
    writer = _writer(peer)
    text = writer.write(design)
    found = _reading(text, peer, where=peer.value)
    lines = _compared(design, found.meaning, peer)
    unknown = {name: value for name, value in found.rest.items() if name not in _reader(peer).WAYS}
    odd = compare_rest({}, unknown, ways=())
    if broken := [line for line in (*lines, *odd) if line.verdict is Verdict.DIFFERS]:
        raise NotTheSame(
            Problem(
                where=f"plan: {line.name}",
                what=f"{line.plan} came back from {peer.value} as {line.peer}",
                why="nothing was written; this is a fault of meshwright",
            )
            for line in broken
        )
    ways = compare_rest(found.rest, found.rest, ways=())
    lost = (*writer.lost(design), *priced(design, peer))
    return Exported(to=peer, version=_VERSIONS[peer], text=text, lines=(*lines, *ways, *lost))


def version_of(peer: Peer) -> str:
    """The trainer by its own name, in the version whose words are written."""
    return _VERSIONS[peer]


def refusals(said: Columns, *, to: Peer) -> Refusals:
    """What `to` cannot say of each row."""
    found: Refusals = _writer(to).refuse(said)
    return found


def refuse(design: Design, *, to: Peer) -> None:
    """Raises NotExpressible with everything of `design` that `to` cannot say."""
    writer = _writer(to)
    refuse_all(design, writer.refuse, peer=writer.PEER)


def precisions(to: Peer) -> tuple[Precision, ...]:
    """The precisions of products that `to` has words for."""
    found: tuple[Precision, ...] = _writer(to).PRECISIONS
    return found


def stages(model: ModelSpec, pipeline: int, *, to: Peer) -> tuple[int, ...] | None:
    """The first block of every stage where `to` deals layers itself and can do so evenly; else None."""
    layers = len(model.layers)
    even = to is Peer.DEEPSPEED and layers % pipeline == 0
    return write_deepspeed.dealt_stages(layers, pipeline) if even else None


def read(text: str, *, to: Peer | str, where: str | None = None) -> Meaning:
    """What `text`, a file of `to`, would run, by the rules of `to`. Raises ConfigError for what it would refuse."""
    peer = peer_named(to)
    return _reading(text, peer, where=where or peer.value).meaning


def nearest(design: Design, *, to: Peer | str) -> Meaning:
    """What the plan of `design` is in the words of `to`, where these are not the plan's own."""
    found: Meaning = _writer(peer_named(to)).nearest(design)
    return found


def check(design: Design, text: str, *, to: Peer | str, where: str | None = None) -> tuple[Line, ...]:
    """The plan of `design` against `text`, a file of `to` whoever wrote it, line by line.

    What the file says beyond the plan's meaning is held against what would be exported. Raises NotExpressible for an
    optimizer that no file of it could name.
    """
    peer = peer_named(to)
    found = Refusals(peer.value)
    refuse_optimizer(design.job, found)
    if found.problems:
        raise NotExpressible(found.problems)
    reading = _reading(text, peer, where=where or peer.value)
    rest = compare_rest(_exported_rest(design, peer), reading.rest, ways=_reader(peer).WAYS)
    return (*_compared(design, reading.meaning, peer), *rest)


def _compared(design: Design, found: Meaning, peer: Peer) -> tuple[Line, ...]:
    return compare(meaning(design), found, nearest=nearest(design, to=peer))


def _exported_rest(design: Design, peer: Peer) -> Mapping[str, str] | None:
    """What an export of `design` says beyond its meaning; None where it has no words for the plan."""
    try:
        text = _writer(peer).write(design)
    except NotExpressible:
        return None
    return _reading(text, peer, where=peer.value).rest


def _reading(text: str, peer: Peer, *, where: str) -> Reading:
    """Raises ConfigError for what the trainer would refuse."""
    try:
        found: Reading = _reader(peer).read(text, where=where)
    except _OTHERWISE as error:
        what = f"it says something that {peer.value} does not read"
        raise ConfigError(Problem(what=what, where=where, why=f"{type(error).__name__}: {str(error)[:200]}")) from error
    return found


# What comes of a value of another type than the trainer reads: a list for a number, a word for a table.
_OTHERWISE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_VERSIONS = {
    Peer.TORCHTITAN: "torchtitan 0.2.2",
    Peer.MEGATRON_LM: "Megatron Core 0.19",
    Peer.DEEPSPEED: "DeepSpeed 0.19.6 with Megatron-DeepSpeed 4efb479",
}


def _writer(peer: Peer) -> ModuleType:
    if peer is Peer.TORCHTITAN:
        return write_torchtitan
    return write_megatron if peer is Peer.MEGATRON_LM else write_deepspeed


def _reader(peer: Peer) -> ModuleType:
    if peer is Peer.TORCHTITAN:
        return read_torchtitan
    return read_megatron if peer is Peer.MEGATRON_LM else read_deepspeed
