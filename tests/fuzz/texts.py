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
from meshwright.data.tokenizer import load_tokenizer
from meshwright.spec.job import Source
from tests.fuzz.kind import Files, Kind, of_file, put
from tests.fuzz.mutate import break_bytes, break_text, break_value, json_text, once_in

ROWS = [{"text": f"the mill stood by a slow river {number}", "prompt": "why?"} for number in range(4)]
SAMPLE = "the mill stood by a slow river\n é ½"


def documents(rng: Random) -> tuple[Files, str]:
    """JSONL, plain text, or either packed, with spoilt lines or bytes."""
    ending = rng.choice((".jsonl", ".txt", ".jsonl.xz", ".txt.xz"))
    if ending.startswith(".jsonl"):
        lines = [json_text(rng, break_value(rng, row)) if once_in(2, rng) else json.dumps(row) for row in ROWS]
        content = "\n".join(lines).encode("utf-8", "surrogatepass")
    else:
        content = break_bytes(rng, (SAMPLE * 5).encode())
    if ending.endswith(".xz"):
        content = lzma.compress(content, preset=0)
    told = break_bytes(rng, content) if rng.randrange(5) > 2 else content
    return {f"text{ending}": told}, rng.choice(("", "prompt"))


def read_documents(made: tuple[Files, str], folder: Path) -> object:
    files, prompt_field = made
    put(folder, files)
    (name,) = files
    source = Source(path=str(folder / name), prompt_field=prompt_field)
    return [piece.text.encode() for piece in read_pieces(source)]


def use_tokenizer(path: Path) -> object:
    tokenizer = load_tokenizer(path)
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


def tokenizer_file(rng: Random) -> Files:
    return {"tokenizer.json": json_text(rng, break_value(rng, tokenizer_json()))}


def saved_ranks(rng: Random) -> Files:
    ranks = {base64.b64encode(bytes([byte])).decode(): byte for byte in range(256)}
    told = {"kind": "tiktoken", "pattern": GPT2_PATTERN, "specials": {"<|endoftext|>": 256}, "ranks": ranks}
    return {"saved.json": json_text(rng, break_value(rng, told))}


def ranks_file(rng: Random) -> Files:
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    return {"x.tiktoken": break_text(rng, "\n".join(lines))}


KINDS = (
    Kind(name="documents", make=documents, read=read_documents, share=3),
    Kind(name="tokenizer", make=tokenizer_file, read=of_file("tokenizer.json", use_tokenizer), share=0.3, quick=20),
    Kind(name="saved ranks", make=saved_ranks, read=of_file("saved.json", use_tokenizer), share=0.3, quick=20),
    Kind(name="file of ranks", make=ranks_file, read=of_file("x.tiktoken", use_tokenizer), share=0.3, quick=20),
)
