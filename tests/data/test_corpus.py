from __future__ import annotations

import json
import lzma
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from meshwright.catalog.ranges import checked_job
from meshwright.data import Corpus, prepare
from meshwright.data.pack import Packed
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import DataSpec, JobSpec, Source
from meshwright.spec.targets import MASKED
from tests.data.stories import story

EXAMPLES = Path(__file__).parents[2] / "examples"


def text_of(corpus: Corpus, part: Packed) -> str:
    """Everything `part` can show, in the order of its streams."""
    return "".join(corpus.tokenizer.decode(stream.read(0, len(stream)).tolist()) for stream in part.streams)


def spec_of(*paths: Path, **options: object) -> DataSpec:
    return replace(DataSpec(sources=tuple(Source(path=str(path)) for path in paths)), **options)


def test_held_out_documents_are_whole_and_never_trained_on(stories: Path, tmp_path: Path) -> None:
    spec = spec_of(stories, validation_fraction=0.1)
    corpus = prepare(spec, sequence_length=32, seed=3, cache=tmp_path / "cache")
    assert corpus.validation is not None
    held, trained = text_of(corpus, corpus.validation), text_of(corpus, corpus.train)
    for number in range(20):
        assert (story(number) in held) != (story(number) in trained)
    assert sum(story(number) in held for number in range(20)) == 2
    assert len(held) + len(trained) == corpus.text_bytes


def test_what_is_held_out_does_not_depend_on_seed_or_length(stories: Path, tmp_path: Path) -> None:
    spec, cache = spec_of(stories), tmp_path / "cache"
    first = prepare(spec, sequence_length=32, seed=0, cache=cache)
    other = prepare(spec, sequence_length=64, seed=9, cache=cache)
    assert first.validation is not None
    assert other.validation is not None
    assert text_of(first, first.validation) == text_of(other, other.validation)
    assert first.digest == other.digest
    again = prepare(spec, sequence_length=32, seed=9, cache=cache)
    assert np.array_equal(again.validation.sequences(0, 5).tokens, first.validation.sequences(0, 5).tokens)
    assert not np.array_equal(again.train.sequences(0, 5).tokens, first.train.sequences(0, 5).tokens)


def test_the_tail_of_a_single_document_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text(story(0, 400))
    corpus = prepare(spec_of(path, validation_fraction=0.05), sequence_length=32, seed=0, cache=tmp_path / "cache")
    assert corpus.validation is not None
    whole = story(0, 400)
    held = text_of(corpus, corpus.validation)
    assert whole.endswith(held)
    assert text_of(corpus, corpus.train) + held == whole
    assert 0.04 < len(held) / len(whole) < 0.06


