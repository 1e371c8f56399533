"""FLOPs of a step as a source counts them: what turns its FLOP/s into seconds."""

from __future__ import annotations

from typing import Protocol

from meshwright.replay.words import yes_or_no

_REPEATED = ("megatron", "96*B*s*l*h^2", "hardware FLOPs incl. full recompute")
_THREEFOLD = ("3x fwd", "full attention")


class Cells(Protocol):
    """A row of a table: texts by column, and numbers, None where a cell is blank."""

    def text(self, name: str) -> str: ...

    def number(self, name: str) -> float | None: ...


def step_flops(run: Cells) -> float | None:
    """Of all devices in one step; None where the count is not known or a figure that it needs is not printed."""
    convention = run.text("flop_conv")
    try:
        if convention.startswith(_REPEATED):
            return _repeated(run)
        return _threefold(run) if all(words in convention for words in _THREEFOLD) else None
    except OverflowError:
        return None


def _repeated(run: Cells) -> float | None:
    """2104.04473, equation 3: every layer's forward repeated, attention to all tokens."""
    names = ("layers", "hidden", "vocab", "seq", "gbs")
    found = [value for value in map(run.number, names) if value]
    if len(found) < len(names):
        return None
    layers, width, vocab, length, batch = found
    flops = 96.0 * batch * length * layers * width**2
    return flops * (1.0 + length / (6.0 * width) + vocab / (16.0 * layers * width))


def _threefold(run: Cells) -> float | None:
    """Three times forward: every product of layers and head, and attention to all tokens."""
    names = ("layers", "hidden", "heads", "vocab", "seq", "gbs")
    found = [value for value in map(run.number, names) if value]
    experts = run.number("n_experts")
    hidden = run.number("expert_ffn" if experts else "ffn")
    if len(found) < len(names) or hidden is None:
        return None
    layers, width, heads, vocab, length, batch = found
    dim = run.number("head_dim") or width / heads
    queries, keys = heads * dim, (run.number("kv_heads") or heads) * dim
    each = (2.0 if yes_or_no("gated", run.text("gated")) is False else 3.0) * width * hidden
    chosen = (run.number("topk") or 1.0) + (run.number("n_shared") or 0.0) if experts else 1.0
    layer = 2.0 * width * (queries + keys) + chosen * each + width * (experts or 0.0) + 2.0 * length * queries
    return 3.0 * 2.0 * batch * length * (layers * layer + width * vocab)
