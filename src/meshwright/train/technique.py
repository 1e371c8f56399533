"""What a technique is to a run: it attaches before the first step, answers events, and keeps a state of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from meshwright.train.events import Action, Event

if TYPE_CHECKING:
    from meshwright.train.run import Run


class Technique(Protocol):
    """One way to train faster or better. Its `name` is the key of its state in checkpoints."""

    name: str

    def attach(self, run: Run) -> None:
        """Called once on every rank, after the run is built and before its state is loaded."""

    def react(self, event: Event) -> Iterable[Action]:
        """The actions this event calls for, the same on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values that `load_state_dict` takes back; the same on every rank."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The technique goes on from `state`."""
