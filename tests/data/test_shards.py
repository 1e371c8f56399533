from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from meshwright.data.shards import open_shard, source_digest
from meshwright.data.sums import BLOCK_BYTES
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.spec.errors import ConfigError, EnvironmentUnfit
from meshwright.spec.job import Source
from tests.data.stories import story


class Counting(ByteTokenizer):
    """A byte tokenizer that knows how often it was asked."""

    calls = 0

    def encode_batch(self, texts):
        self.calls += 1
        return super().encode_batch(texts)


def test_documents_stand_in_order_behind_the_end_token(stories: Path, tmp_path: Path) -> None:
    shard = open_shard(Source(path=str(stories)), tokenizer=ByteTokenizer(), cache=tmp_path / "cache")
    assert shard.num_documents == 20
    assert shard.tokens.dtype == np.uint16
    assert shard.text_bytes == sum(len(story(number)) for number in range(20))
    for number in range(20):
        document = shard.tokens[shard.offsets[number] : shard.offsets[number + 1]]
        assert document[0] == 0
        assert bytes(document[1:].astype(np.uint8)).decode() == story(number)


def test_the_second_opening_reads_and_does_not_encode(stories: Path, tmp_path: Path) -> None:
    source, cache = Source(path=str(stories)), tmp_path / "cache"
    first = open_shard(source, tokenizer=ByteTokenizer(), cache=cache)
    counting = Counting()
    again = open_shard(source, tokenizer=counting, cache=cache)
    assert counting.calls == 0
    assert np.array_equal(first.tokens, again.tokens)
    assert [entry for entry in cache.iterdir() if entry.name.startswith(".")] == []


def test_changed_text_is_another_shard(stories: Path, tmp_path: Path) -> None:
    source, cache = Source(path=str(stories)), tmp_path / "cache"
    before = open_shard(source, tokenizer=ByteTokenizer(), cache=cache)
    old = source_digest(source)
    stories.write_text(stories.read_text() + json.dumps({"text": "one more"}) + "\n")
    after = open_shard(source, tokenizer=ByteTokenizer(), cache=cache)
    assert source_digest(source) != old
    assert after.num_documents == before.num_documents + 1


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "index.json"])
def test_a_damaged_shard_is_made_again(stories: Path, tmp_path: Path, name: str) -> None:
    source, cache = Source(path=str(stories)), tmp_path / "cache"
    whole = np.array(open_shard(source, tokenizer=ByteTokenizer(), cache=cache).tokens)
    damaged = next(cache.glob(f"shard-*/{name}"))
    damaged.write_bytes(damaged.read_bytes()[:-9])
    assert np.array_equal(open_shard(source, tokenizer=ByteTokenizer(), cache=cache).tokens, whole)


def test_nothing_is_kept_of_text_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "good"}\n{bad\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2"):
        open_shard(Source(path=str(path)), tokenizer=ByteTokenizer(), cache=tmp_path / "cache")
    assert [entry for entry in (tmp_path / "cache").iterdir() if entry.suffix != ".lock"] == []


@pytest.mark.parametrize("content", ["", "\n \n", '{"text": ""}\n'])
def test_an_empty_corpus_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / ("rows.jsonl" if "{" in content else "a.txt")
    path.write_text(content)
    with pytest.raises(ConfigError, match="the corpus is empty"):
        open_shard(Source(path=str(path)), tokenizer=ByteTokenizer(), cache=tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_said(stories: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EnvironmentUnfit, match=r"data\.cache"):
        open_shard(Source(path=str(stories)), tokenizer=ByteTokenizer(), cache=tmp_path / "file")


def test_a_large_vocabulary_takes_four_bytes(stories: Path, tmp_path: Path) -> None:
    class Large(ByteTokenizer):
        vocab = 100_000

        def to_json(self) -> str:
            return "large"

    shard = open_shard(Source(path=str(stories)), tokenizer=Large(), cache=tmp_path / "cache")
    assert shard.tokens.dtype == np.uint32


def _prepare_once(path: str, cache: str, marks: str) -> None:
    counting = Counting()
    open_shard(Source(path=path), tokenizer=counting, cache=Path(cache))
    if counting.calls:
        (Path(marks) / str(os.getpid())).touch()


def test_processes_that_ask_at_once_encode_once(stories: Path, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    context = multiprocessing.get_context("spawn")
    arguments = (str(stories), str(tmp_path / "cache"), str(marks))
    both = [context.Process(target=_prepare_once, args=arguments) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert len(list(marks.iterdir())) == 1


def turned(path: Path, *, at: int) -> None:
    """One bit of the file is another."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["offsets.bin", "tokens.bin.sums", "index.json"])
def test_a_bit_turned_in_what_is_read_whole_has_the_shard_made_again(stories: Path, tmp_path: Path, name: str) -> None:
    source, cache = Source(path=str(stories)), tmp_path / "cache"
    first = open_shard(source, tokenizer=ByteTokenizer(), cache=cache)
    path = next(cache.glob(f"shard-*/{name}"))
    turned(path, at=path.read_bytes().rindex(b"0") if name == "index.json" else 3)
    told: list[str] = []
    counting = Counting()
    again = open_shard(source, tokenizer=counting, cache=cache, progress=lambda what, _done, _total: told.append(what))
    assert counting.calls
    assert "making it anew" in told[0]
    assert (np.array(again.tokens).tolist(), again.offsets.tolist(), again.text_bytes) == (
        np.array(first.tokens).tolist(),
        first.offsets.tolist(),
        first.text_bytes,
    )


def test_a_bit_turned_in_the_text_is_found_when_it_is_read(stories: Path, tmp_path: Path) -> None:
    source, cache = Source(path=str(stories)), tmp_path / "cache"
    whole = np.array(open_shard(source, tokenizer=ByteTokenizer(), cache=cache).tokens)
    path = next(cache.glob("shard-*/tokens.bin"))
    assert BLOCK_BYTES + 100 < path.stat().st_size < 2 * BLOCK_BYTES
    turned(path, at=BLOCK_BYTES + 100)
    counting = Counting()
    shard = open_shard(source, tokenizer=counting, cache=cache)
    assert not counting.calls
    edge = BLOCK_BYTES // 2
    assert np.array_equal(shard.tokens[:edge], whole[:edge])
    with pytest.raises(EnvironmentUnfit, match=r"bytes 65,536 to [\d,]+: .*start again: it is made anew"):
        shard.tokens[edge - 1 : edge + 1]
    with pytest.raises(EnvironmentUnfit, match="not what was written"):
        shard.verify()
    assert np.array_equal(open_shard(source, tokenizer=counting, cache=cache).tokens, whole)
    assert counting.calls


def test_a_shard_of_a_version_without_sums_is_made_again(stories: Path, tmp_path: Path) -> None:
    source, cache = Source(path=str(stories)), tmp_path / "cache"
    before = open_shard(source, tokenizer=ByteTokenizer(), cache=cache)
    index = next(cache.glob("shard-*/index.json"))
    told = json.loads(index.read_text())
    index.write_text(json.dumps({name: value for name, value in told.items() if name not in ("sums", "check")}))
    counting = Counting()
    after = open_shard(source, tokenizer=counting, cache=cache)
    assert counting.calls
    assert (after.digest, after.verify()) == (before.digest, before.verify())
