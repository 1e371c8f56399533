"""Names of a decoder as llama has them, and of what other families do otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from meshwright.catalog.huggingface.tensors.attention import add_attention, add_latent_attention
from meshwright.catalog.huggingface.tensors.feed_forward import ExpertNames, add_feed_forward, add_mixture
from meshwright.catalog.huggingface.tensors.pieces import Pieces, Table
from meshwright.spec.blocks import Attention, FeedForward, LatentAttention, Layer, Mixture, Norm
from meshwright.spec.model import ModelSpec

AS_LLAMA = ExpertNames()
BUFFERS = (r".*\.rotary_emb\.inv_freq",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a family stores a decoder.

    `root` begins every name but that of the head. `norm_offset` is what the arithmetic adds to a stored scale of a
    norm. `planes`: rotary features are stored plane by plane. `fused`: queries, keys and values in one matrix, and
    gate and up.
    """

    root: str = "model."
    transform: str = "mlp"
    mixture: str = "mlp"
    experts: ExpertNames = AS_LLAMA
    fused: bool = False
    planes: bool = False
    norm_offset: float = 0.0
    rest: tuple[str, ...] = ()


class AddLayer(Protocol):
    def __call__(self, pieces: Pieces, layer: Layer, style: Style, /) -> None:
        """Every parameter of one layer."""


def decoder_table(model: ModelSpec, style: Style, *, add_layer: AddLayer | None = None) -> Table:
    """Every parameter of a text decoder under the style's root and `lm_head`; layers as llama has them unless
    `add_layer` names them otherwise."""
    pieces = Pieces()
    width, vocab, offset = model.width, model.vocab, style.norm_offset
    pieces.add("embedding.tokens.weight", f"{style.root}embed_tokens.weight", (vocab, width))
    for index, layer in enumerate(model.layers):
        (add_layer or _add_layer)(pieces.under(f"layers.{index}.", f"{style.root}layers.{index}."), layer, style)
    add_norm(pieces, "head.norm", f"{style.root}norm", model.head.norm, offset=offset)
    if not model.head.tied:
        pieces.add("head.output.weight", "lm_head.weight", (vocab, width))
    tied = (r"lm_head\.weight",) if model.head.tied else ()
    return Table(pieces=tuple(pieces.found), left_out=(*BUFFERS, *tied), rest=style.rest, prefix="model.")


def _add_layer(pieces: Pieces, layer: Layer, style: Style) -> None:
    mixer, transform, offset = layer.mixer, layer.transform, style.norm_offset
    inner = pieces.under("mixer.", "self_attn.")
    if isinstance(mixer, LatentAttention):
        add_latent_attention(inner, mixer, planes=style.planes)
    else:
        assert isinstance(mixer, Attention), "every family that is read mixes by attention"
        add_attention(inner, mixer, fused=style.fused, planes=style.planes)
    # With norms after the branches the one after attention takes the name that llama gives to the one before mlp.
    before = "post_attention_layernorm" if transform is None or transform.post_norm is None else None
    add_norm(pieces, "mixer_norm", "input_layernorm", mixer.norm, offset=offset)
    add_norm(pieces, "mixer_post_norm", "post_attention_layernorm", mixer.post_norm, offset=offset)
    if isinstance(transform, FeedForward):
        add_feed_forward(pieces.under("transform.", f"{style.transform}."), transform, fused=style.fused)
    elif isinstance(transform, Mixture):
        add_mixture(pieces.under("transform.", f"{style.mixture}."), transform, style.experts)
    if transform is not None:
        name = before or "pre_feedforward_layernorm"
        add_norm(pieces, "transform_norm", name, transform.norm, offset=offset)
        add_norm(pieces, "transform_post_norm", "post_feedforward_layernorm", transform.post_norm, offset=offset)


def add_norm(pieces: Pieces, ours: str, theirs: str, norm: Norm | None, *, offset: float = 0.0) -> None:
    """The scale of a norm where there is one, stored less `offset`."""
    if norm is not None:
        pieces.add(f"{ours}.weight", f"{theirs}.weight", (norm.width,), offset=offset)
