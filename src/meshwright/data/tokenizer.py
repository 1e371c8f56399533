"""Text to token ids and back: bytes, a Hugging Face tokenizer file, or a .tiktoken file of ranks."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from meshwright.data.documents import cut
from meshwright.data.ranks import GPT2_PATTERN, PATTERNS, byte_pair_ranks, pattern_for
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.json_text import parse_json
from meshwright.spec.paths import expanded

MOST_IDS = 1 << 22  # several times the largest vocabulary that was published
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<end_of_text>", "[EOS]")
_PANIC = "PanicException"  # what pyo3 raises where Rust panics, a class of its own in each library


class Tokenizer(Protocol):
    """What turns text into ids in [0, vocab).

    `end` is the id that stands between documents; no text encodes to it. `piecewise` says that a text cut before a
    space that follows a word encodes to the same ids part by part. `byte_lengths[t]` is how many UTF-8 bytes token
    t stands for, or None when tokens do not stand for bytes one by one.
    """

    vocab: int
    end: int
    piecewise: bool
    byte_lengths: npt.NDArray[np.int64] | None

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def to_json(self) -> str:
        """The file from which `load_tokenizer` makes this tokenizer again."""


class ByteTokenizer:
    """One token a UTF-8 byte. NUL, which no text holds, stands between documents, so the vocabulary is 256."""

    vocab = 256
    end = 0
    piecewise = True

    def __init__(self) -> None:
        lengths = np.ones(256, dtype=np.int64)
        lengths[self.end] = 0
        self.byte_lengths: npt.NDArray[np.int64] | None = lengths

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(int(token) for token in tokens if 0 < token < 256).decode(errors="replace")

    def to_json(self) -> str:
        return json.dumps({"kind": "bytes"})


class RankTokenizer:
    """Byte-level byte-pair encoding by ranks, run by tiktoken; `specials` are names that text never encodes to."""

    piecewise = True

    def __init__(self, *, ranks: Mapping[bytes, int], pattern: str, specials: Mapping[str, int], text: str) -> None:
        import tiktoken

        self._text = text
        self.vocab = max((*ranks.values(), *specials.values())) + 1
        self.end = next((specials[name] for name in _END_NAMES if name in specials), self.vocab)
        self.vocab = max(self.vocab, self.end + 1)
        self._encoding = tiktoken.Encoding(
            "ranks", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens=dict(specials)
        )
        self._known = frozenset(ranks.values())
        lengths = np.zeros(self.vocab, dtype=np.int64)
        for token, rank in ranks.items():
            lengths[rank] = len(token)
        self.byte_lengths: npt.NDArray[np.int64] | None = lengths

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        parts = [cut(text) for text in texts]
        flat = [part for group in parts for part in group]
        encoded = iter(self._encoding.encode_ordinary_batch(flat, num_threads=4))
        return [np.array([token for _ in group for token in next(encoded)], dtype=np.int64) for group in parts]

    def decode(self, tokens: Sequence[int]) -> str:
        known = [int(token) for token in tokens if token in self._known]
        return self._encoding.decode(known, errors="replace")

    def to_json(self) -> str:
        return self._text


class FileTokenizer:
    """Any Hugging Face `tokenizer.json`, run by the tokenizers library."""

    piecewise = False

    def __init__(self, text: str) -> None:
        import tokenizers

        self._text = text
        self._tokenizer = tokenizers.Tokenizer.from_str(text)
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab = max(vocabulary.values(), default=-1) + 1
        if not 0 < self.vocab <= MOST_IDS:
            raise ValueError(f"a vocabulary of {self.vocab:,} ids")
        self.end = next((vocabulary[name] for name in _END_NAMES if name in vocabulary), self.vocab)
        self.vocab = max(self.vocab, self.end + 1)
        self.byte_lengths: npt.NDArray[np.int64] | None = None

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        with _refused("the tokenizer cannot encode this text"):
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        known = [int(token) for token in tokens if 0 <= token < self.vocab and token != self.end]
        with _refused("the tokenizer cannot decode these ids"):
            return self._tokenizer.decode(known, skip_special_tokens=True)

    def to_json(self) -> str:
        return self._text


@contextmanager
def _refused(what: str, *, where: str = "") -> Iterator[None]:
    """What the tokenizers library cannot do, as a ConfigError: it raises bare Exception, and what its Rust panics with
    is none. What else is none, as a limit of time or a signal, is not the tokenizer's."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise ConfigError(Problem(what=what, where=where, why=str(error))) from error


