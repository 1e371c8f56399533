"""Byte-pair encodings as ranks of byte strings: what tiktoken runs, read from a Hugging Face tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

# How published vocabularies split text into words before any pair is merged.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = (GPT2_PATTERN, CL100K_PATTERN, O200K_PATTERN)


def pattern_for(num_ranks: int) -> str:
    """The splitting pattern of a vocabulary by its size: GPT-2's, unless it is as large as a later published one."""
    if num_ranks > 190_000:
        return O200K_PATTERN
    return CL100K_PATTERN if num_ranks > 90_000 else GPT2_PATTERN


def byte_pair_ranks(value: Mapping[str, Any]) -> dict[bytes, int] | None:
    """Ranks of a byte-level byte-pair encoding as tokenizer.json describes it; None for any other tokenizer.

    A rank is both the id and the order of merging, so merges must stand in the order of the ids they make.
    """
    model = value.get("model") or {}
    plain = (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and not model.get("ignore_merges")
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and value.get("normalizer") is None
        and _is_byte_level(value.get("pre_tokenizer"))
    )
    if not plain:
        return None
    vocabulary: Mapping[str, int] = model["vocab"]
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    made = [vocabulary.get("".join(merge), -1) for merge in merges]
    if any(later <= earlier for earlier, later in pairwise(made)):
        return None
    special = {entry["content"] for entry in value.get("added_tokens", ())}
    letters = byte_letters()
    ranks: dict[bytes, int] = {}
    for token, rank in vocabulary.items():
        if token in special:
            continue
        if any(letter not in letters for letter in token):
            return None
        ranks[bytes(letters[letter] for letter in token)] = rank
    singles = [ranks[bytes([byte])] for byte in range(256) if bytes([byte]) in ranks]
    whole = len(singles) == 256 and len(ranks) == 256 + len(made)
    return ranks if whole and (not made or max(singles) < made[0]) else None


def byte_letters() -> dict[str, int]:
    """The printable letter that byte-level vocabularies write for each byte, letter to byte (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


def _is_byte_level(splitter: Any) -> bool:
    return (
        isinstance(splitter, Mapping)
        and splitter.get("type") == "ByteLevel"
        and not splitter.get("add_prefix_space", True)
        and bool(splitter.get("use_regex", True))
    )
