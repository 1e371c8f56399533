"""Text to train on and tokenizers, spoilt."""

from __future__ import annotations

import base64
import json
import lzma
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from meshwright.data.documents import read_pieces
from meshwright.data.ranks import GPT2_PATTERN, byte_letters
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.spec.job import Source
from tests.fuzz.kind import Kind
from tests.fuzz.mutate import break_bytes, break_text, break_value, json_text
from tests.fuzz.specs import put

ROWS = [{"text": f"the mill stood by a slow river {number}", "prompt": "why?"} for number in range(4)]
SAMPLE = "the mill stood by a slow river\n é ½"


def documents(rng: Random, folder: Path) -> object:
    """JSONL, plain text, or either packed, with spoilt lines or bytes."""
    ending = rng.choice((".jsonl", ".txt", ".jsonl.xz", ".txt.xz"))
    if ending.startswith(".jsonl"):
        lines = [json_text(rng, break_value(rng, row)) if rng.random() < 0.5 else json.dumps(row) for row in ROWS]
        content = "\n".join(lines).encode("utf-8", "surrogatepass")
    else:
        content = break_bytes(rng, (SAMPLE * 5).encode())
    if ending.endswith(".xz"):
        content = lzma.compress(content, preset=0)
    path = folder / f"text{ending}"
    path.write_bytes(break_bytes(rng, content) if rng.random() < 0.4 else content)
    source = Source(path=str(path), prompt_field=rng.choice(("", "prompt")))
    return [piece.text.encode() for piece in read_pieces(source)]


def used(tokenizer: Tokenizer) -> object:
    (tokens,) = tokenizer.encode_batch([SAMPLE])
    assert all(0 <= token < tokenizer.vocab for token in tokens), "an id beyond the vocabulary"
    return tokenizer.decode(tokens.tolist()), tokenizer.end


@cache
def tokenizer_json() -> Any:
    """A small byte-pair encoding as the tokenizers library writes it."""
    vocab = dict(byte_letters())
    vocab |= {"th": 256, "the": 257}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special("<|endoftext|>", 258)],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["t h", "th e"], "dropout": None, "unk_token": None},
    }


def _special(name: str, number: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": name, **flags}


def tokenizer_file(rng: Random, folder: Path) -> object:
    text = json_text(rng, break_value(rng, tokenizer_json()))
    (folder / "tokenizer.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    return used(load_tokenizer(folder / "tokenizer.json"))


def saved_ranks(rng: Random, folder: Path) -> object:
    ranks = {base64.b64encode(bytes([byte])).decode(): byte for byte in range(256)}
    told = {"kind": "tiktoken", "pattern": GPT2_PATTERN, "specials": {"<|endoftext|>": 256}, "ranks": ranks}
    put(folder, "saved.json", json_text(rng, break_value(rng, told)))
    return used(load_tokenizer(folder / "saved.json"))


def ranks_file(rng: Random, folder: Path) -> object:
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    (folder / "x.tiktoken").write_bytes(break_text(rng, "\n".join(lines)).encode("utf-8", "surrogatepass"))
    return used(load_tokenizer(folder / "x.tiktoken"))


KINDS = (
    Kind(name="documents", attempt=documents, share=3),
    Kind(name="tokenizer", attempt=tokenizer_file, share=0.3, quick=20),
    Kind(name="saved ranks", attempt=saved_ranks, share=0.3, quick=20),
    Kind(name="file of ranks", attempt=ranks_file, share=0.3, quick=20),
)
