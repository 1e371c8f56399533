"""Models with Mamba-2 layers: mamba2, nemotron_h, bamba, falcon_h1, granitemoehybrid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from meshwright.catalog.huggingface.dense import attention_of, decoder_of, feed_forward_of, norm_of
from meshwright.catalog.huggingface.latent import BIAS_RATE
from meshwright.catalog.huggingface.mixture import mixture_of
from meshwright.catalog.huggingface.reader import Reader
from meshwright.catalog.hybrids import single
from meshwright.spec.blocks import Activation, Attention, FeedForward, Layer, Mixture, Norm, Recurrence
from meshwright.spec.model import ModelSpec
from meshwright.spec.routing import Routing, Score, Weighing

UNBOUNDED = 2**20  # positions of a model that no table of positions ends
MAMBA, ATTENTION = "mamba", "attention"
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "M": MAMBA,
        "*": ATTENTION,
        "-": "mlp",
        "E": "moe",
        "linear_attention": MAMBA,
        "full_attention": ATTENTION,
        **{kind: kind for kind in (MAMBA, ATTENTION, "mlp", "moe")},
    }
)


def mamba2(reader: Reader, *, name: str, source: str) -> ModelSpec:
    """Layers of a state space alone."""
    width = reader.integer("hidden_size")
    heads, head_dim = reader.integer("num_heads", 128), reader.integer("head_dim", 64)
    reader.only("use_bias", False)
    reader.only("use_conv_bias", True)
    reader.only("rms_norm", True)
    if reader.integer("expand", 2) * width != heads * head_dim:
        reader.note("num_heads", f"{heads} heads of {head_dim} are not the width {width} times expand")
    mixer = Recurrence(
        width=width,
        inner=heads * head_dim,
        heads=heads,
        state=reader.integer("state_size", 128),
        groups=reader.integer("n_groups", 8),
        convolution=reader.integer("conv_kernel", 4),
        norm=norm_of(reader, width),
    )
    return decoder_of(reader, (single(mixer),) * reader.layers(), name=name, source=source, positions=UNBOUNDED)


def nemotron_h(reader: Reader, *, name: str, source: str) -> ModelSpec:
    """Layers of one part each, by a pattern; attention without positions, squared ReLUs, two matrices an expert.

    Layers that predict further tokens are not counted.
    """
    text = reader.usually(head_dim=reader.values.get("attention_head_dim", 128), num_key_value_heads=8)
    for key in ("moe_latent_size", "sliding_window"):
        if text.has(key):
            text.note(key, "is not supported")
    kinds = _pattern(text)
    made = {kind: single(_part(text, kind)) for kind in dict.fromkeys(kinds)}
    return decoder_of(text, tuple(made[kind] for kind in kinds), name=name, source=source)


def bamba(reader: Reader, *, name: str, source: str) -> ModelSpec:
    """Mamba-2 in all layers but those named; a gated feed-forward in each."""
    text = reader.usually(partial_rotary_factor=0.5, num_key_value_heads=8)
    count, attending = text.layers(), text.indexes("attn_layer_indices")
    if any(not 0 <= index < count for index in attending):
        text.note("attn_layer_indices", f"names other layers than the {count} there are")
    transform = feed_forward_of(text)
    full, recurrent = (Layer(mixer=mixer, transform=transform) for mixer in (attention_of(text), _prefixed(text)))
    layers = tuple(full if index in attending else recurrent for index in range(count))
    return decoder_of(text, layers, name=name, source=source, positions=262144)


def falcon_h1(reader: Reader, *, name: str, source: str) -> ModelSpec:
    """Attention and a state space side by side, which read one norm, then a gated feed-forward.

    Each layer is told as two: attention with the norm, then the state space without one and the feed-forward.
    """
    text = reader.usually(num_key_value_heads=8)
    text.only("projectors_bias", False)
    inner = text.maybe_integer("mamba_d_ssm") if "mamba_d_ssm" in text.values else 1024
    beside = replace(_prefixed(text, inner=inner), norm=None, output_norm=text.flag("mamba_rms_norm", False))
    first = single(attention_of(text))
    second = Layer(mixer=beside, transform=feed_forward_of(text))
    return decoder_of(text, (first, second) * text.layers(), name=name, source=source, positions=8192)


def granitemoehybrid(reader: Reader, *, name: str, source: str) -> ModelSpec:
    """Mamba-2 or attention, then experts beside a feed-forward for all, or that alone where there are no experts."""
    count, positions = reader.layers(), reader.values.get("position_embedding_type")
    kinds = [_KINDS[kind] for kind in reader.layer_types([MAMBA] * count, known=_MIXING) if kind in _MIXING]
    if positions not in ("rope", "nope", None):
        reader.note("position_embedding_type", f"{positions!r} is not supported", fix="one of rope, nope")
    full = replace(attention_of(reader), scale=reader.number("attention_multiplier", 1.0))
    full = full if positions == "rope" else replace(full, rotary=None)
    transform = _beside_experts(reader)
    attends, recurrent = (Layer(mixer=mixer, transform=transform) for mixer in (full, _prefixed(reader)))
    return decoder_of(
        reader,
        tuple(attends if kind == ATTENTION else recurrent for kind in kinds),
        name=name,
        source=source,
        embedding_scale=reader.number("embedding_multiplier", 1.0),
    )


_MIXING = tuple(name for name, kind in _KINDS.items() if kind in (MAMBA, ATTENTION) and len(name) > 1)


def _beside_experts(reader: Reader) -> FeedForward | Mixture:
    dense = feed_forward_of(reader, key="shared_intermediate_size")
    if not reader.integer("num_local_experts", 8, least=0):
        return dense
    experts = mixture_of(reader, hidden="intermediate_size", experts="num_local_experts")
    return replace(experts, shared=replace(dense, norm=None))


def _pattern(reader: Reader) -> tuple[str, ...]:
    """The kind of every layer, in letters or in words; unknown ones are noted."""
    key = next((key for key in ("hybrid_override_pattern", "layers_block_type", "layer_types") if reader.has(key)), "")
    told = reader.values.get(key)
    if not key or not isinstance(told, str | list) or not told:
        what = f"expected a pattern of layers, got {told!r}" if key else "is missing"
        reader.note(key or "hybrid_override_pattern", what)
        return (ATTENTION,)
    odd = sorted({str(kind) for kind in told if not isinstance(kind, str) or kind not in _KINDS})
    if odd:
        reader.note(key, f"unknown {', '.join(odd)}", fix=f"one of {', '.join(_KINDS)}")
    if reader.has("num_hidden_layers") and reader.layers() != len(told):
        reader.note("num_hidden_layers", f"{reader.layers()} is not the {len(told)} layers of {key}")
    return tuple(_KINDS[kind] for kind in told if str(kind) in _KINDS) or (ATTENTION,)


def _part(reader: Reader, kind: str) -> Attention | Recurrence | FeedForward | Mixture:
    width = reader.integer("hidden_size")
    norm = norm_of(reader, width)
    if kind == ATTENTION:
        return replace(attention_of(reader), rotary=None)
    if kind == MAMBA:
        return _of_nemotron(reader, width, norm)
    activation = reader.activation("mlp_hidden_act") if reader.has("mlp_hidden_act") else Activation.RELU_SQUARED
    bias = reader.flag("mlp_bias", False)
    plain = FeedForward(width=width, hidden=1, norm=norm, gated=False, activation=activation, bias=bias)
    if kind == "mlp":
        return replace(plain, hidden=reader.integer("intermediate_size", 21504))
    reader.only("n_shared_experts", 1)
    shared = replace(plain, norm=None, hidden=reader.integer("moe_shared_expert_intermediate_size", 7688))
    experts = mixture_of(reader, hidden="moe_intermediate_size", experts="n_routed_experts")
    normalized = reader.flag("norm_topk_prob", True)
    routing = Routing(
        score=Score.SIGMOID,
        weighing=Weighing.NORMALIZED if normalized else Weighing.SCORE,
        scale=reader.number("routed_scaling_factor", 1.0),
        groups=reader.integer("n_group", 1),
        chosen_groups=reader.integer("topk_group", 1),
        bias_rate=BIAS_RATE,
    )
    return replace(experts, gated=False, activation=activation, shared=shared, routing=routing)


def _of_nemotron(reader: Reader, width: int, norm: Norm) -> Recurrence:
    reader.only("use_bias", False)
    reader.only("mamba_proj_bias", False)
    reader.only("use_conv_bias", True)
    reader.only("mamba_conv_bias", True)
    heads = reader.integer("mamba_num_heads", 128)
    return Recurrence(
        width=width,
        inner=heads * reader.integer("mamba_head_dim", 64),
        heads=heads,
        state=reader.integer("ssm_state_size", 128),
        groups=reader.integer("n_groups", reader.integer("mamba_n_groups", 8)),
        convolution=reader.integer("conv_kernel", reader.integer("mamba_d_conv", 4)),
        norm=norm,
    )


def _prefixed(reader: Reader, *, inner: int | None = None) -> Recurrence:
    """A Mamba-2 mixer whose keys begin with `mamba_`; of `inner` features, or of the width times `mamba_expand`."""
    width = reader.integer("hidden_size")
    reader.only("mamba_proj_bias", False)
    reader.only("mamba_conv_bias", True)
    inner = inner or width * reader.integer("mamba_expand", 2)
    heads = reader.integer("mamba_n_heads", 128)
    auto = reader.values.get("mamba_d_head", "auto") in ("auto", None)
    head_dim = max(inner // heads, 1) if auto else reader.integer("mamba_d_head")
    if heads * head_dim != inner:
        reader.note("mamba_n_heads", f"{heads} heads of {head_dim} are not the {inner} features inside")
    return Recurrence(
        width=width,
        inner=inner,
        heads=heads,
        state=reader.integer("mamba_d_state", 256),
        groups=reader.integer("mamba_n_groups", 1),
        convolution=reader.integer("mamba_d_conv", 4),
        norm=norm_of(reader, width),
    )
