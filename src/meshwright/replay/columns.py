"""What a cell may hold: numbers with their ranges, words with their choices. Blank means that the source is silent."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from meshwright.replay.words import KINDS, YES_OR_NO, model_kind, yes_or_no


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number between `least` and `most`; `whole` numbers alone where they count something."""

    least: float
    most: float
    whole: bool = False


def _count(most: float) -> Number:
    return Number(least=1, most=most, whole=True)


_DEGREES = ("tp", "pp", "dp", "cp", "ep", "etp", "vpp")
NUMBERS: Mapping[str, Number] = {
    **dict.fromkeys(_DEGREES, _count(1e7)),
    **dict.fromkeys(("mbs", "gbs", "ga"), _count(1e9)),
    "layers": _count(1e5),
    "hidden": _count(1e6),
    "heads": _count(1e5),
    "kv_heads": _count(1e5),
    "head_dim": _count(1e5),
    "ffn": _count(1e7),
    "n_experts": _count(1e6),
    "topk": _count(1e6),
    "expert_ffn": _count(1e7),
    "n_shared": Number(least=0, most=1e4, whole=True),
    "params_b": Number(least=1e-4, most=1e5),
    "vocab": _count(1e8),
    "seq": _count(1e8),
    "n_gpus": _count(1e7),
    "gpus_per_node": _count(1e4),
    "gpu_mem_gb": Number(least=1.0, most=1e5),
    "inter_gbit_per_node": Number(least=1e-3, most=1e6),
    "iter_s": Number(least=1e-6, most=1e7),
    "tokens_s_gpu": Number(least=1e-3, most=1e9),
    "tflops_gpu": Number(least=1e-3, most=1e6),
    "mem_gb": Number(least=1e-3, most=1e5),
    "noise_pct": Number(least=0.0, most=100.0),
}
WORDS: Mapping[str, tuple[str, ...]] = {
    "status": ("ok", "oom", "fail"),
    **dict.fromkeys(YES_OR_NO, ("yes", "no")),
}


LISTS = ("n_gpus", "gpus_per_node", "gpu_mem_gb", "inter_gbit_per_node", "seq")
_MULTIPLES = {"k": 2**10, "m": 2**20}  # of tokens: 128k, 1M


@lru_cache(maxsize=4096)
def values(name: str, text: str) -> tuple[float, ...]:
    """The numbers of a cell: one, or where the column may hold several those that + or / joins. Raises ValueError."""
    parts = re.split(r"\s*[+/]\s*", text) if name in LISTS else [text]
    return tuple(_value(name, part.strip()) for part in parts)


def _value(name: str, text: str) -> float:
    if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", text):
        return float(text.replace(",", ""))
    if name == "seq" and (found := re.fullmatch(r"(\d+)\s*([kKM])", text)):
        return float(int(found[1]) * _MULTIPLES[found[2].lower()])
    return float(text.replace("_", "?"))


def faults(columns: Mapping[str, str]) -> Iterator[str]:
    """Every cell that cannot be read, in words."""
    for name, number in NUMBERS.items():
        text = columns.get(name, "")
        if text and (fault := _number_fault(name, text, number)):
            yield f"{name}: {text!r} {fault}"
    for name, choices in WORDS.items():
        text = columns.get(name, "")
        if text and (yes_or_no(name, text) is None if name in YES_OR_NO else text.lower() not in choices):
            yield f"{name}: {text!r} is not one of {', '.join(choices)}"
    arch = columns.get("arch", "")
    if model_kind(arch) is None:
        yield f"arch: {arch!r} is not one of {', '.join(KINDS)}, mamba, jamba, linear, or a name that means one"
    if not columns.get("status", ""):
        yield "status is blank: ok, oom or fail"


def _number_fault(name: str, text: str, number: Number) -> str:
    try:
        found = values(name, text)
    except ValueError:
        thousands = name == "vocab" and re.fullmatch(r"(\d+(?:\.\d+)?)\s*k", text, re.IGNORECASE)
        tokens = float(thousands[1]) if thousands else 0.0
        both = f": {tokens * 1000:,.0f} and {tokens * 1024:,.0f} are both called so, write one of them"
        return f"is not a number{both if thousands else ''}"
    if not all(math.isfinite(value) and number.least <= value <= number.most for value in found):
        return f"is not between {number.least:g} and {number.most:g}"
    return "is not a whole number" if number.whole and any(value != int(value) for value in found) else ""
