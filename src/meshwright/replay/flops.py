"""FLOPs of a step as a source counts them: what turns its FLOP/s into seconds."""

from __future__ import annotations

from meshwright.replay.feed_forwards import Cells, feed_forward_width, gates

_REPEATED = ("megatron", "96*B*s*l*h^2", "hardware FLOPs incl. full recompute")
_THREEFOLD = ("3x fwd", "full attention")
_NEEDED = ("layers", "hidden", "heads", "vocab", "seq", "gbs")


def step_flops(run: Cells) -> float | None:
    """Of all devices in one step; None where the count is not known or a figure that it needs is not printed."""
    if uncounted(run):
        return None
    try:
        return _repeated(run) if _is_repeated(run) else _threefold(run)
    except OverflowError:
        return None


def uncounted(run: Cells) -> str:
    """Why FLOP/s of `run` give no seconds, in words; nothing where they do."""
    if not _is_repeated(run) and not all(words in run.text("flop_conv") for words in _THREEFOLD):
        return "no flop_conv that is known"
    needed = [name for name in _NEEDED if name != "heads" or not _is_repeated(run)]
    missing = [name for name in needed if not _figure(run, name)]
    if run.number("n_experts") and not _is_repeated(run) and not (run.number("expert_ffn") or run.number("ffn")):
        missing.append("expert_ffn")
    return f"no {', '.join(missing)}" if missing else ""


def _is_repeated(run: Cells) -> bool:
    return run.text("flop_conv").startswith(_REPEATED)


def _figure(run: Cells, name: str) -> float:
    return (run.batch if name == "gbs" else run.number(name)) or 0.0


def _repeated(run: Cells) -> float:
    """2104.04473, equation 3: every layer's forward repeated, attention to all tokens."""
    layers, width, vocab, length, batch = (_figure(run, name) for name in _NEEDED if name != "heads")
    flops = 96.0 * batch * length * layers * width**2
    return flops * (1.0 + length / (6.0 * width) + vocab / (16.0 * layers * width))


def _threefold(run: Cells) -> float:
    """Three times forward: every product of layers and head, and attention to all tokens."""
    layers, width, heads, vocab, length, batch = (_figure(run, name) for name in _NEEDED)
    experts, hidden = run.number("n_experts"), feed_forward_width(run, width=int(width))
    dim = run.number("head_dim") or width / heads
    queries, keys = heads * dim, (run.number("kv_heads") or heads) * dim
    each = (3.0 if gates(run) else 2.0) * width * hidden
    chosen = (run.number("topk") or 1.0) + (run.number("n_shared") or 0.0) if experts else 1.0
    layer = 2.0 * width * (queries + keys) + chosen * each + width * (experts or 0.0) + 2.0 * length * queries
    return 3.0 * 2.0 * batch * length * (layers * layer + width * vocab)
