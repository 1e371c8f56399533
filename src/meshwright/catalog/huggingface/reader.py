"""Reads a config.json key by key and collects everything that is wrong with it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from meshwright.catalog.decoders.shapes import nearest_divisor
from meshwright.catalog.model_ranges import MOST, MOST_LAYERS
from meshwright.spec.blocks import Activation
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.positions import Rotary, RotaryScaling

ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "silu": Activation.SILU,
        "swish": Activation.SILU,
        "gelu": Activation.GELU,
        "gelu_new": Activation.GELU_TANH,
        "gelu_pytorch_tanh": Activation.GELU_TANH,
        "gelu_fast": Activation.GELU_TANH,
        "relu": Activation.RELU,
        "relu2": Activation.RELU_SQUARED,
    }
)
PROPORTIONAL = "proportional"  # a share of the planes turns, by the frequencies of all of them


class Reader:
    """A table of a config. A key that is missing or odd is noted, and a harmless value stands in until `finish`."""

    def __init__(self, values: Mapping[str, Any], *, where: str = "", problems: list[Problem] | None = None) -> None:
        self.values, self.where = values, where
        self.problems: list[Problem] = [] if problems is None else problems

    def finish(self) -> None:
        """Raise ConfigError with every problem noted so far, if any."""
        if self.problems:
            raise ConfigError(dict.fromkeys(self.problems))

    def note(self, key: str, what: str, *, why: str = "", fix: str = "") -> None:
        where = f"{self.where}.{key}" if self.where else key
        self.problems.append(Problem(what=what, where=where, why=why, fix=fix))

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def only(self, key: str, value: str | bool | int) -> None:
        """Of this key the family is read with one value alone, which is also its default; another one is noted."""
        if self.has(key) and self.values[key] != value:
            self.note(key, f"{self.values[key]!r} is not supported", fix=f"only {value!r} is read")

    def usually(self, **defaults: Any) -> Reader:
        """This table with what the family has where a key is not there; its problems are noted with ours."""
        told = {key: value for key, value in self.values.items() if value is not None or key not in defaults}
        return Reader({**defaults, **told}, where=self.where, problems=self.problems)

    def has_by_layer(self, key: str, *, kind: str) -> bool:
        """Whether the table under `key` has an entry for layers of this kind."""
        table = self.values.get(key)
        return isinstance(table, Mapping) and isinstance(table.get(kind), Mapping)

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = MOST) -> int:
        """A whole number from `least` to `most`; without a default it must be there."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                self.note(key, "is missing")
            return max(least, 1) if default is None else default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.note(key, f"expected a whole number from {least}, got {value!r}")
            return max(least, 1)
        if value > most:
            self.note(key, f"{str(value)[:40]} is more than {most}")
            return 1
        return value

    def maybe_integer(self, key: str) -> int | None:
        return self.integer(key) if self.has(key) else None

    def number(self, key: str, default: float) -> float:
        """A number above zero."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            self.note(key, f"expected a number above 0, got {value!r}")
            return default
        return float(value)

    def maybe_number(self, key: str) -> float | None:
        return self.number(key, 0.0) if self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.note(key, f"expected true or false, got {value!r}")
            return default
        return value

    def items(self, key: str, *, length: int) -> tuple[Any, ...] | None:
        """A list of `length` values; None when there is none."""
        value = self.values.get(key)
        if value is None or value == []:
            return None
        if not isinstance(value, list) or len(value) != length:
            self.note(key, f"expected a list of {length} values, got {_brief(value)}")
            return None
        return tuple(value)

    def indexes(self, key: str) -> tuple[int, ...]:
        """A list of layer indexes; empty when there is none."""
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            self.note(key, f"expected a list of layers, got {_brief(value)}")
            return ()
        return tuple(value)

    def table(self, key: str) -> Reader:
        """The table under `key`, empty when there is none; its problems are noted with ours."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            self.note(key, f"expected a table, got {value!r}")
            value = None
        where = f"{self.where}.{key}" if self.where else key
        return Reader(value or {}, where=where, problems=self.problems)

    def activation(self, *keys: str) -> Activation:
        """The activation under the first of `keys` that is there; SiLU when none is."""
        key = next((key for key in keys if self.has(key)), None)
        if key is None:
            return Activation.SILU
        value = self.values[key]
        if not isinstance(value, str) or value not in ACTIVATIONS:
            self.note(key, f"activation {value!r} is unknown", fix=f"one of {', '.join(sorted(ACTIVATIONS))}")
            return Activation.SILU
        return ACTIVATIONS[value]

    def layers(self, key: str = "num_hidden_layers") -> int:
        return self.integer(key, most=MOST_LAYERS)

    def layer_types(self, default: Sequence[str], *, known: Sequence[str]) -> tuple[str, ...]:
        """One of `known` for each layer."""
        found = self.items("layer_types", length=len(default)) or tuple(default)
        odd = sorted({str(kind) for kind in found if kind not in known})
        if odd:
            self.note("layer_types", f"unknown {', '.join(odd)}", fix=f"one of {', '.join(known)}")
        return tuple(str(kind) for kind in found)

    def heads(self) -> Heads:
        """Query heads, key-value heads and their width, checked against each other and the model's width."""
        before = len(self.problems)
        width, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", heads)
        sound = len(self.problems) == before
        if sound and heads % kv_heads:
            fix = f"use {nearest_divisor(heads, kv_heads)}"
            self.note("num_key_value_heads", f"{kv_heads} does not divide {heads} heads", fix=fix)
        if sound and not self.has("head_dim") and width % heads:
            self.note("num_attention_heads", f"{heads} does not divide hidden_size {width}", fix="say head_dim")
        return Heads(width, heads, kv_heads, self.integer("head_dim", max(width // heads, 1)))

    def stretch(self) -> Reader:
        """Where the stretching of rotary frequencies is told: an entry of its own, or beside their base."""
        return self.table("rope_scaling") if self.has("rope_scaling") else self.table("rope_parameters")

    def rotary(self, head_dim: int, *, kind: str | None = None) -> Rotary:
        """Rotary positions of a head; `kind` picks a layer type's entry where they are given by layer type."""
        parameters = self.table("rope_parameters")
        if kind is not None and isinstance(parameters.values.get(kind), Mapping):
            parameters = parameters.table(kind)
        theta = parameters.number("rope_theta", self.number("rope_theta", 10000.0))
        fraction = parameters.number("partial_rotary_factor", self.number("partial_rotary_factor", 1.0))
        if fraction > 1:
            parameters.note("partial_rotary_factor", f"{fraction} is more than 1")
        scaling = self.table("rope_scaling") if self.has("rope_scaling") else parameters
        if _kind(scaling) == PROPORTIONAL:
            planes = int(head_dim * fraction // 2) if fraction < 1 else None
            return Rotary(dims=head_dim, theta=theta, scaling=_scaling(scaling), planes=planes)
        return Rotary(dims=int(head_dim * fraction), theta=theta, scaling=_scaling(scaling))


class Heads:
    """How attention divides the model's width."""

    __slots__ = ("head_dim", "heads", "kv_heads", "width")

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int) -> None:
        self.width, self.heads, self.kv_heads, self.head_dim = width, heads, kv_heads, head_dim


def _kind(reader: Reader) -> object:
    return reader.values.get("rope_type", reader.values.get("type", "default"))


def _scaling(reader: Reader) -> RotaryScaling | None:
    kind = _kind(reader)
    if kind in ("default", None):
        return None
    if kind == PROPORTIONAL:
        factor = reader.number("factor", 1.0)
        return RotaryScaling(kind="linear", factor=factor) if factor != 1.0 else None
    low, high = ("beta_slow", "beta_fast") if kind == "yarn" else ("low_freq_factor", "high_freq_factor")
    return RotaryScaling(
        kind=str(kind),
        factor=reader.number("factor", 1.0),
        low_frequency=reader.number(low, 1.0),
        high_frequency=reader.number(high, 32.0 if kind == "yarn" else 4.0),
        trained_positions=reader.integer("original_max_position_embeddings", 8192),
        gain=_gain(reader) if kind == "yarn" else None,
        truncate=reader.flag("truncate", True) if kind == "yarn" else True,
    )


def yarn_gain(factor: float, weight: float) -> float:
    """How much longer a context of `factor` times the trained one makes queries and keys (YaRN, 2309.00071)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _gain(reader: Reader) -> float | None:
    """Of cosines and sines; None where the config leaves it to the factor alone."""
    if reader.has("attention_factor"):
        return reader.number("attention_factor", 1.0)
    if not reader.has("mscale") or not reader.has("mscale_all_dim"):
        return None
    factor = reader.number("factor", 1.0)
    return yarn_gain(factor, reader.number("mscale", 1.0)) / yarn_gain(factor, reader.number("mscale_all_dim", 1.0))


def _brief(value: object) -> str:
    return f"{len(value)} values" if isinstance(value, list) else repr(value)
