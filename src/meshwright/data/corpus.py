"""Prepare a corpus: tokenizer, shards, held-out documents, and the two endless orders of sequences."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.data.documents import Progress, silent
from meshwright.data.pack import Packed, Stream
from meshwright.data.permute import permute
from meshwright.data.shards import Shard, exclusive, open_shard, source_digest, unwritable
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.data.train_tokenizer import parse_vocab, train_tokenizer
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.job import DataSpec
from meshwright.spec.paths import expanded

NEAR = 0.1  # of the tokens to hold out: how far from them whole documents may end
Stretch = tuple[int, int]
_SPLIT = "tokens"  # names how text is held out: a run that was begun with another split does not go on with this one
_HELD_OUT_KEY = 20021  # the documents held out do not depend on the seed of the run, so that runs compare


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """Text ready to train on. `validation` is None when nothing is held out. `digest` names text and tokenizer."""

    tokenizer: Tokenizer
    train: Packed
    validation: Packed | None
    digest: str
    num_documents: int
    text_bytes: int
    shards: tuple[Shard, ...]

    def verify(self) -> int:
        """How many bytes of tokenised text there are, each as it was written. Raises EnvironmentUnfit that says where
        one is not; the next start makes that source anew."""
        return sum(shard.verify() for shard in self.shards)


def prepare(
    spec: DataSpec,
    *,
    sequence_length: int,
    seed: int,
    cache: Path | str | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """The corpus that `spec` describes; tokenised at most once for the same text and tokenizer.

    The cache is `spec.cache` when set, else `cache`; one of them must be given. The documents held out are the same
    for every seed and share nothing with those of training. Raises ConfigError with every problem of the
    specification, and for text that is missing, empty, unreadable or shorter than two sequences.
    """
    folder = spec.cache or cache
    problems = _problems(spec, sequence_length=sequence_length, cache=folder)
    if problems:
        raise ConfigError(problems)
    place = expanded(str(folder))
    tell = progress or silent
    tokenizer = _tokenizer(spec, cache=place, progress=tell)
    shards = [open_shard(source, tokenizer=tokenizer, cache=place, progress=tell) for source in spec.sources]
    training, held_out = [], []
    for source, shard in zip(spec.sources, shards, strict=True):
        ours, theirs = _split(shard, fraction=spec.validation_fraction, sequence_length=sequence_length)
        training.append(Stream(shard.tokens, stretches=ours, weight=source.weight, masked=shard.masked))
        held_out.append(Stream(shard.tokens, stretches=theirs, weight=source.weight, masked=shard.masked))
        _check_lengths(training[-1], held_out[-1], spec, source.path, sequence_length)
    text_bytes, tokens = sum(shard.text_bytes for shard in shards), sum(len(shard.tokens) for shard in shards)

    def packed(streams: Sequence[Stream], order: int) -> Packed:
        return Packed(
            streams,
            sequence_length=sequence_length,
            seed=order,
            end=tokenizer.end,
            byte_lengths=tokenizer.byte_lengths,
            mean_bytes=text_bytes / tokens,
        )

    return Corpus(
        tokenizer=tokenizer,
        train=packed(training, seed),
        validation=packed(held_out, _HELD_OUT_KEY) if spec.validation_fraction else None,
        digest=hashlib.sha256(":".join((_SPLIT, *(shard.digest for shard in shards))).encode()).hexdigest()[:16],
        num_documents=sum(shard.num_documents for shard in shards),
        text_bytes=text_bytes,
        shards=tuple(shards),
    )


def _problems(spec: DataSpec, *, sequence_length: int, cache: Path | str | None) -> list[Problem]:
    found = []
    if not spec.sources:
        found.append(Problem(what="no text is given", where="data.sources", fix="name a JSONL, text or xz file"))
    for index, source in enumerate(spec.sources):
        if not source.weight > 0:
            found.append(Problem(what=f"weight {source.weight} is not above 0", where=f"data.sources[{index}].weight"))
    if faint := spec.faintest:
        found.append(Problem(what=faint, where="data.sources", fix="leave such sources out, or give them more"))
    if not 0 <= spec.validation_fraction < 1:
        what = f"{spec.validation_fraction} is not a fraction from 0 to below 1"
        found.append(Problem(what=what, where="data.validation_fraction"))
    if sequence_length < 1:
        found.append(Problem(what=f"{sequence_length} is not a length", where="sequence_length"))
    if cache is None:
        found.append(Problem(what="no folder for tokenised text is given", where="data.cache"))
    return found


def _tokenizer(spec: DataSpec, *, cache: Path, progress: Progress) -> Tokenizer:
    if not spec.tokenizer.startswith("train:"):
        return load_tokenizer(spec.tokenizer)
    vocab = parse_vocab(spec.tokenizer)
    name = ":".join((str(vocab), *(source_digest(source) for source in spec.sources)))
    file = cache / f"tokenizer-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"
    with exclusive(file.with_suffix(".lock")):
        if not file.is_file():
            trained = train_tokenizer(spec.sources, vocab=vocab, progress=progress)
            draft = file.with_suffix(f".{os.getpid()}.tmp")
            try:
                draft.write_text(trained.to_json(), encoding="utf-8")
                draft.replace(file)
            except OSError as error:
                raise unwritable(cache, error) from error
    return load_tokenizer(file)


def _split(shard: Shard, *, fraction: float, sequence_length: int) -> tuple[list[Stretch], list[Stretch]]:
    """Stretches of the shard to train on and stretches held out: near `fraction` of its tokens, one window at least.

    Documents are held out whole, in a fixed shuffled order, where that comes within NEAR of the share asked for.
    Where documents are too long for that, the last part of the next one makes up the rest. It comes first of what is
    held out, so that no other document seems to go on in it.
    """
    total, number = len(shard.tokens), shard.num_documents
    if not fraction:
        return [(0, total)], []
    key = np.full(number, _HELD_OUT_KEY, dtype=np.uint64)
    order = permute(np.arange(number, dtype=np.int64), size=number, key=key)
    reached = np.concatenate(([0], np.cumsum(np.diff(shard.offsets)[order])))
    target = max(sequence_length + 1, round(fraction * total))
    below = int(np.searchsorted(reached, target, side="right")) - 1
    gaps = {take: abs(int(reached[take]) - target) for take in (below, below + 1) if 0 < take < number}
    near = [take for take, gap in gaps.items() if gap <= NEAR * target and reached[take] > sequence_length]
    whole = min(near, key=lambda take: gaps[take]) if near else min(below, number - 1)
    held = np.zeros(number, dtype=bool)
    held[order[:whole]] = True
    training, held_out = _stretches(shard, ~held), _stretches(shard, held)
    if near:
        return training, held_out
    stop = int(shard.offsets[order[whole] + 1])
    start = max(int(shard.offsets[order[whole]]), stop - (target - int(reached[whole])))
    halves = [half for first, last in training for half in ((first, min(last, start)), (max(first, stop), last))]
    return [half for half in halves if half[0] < half[1]], [(start, stop), *held_out]


def _stretches(shard: Shard, chosen: np.ndarray) -> list[Stretch]:
    """The chosen documents as the fewest stretches of neighbours."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], chosen.astype(np.int8), [0]))))
    return [(int(shard.offsets[first]), int(shard.offsets[last])) for first, last in edges.reshape(-1, 2)]


def _check_lengths(train: Stream, held_out: Stream, spec: DataSpec, where: str, sequence_length: int) -> None:
    wanted = {"training": train} | ({"validation": held_out} if spec.validation_fraction else {})
    short = {name: len(stream) for name, stream in wanted.items() if not stream.windows(sequence_length)}
    if short:
        tokens = " and ".join(f"{count:,} tokens for {name}" for name, count in short.items())
        why = f"it has {tokens}; a sequence needs {sequence_length + 1:,}"
        fix = "give more text or a shorter sequence_length"
        raise ConfigError(Problem(what="too little text", where=where, why=why, fix=fix))
