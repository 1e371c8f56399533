"""A plan in the words of other trainers, for the page: the file that each would be started with, or why it has none."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.export import NotExpressible, Peer, export, version_of
from meshwright.spec.plan import Design


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """`text` is the job file or launch script, "" where `refused` says what the trainer has no words for."""

    name: str
    text: str = ""
    refused: tuple[str, ...] = ()


def launches(design: Design) -> tuple[Launch, ...]:
    """One for every trainer."""
    return tuple(_launch(design, peer) for peer in Peer)


def _launch(design: Design, peer: Peer) -> Launch:
    try:
        made = export(design, to=peer)
    except NotExpressible as error:
        return Launch(name=version_of(peer), refused=tuple(str(problem) for problem in error.problems))
    return Launch(name=made.version, text=made.text)