def load_tokenizer(name: str | Path) -> Tokenizer:
    """The tokenizer that `name` says: `bytes`, or a `.json` or `.tiktoken` file. Raises ConfigError."""
    if str(name) == "bytes":
        return ByteTokenizer()
    path = expanded(name)
    if not path.is_file():
        fix = "write bytes, train:8192, or a .json or .tiktoken file"
        raise ConfigError(Problem(what="no such tokenizer file", where=str(name), fix=fix))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem(what="not a tokenizer file", where=str(name), why=str(error))) from error
    if path.suffix == ".tiktoken":
        return _from_tiktoken(text, where=str(name))
    return tokenizer_from_json(text, where=str(name))


def tokenizer_from_json(text: str, *, where: str = "tokenizer") -> Tokenizer:
    """The tokenizer whose `to_json()` is `text`, or that a Hugging Face tokenizer.json describes.

    Byte-level byte-pair encodings run on tiktoken, which gives the same ids several times faster, when every token
    of the vocabulary encodes to the same ids both ways; everything else runs on the tokenizers library.
    """
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ConfigError(Problem(what="not a tokenizer file", where=where, why=f"not JSON: {error}")) from error
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "tiktoken":
        return _saved(value, text, where=where)
    with _refused("not a tokenizer file", where=where):
        whole = FileTokenizer(text)
    return _faster(value, text, whole) or whole


def _saved(value: Mapping[str, Any], text: str, *, where: str) -> Tokenizer:
    """What `RankTokenizer.to_json` wrote."""
    try:
        ranks = {base64.b64decode(token, validate=True): rank for token, rank in value["ranks"].items()}
        pattern, specials = value["pattern"], dict(value["specials"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(Problem(what="not a tokenizer file", where=where, why=f"it is broken: {error!r}")) from error
    if pattern not in PATTERNS:
        raise ConfigError(Problem(what="it splits text in a way that is not ours", where=where, fix="write it again"))
    _check_ranks(ranks, specials, where=where)
    return RankTokenizer(ranks=ranks, pattern=pattern, specials=specials, text=text)


def _check_ranks(ranks: Mapping[bytes, Any], specials: Mapping[Any, Any], *, where: str) -> None:
    """Raises ConfigError where text could not be encoded: bytes without a rank, and ids that are none or come twice."""
    missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if missing:
        what = f"{missing} single bytes have no rank" if ranks else "the file holds no ranks"
        raise ConfigError(Problem(what=what, where=where, why="text with them could not be encoded"))
    ids = [*ranks.values(), *specials.values()]
    if not all(type(number) is int and 0 <= number < MOST_IDS for number in ids) or len(set(ids)) != len(ids):
        why = f"each token has a whole number from 0 to {MOST_IDS - 1:,} of its own"
        raise ConfigError(Problem(what="a rank is no id", where=where, why=why))
    if b"" in ranks or not all(isinstance(name, str) and name for name in specials):
        raise ConfigError(Problem(what="a token is empty", where=where))


def digest_of(tokenizer: Tokenizer) -> str:
    """Sixteen hex digits that name what the tokenizer does."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()[:16]


def _from_tiktoken(text: str, *, where: str) -> Tokenizer:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            why = "a line is a token in base64 and its rank"
            raise ConfigError(Problem(what="not a line of ranks", where=f"{where}:{number}", why=why)) from error
    pattern = pattern_for(len(ranks))
    specials = {"<|endoftext|>": max(ranks.values(), default=-1) + 1}
    _check_ranks(ranks, specials, where=where)
    encoded = {base64.b64encode(token).decode(): rank for token, rank in ranks.items()}
    saved = json.dumps({"kind": "tiktoken", "pattern": pattern, "specials": specials, "ranks": encoded})
    return RankTokenizer(ranks=ranks, pattern=pattern, specials=specials, text=saved)


def _faster(value: Mapping[str, Any], text: str, whole: FileTokenizer) -> RankTokenizer | None:
    """The same tokenizer by ranks; None when it is of another kind or any token of the vocabulary disagrees."""
    try:
        ranks = byte_pair_ranks(value)
        specials = {entry["content"]: entry["id"] for entry in value.get("added_tokens", ())}
        if ranks is None:
            return None
        _check_ranks(ranks, specials, where="")
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError):
        return None
    fast = RankTokenizer(ranks=ranks, pattern=GPT2_PATTERN, specials=specials, text=text)
    if fast.end != whole.end:
        return None
    words = [token.decode(errors="replace") for token in ranks]
    same = all(
        np.array_equal(ours, theirs)
        for ours, theirs in zip(fast.encode_batch(words), whole.encode_batch(words), strict=True)
    )
    return fast if same else None
