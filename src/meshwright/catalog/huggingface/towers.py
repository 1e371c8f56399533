"""Vision encoders beside a decoder, as far as meshwright knows them: how many parameters they have."""

from __future__ import annotations

from meshwright.catalog.huggingface.reader import Reader
from meshwright.spec.model import Tower


def llama4_vision(reader: Reader, *, width: int) -> Tower:
    """The vision model of Llama 4, its adapter and its projection onto `width`; absent keys are the class defaults."""
    hidden, inner = reader.integer("hidden_size", 768), reader.integer("intermediate_size", 5632)
    image, patch = reader.integer("image_size", 448), reader.integer("patch_size", 14)
    channels, layers = reader.integer("num_channels", 3), reader.integer("num_hidden_layers", 34)
    middle, out = reader.integer("projector_input_dim", 4096), reader.integer("projector_output_dim", 4096)
    patches = (image // patch) ** 2
    embedded = hidden + (patches + 1) * hidden + channels * patch * patch * hidden + 4 * hidden
    layer = 4 * (hidden * hidden + hidden) + 2 * hidden * inner + inner + hidden + 4 * hidden
    adapter = inner * middle + middle * out
    projected = reader.integer("vision_output_dim", 7680) * width
    return Tower(name="vision", parameters=embedded + layers * layer + adapter + projected)


def gemma4_vision(reader: Reader, *, width: int) -> Tower:
    """The vision model of Gemma 4 and its projection onto `width`."""
    hidden, inner = reader.integer("hidden_size", 768), reader.integer("intermediate_size", 3072)
    heads, patch = reader.integer("num_attention_heads", 12), reader.integer("patch_size", 16)
    kv_heads, head_dim = reader.integer("num_key_value_heads", heads), reader.integer("head_dim", 64)
    positions = reader.integer("position_embedding_size", 10240)
    embedded = 2 * positions * hidden + 3 * patch * patch * hidden
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads) + 2 * head_dim
    layer = attention + 3 * hidden * inner + 4 * hidden
    layers = reader.integer("num_hidden_layers", 16)
    return Tower(name="vision", parameters=embedded + layers * layer + hidden * width)
