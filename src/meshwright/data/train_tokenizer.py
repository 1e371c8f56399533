"""A byte-level byte-pair encoding trained on the first megabytes of a corpus (1508.07909, bytes as in GPT-2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.data.documents import Progress, read_pieces, silent
from meshwright.data.tokenizer import Tokenizer, tokenizer_from_json
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.job import Source

TRAINING_BYTES = 4_000_000
SMALLEST_VOCAB = 257
LARGEST_VOCAB = 1_000_000


def parse_vocab(name: str) -> int:
    """8192 of `train:8192`. Raises ConfigError when it is no vocabulary that holds every byte and the end token."""
    _, _, number = name.partition(":")
    if not number.isdecimal() or not SMALLEST_VOCAB <= int(number) <= LARGEST_VOCAB:
        why = f"a vocabulary has {SMALLEST_VOCAB} to {LARGEST_VOCAB:,} tokens: 256 bytes, the end token and merges"
        raise ConfigError(Problem(what=f"{name!r} is no tokenizer", where="data.tokenizer", why=why, fix="train:8192"))
    return int(number)


def train_tokenizer(sources: Sequence[Source], *, vocab: int, progress: Progress = silent) -> Tokenizer:
    """A tokenizer of `vocab` tokens learned from the first TRAINING_BYTES of the sources together.

    Each source gives an equal part. The same text gives the same tokenizer. A corpus too small to find `vocab`
    pairs gives a smaller vocabulary. Raises ConfigError when there is no text.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    texts = [text for source in sources for text in _head(source, TRAINING_BYTES // len(sources))]
    if not texts:
        raise ConfigError(Problem(what="the corpus is empty", where=", ".join(source.path for source in sources)))
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    total = float(sum(len(text) for text in texts))

    def told() -> Iterator[str]:
        done = 0
        for text in texts:
            progress("training the tokenizer", done, total)
            yield text
            done += len(text)

    model.train_from_iterator(told(), trainer=trainer)
    progress("training the tokenizer", total, total)
    return tokenizer_from_json(model.to_str())


def _head(source: Source, limit: int) -> Iterator[str]:
    taken = 0
    for piece in read_pieces(source):
        yield piece.text
        taken += len(piece.text.encode())
        if taken >= limit:
            return
