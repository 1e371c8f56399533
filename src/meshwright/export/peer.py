"""Peer: the trainers whose flags are written and read, by name."""

from __future__ import annotations

import difflib
from enum import StrEnum

from meshwright.spec.errors import ConfigError, Problem


class Peer(StrEnum):
    """Trainers whose flags are written and read."""

    TORCHTITAN = "torchtitan"
    MEGATRON_LM = "megatron-lm"
    DEEPSPEED = "deepspeed"


def peer_named(name: str, *, where: str = "--to") -> Peer:
    """The peer called `name`. Raises ConfigError at `where`, with the nearest names, for one that is not known."""
    try:
        return _ALIASES.get(name) or Peer(name)
    except ValueError:
        near = difflib.get_close_matches(name, [peer.value for peer in Peer], n=1, cutoff=0.6)
        known = ", ".join(peer.value for peer in Peer)
        fix = f"did you mean {near[0]}?" if near else f"choose {known}"
        raise ConfigError(Problem(where=where, what=f"{name!r} is not a trainer known here", fix=fix)) from None


_ALIASES = {"megatron": Peer.MEGATRON_LM}