@pytest.mark.parametrize("fraction", [0.01, 0.03, 0.1, 0.3, 0.5])
def test_long_documents_are_cut_so_that_the_share_is_what_was_asked(fraction: float, tmp_path: Path) -> None:
    path = tmp_path / "novels.jsonl"
    texts = [story(number, 100 + 60 * number) for number in range(6)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    spec = spec_of(path, validation_fraction=fraction)
    corpus = prepare(spec, sequence_length=32, seed=3, cache=tmp_path / "cache")
    assert corpus.validation is not None
    total = corpus.train.num_tokens + corpus.validation.num_tokens
    assert total == corpus.text_bytes + len(texts)
    assert corpus.validation.num_tokens / total == pytest.approx(fraction, rel=0.1)
    held, trained = text_of(corpus, corpus.validation), text_of(corpus, corpus.train)
    for text in texts:
        for line in text.split("\n")[:-1]:
            assert (line in held) + (line in trained) <= 1 or not line


def test_a_part_of_a_document_comes_first_of_what_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    texts = [story(number, 100) for number in range(4)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    spec = spec_of(path, validation_fraction=0.4)
    corpus = prepare(spec, sequence_length=32, seed=0, cache=tmp_path / "cache")
    assert corpus.validation is not None
    (stream,) = corpus.validation.streams
    tokens = stream.read(0, len(stream))
    (opening,) = np.flatnonzero(tokens == corpus.tokenizer.end)
    tail = corpus.tokenizer.decode(tokens[:opening].tolist())
    assert tail
    assert any(text.endswith(tail) and text != tail for text in texts)
    assert corpus.tokenizer.decode(tokens[opening + 1 :].tolist()) in texts


def test_nothing_is_held_out_when_asked(stories: Path, tmp_path: Path) -> None:
    spec = spec_of(stories, validation_fraction=0.0)
    corpus = prepare(spec, sequence_length=32, seed=0, cache=tmp_path / "cache")
    assert corpus.validation is None
    assert len(text_of(corpus, corpus.train)) == corpus.text_bytes


def test_bytes_per_token_of_the_validation_text_is_exact(stories: Path, tmp_path: Path) -> None:
    spec = spec_of(stories, tokenizer=str(EXAMPLES / "tokenizer" / "novels-bpe-4096.json"))
    corpus = prepare(spec, sequence_length=16, seed=0, cache=tmp_path / "cache")
    assert corpus.validation is not None
    batch = corpus.validation.sequences(0, corpus.validation.num_sequences)
    shown = sum(len(corpus.tokenizer.decode(row.tolist()).encode()) for row in batch.targets)
    assert batch.bytes_per_token == pytest.approx(shown / batch.targets.size)


@pytest.mark.parametrize("tokenizer", ["bytes", str(EXAMPLES / "tokenizer" / "novels-bpe-4096.json")])
def test_prompts_are_read_and_are_no_targets(tokenizer: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"ask": f"What is {n} and {n}?" if n % 5 else "", "text": f" It is {2 * n}."} for n in range(40)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    source = Source(path=str(path), prompt_field="ask")
    spec = DataSpec(sources=(source,), tokenizer=tokenizer, validation_fraction=0.0)
    assert spec.masks
    for _ in range(2):  # made, then read from the cache
        corpus = prepare(spec, sequence_length=16, seed=0, cache=tmp_path / "cache")
    (stream,) = corpus.train.streams
    tokens, targets = stream.read(0, len(stream)), stream.targets(0, len(stream))
    end, decode = corpus.tokenizer.end, corpus.tokenizer.decode
    starts = [*np.flatnonzero(tokens == end).tolist(), len(tokens)]
    for row, start, stop in zip(rows, starts, starts[1:], strict=False):
        shown, learned = tokens[start + 1 : stop], targets[start + 1 : stop]
        assert targets[start] == end  # where a document ends is learned
        assert decode(shown.tolist()) == row["ask"] + row["text"]
        assert decode(shown[learned != MASKED].tolist()) == row["text"]
    batch = corpus.train.sequences(0, 4)
    assert batch.num_targets == int((batch.targets != MASKED).sum()) < batch.targets.size
    shown = [decode([token]) for token in batch.targets[batch.targets != MASKED].tolist() if token != end]
    assert batch.bytes_per_token == pytest.approx(sum(map(len, shown)) / batch.num_targets)


def test_prompts_are_of_json_lines_and_of_the_field_that_is_named(stories: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain")
    for path, said in ((tmp_path / "a.txt", "plain text has no prompts"), (stories, "set prompt_field of the source")):
        spec = DataSpec(sources=(Source(path=str(path), prompt_field="ask"),))
        with pytest.raises(ConfigError, match=said):
            prepare(spec, sequence_length=16, seed=0, cache=tmp_path / "cache")


def test_a_trained_tokenizer_is_kept_and_used_again(stories: Path, tmp_path: Path) -> None:
    spec, cache = spec_of(stories, tokenizer="train:300"), tmp_path / "cache"
    first = prepare(spec, sequence_length=16, seed=0, cache=cache)
    told: list[str] = []
    again = prepare(spec, sequence_length=16, seed=0, cache=cache, progress=lambda what, *_: told.append(what))
    assert told == []
    assert first.tokenizer.to_json() == again.tokenizer.to_json()
    assert first.tokenizer.vocab == 300


def test_a_mixture_reads_its_sources_by_weight(tmp_path: Path) -> None:
    for name, letter in (("a", "a"), ("b", "b")):
        rows = [json.dumps({"text": letter * 400}) for _ in range(10)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    sources = (
        Source(path=str(tmp_path / "a.jsonl"), weight=3.0),
        Source(path=str(tmp_path / "b.jsonl"), weight=1.0),
    )
    corpus = prepare(DataSpec(sources=sources), sequence_length=16, seed=0, cache=tmp_path / "cache")
    batch = corpus.train.sequences(0, 1024)
    assert (batch.targets == ord("a")).any(axis=1).sum() == 768


def test_the_cache_of_the_specification_comes_first(stories: Path, tmp_path: Path) -> None:
    spec = spec_of(stories, cache=str(tmp_path / "own"))
    prepare(spec, sequence_length=16, seed=0, cache=tmp_path / "other")
    assert (tmp_path / "own").is_dir()
    assert not (tmp_path / "other").exists()


def test_every_problem_of_the_specification_is_told_at_once() -> None:
    spec = DataSpec(sources=(Source(path="x", weight=0.0),), validation_fraction=1.5)
    with pytest.raises(ConfigError) as caught:
        prepare(spec, sequence_length=0, seed=0)
    assert len(caught.value.problems) == 4
    with pytest.raises(ConfigError, match="no text is given"):
        prepare(DataSpec(), sequence_length=8, seed=0, cache="/tmp")


def test_too_little_text_is_said_with_figures(tmp_path: Path) -> None:
    path = tmp_path / "tiny.txt"
    path.write_text("a few words and no more")
    with pytest.raises(ConfigError, match="a sequence needs 129"):
        prepare(spec_of(path), sequence_length=128, seed=0, cache=tmp_path / "cache")


def test_the_shipped_novels_are_what_their_page_says() -> None:
    import hashlib

    page = (EXAMPLES / "SOURCES.md").read_text()
    for file in (EXAMPLES / "novels.jsonl.xz", EXAMPLES / "tokenizer" / "novels-bpe-4096.json"):
        assert hashlib.sha256(file.read_bytes()).hexdigest() in page
    with lzma.open(EXAMPLES / "novels.jsonl.xz", "rt", encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    assert len(rows) == 15
    for row in rows:
        assert f"{len(row['text'].encode()):,}" in page
    assert len({row["author"] for row in rows}) == 15


def test_preparing_never_imports_torch(stories: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from meshwright.data import prepare; from meshwright.spec.job import DataSpec, Source\n"
        f"spec = DataSpec(sources=(Source(path={str(stories)!r}),))\n"
        f"prepare(spec, sequence_length=8, seed=0, cache={str(tmp_path / 'cache')!r}).train.sequences(0, 4)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_source_too_faint_for_the_turns_of_a_mixture_is_refused() -> None:
    faint = DataSpec(sources=(Source(path="x"), Source(path="y", weight=1e-6)))
    with pytest.raises(ConfigError, match="source 1 has less than a 131,072th of all weight"):
        prepare(faint, sequence_length=8, seed=0, cache="somewhere")
    with pytest.raises(ConfigError, match=r"data\.sources"):
        checked_job(JobSpec(data=faint))
