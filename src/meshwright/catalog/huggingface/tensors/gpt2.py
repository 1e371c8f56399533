"""Names of gpt2: matrices stored as (inputs, outputs), queries, keys and values in one."""

from __future__ import annotations

from meshwright.catalog.huggingface.tensors.pieces import Cut, Pieces, Table
from meshwright.spec.blocks import Attention, FeedForward, Layer
from meshwright.spec.model import ModelSpec

MASKS = (r"(.*\.)?attn\.bias", r"(.*\.)?attn\.masked_bias")


def gpt2_table(model: ModelSpec) -> Table:
    """Every parameter under `transformer.`, which the folders of the first release leave out."""
    pieces = Pieces()
    width, vocab = model.width, model.vocab
    pieces.add("embedding.tokens.weight", "transformer.wte.weight", (vocab, width))
    pieces.add("embedding.positions.weight", "transformer.wpe.weight", (model.embedding.positions, width))
    for index, layer in enumerate(model.layers):
        _add_layer(pieces.under(f"layers.{index}.", f"transformer.h.{index}."), layer)
    _add_norm(pieces, "head.norm", "transformer.ln_f", width)
    if not model.head.tied:
        pieces.add("head.output.weight", "lm_head.weight", (vocab, width))
    tied = (r"lm_head\.weight",) if model.head.tied else ()
    return Table(pieces=tuple(pieces.found), left_out=(*MASKS, *tied), prefix="transformer.")


def _add_layer(pieces: Pieces, layer: Layer) -> None:
    mixer, transform = layer.mixer, layer.transform
    assert isinstance(mixer, Attention), "gpt2 mixes by attention"
    assert isinstance(transform, FeedForward), "gpt2 has no experts"
    width, hidden, rows = transform.width, transform.hidden, mixer.heads * mixer.head_dim
    for index, name in enumerate(("query", "key", "value")):
        cut = Cut(dim=0, start=index * rows, stop=(index + 1) * rows)
        pieces.matrix(f"mixer.{name}", "attn.c_attn", (rows, width), bias=True, transposed=True, cut=cut)
    pieces.matrix("mixer.output", "attn.c_proj", (width, rows), bias=True, transposed=True)
    _add_norm(pieces, "mixer_norm", "ln_1", width)
    pieces.matrix("transform.up", "mlp.c_fc", (hidden, width), bias=True, transposed=True)
    pieces.matrix("transform.down", "mlp.c_proj", (width, hidden), bias=True, transposed=True)
    _add_norm(pieces, "transform_norm", "ln_2", width)


def _add_norm(pieces: Pieces, ours: str, theirs: str, width: int) -> None:
    for part in ("weight", "bias"):
        pieces.add(f"{ours}.{part}", f"{theirs}.{part}", (width,))
