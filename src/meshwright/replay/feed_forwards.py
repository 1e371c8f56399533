"""The feed-forward of a published run by its columns, for its model and for the count of its FLOPs alike."""

from __future__ import annotations

from typing import Protocol

from meshwright.replay.words import model_kind, yes_or_no

_PLAIN = ("gpt", "bert", "t5", "hybrid-mamba")  # kinds whose feed-forwards have two matrices unless a row says more


class Cells(Protocol):
    """A row of a table: texts by column, and numbers, None where a cell is blank; the sequences of a step."""

    def text(self, name: str) -> str: ...

    def number(self, name: str) -> float | None: ...

    @property
    def batch(self) -> int | None: ...


def gates(run: Cells) -> bool:
    """Whether feed-forwards and experts have three matrices: as the row says, else as those of its kind of model."""
    said = yes_or_no("gated", run.text("gated"))
    if said is not None:
        return said
    kind = model_kind(run.text("arch"), experts=bool(run.number("n_experts"))) or ""
    return not kind.startswith(_PLAIN)


def plain_width(width: int) -> int:
    """Of a feed-forward that is not gated, where a row says none (2005.14165)."""
    return 4 * width


def gated_width(width: int) -> int:
    """Of a gated one: 8/3 of the model's, in whole multiples of 256 (2302.13971)."""
    return -(-(8 * width // 3) // 256) * 256


def feed_forward_width(run: Cells, *, width: int) -> float:
    """As printed, else as models of this kind have it; of an expert where there are some."""
    own, expert = run.number("ffn"), run.number("expert_ffn")
    if run.number("n_experts"):
        own, expert = expert, own
    if not gates(run) and not run.number("n_experts"):
        return own or plain_width(width)
    return own or expert or gated_width(width)
