"""A model that is all in this process, as checkpoints see it."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.nn import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    parts: tuple[Decoder, ...]
