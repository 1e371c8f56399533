from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data import tokenizer
from meshwright.data.documents import cut
from meshwright.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    RankTokenizer,
    load_tokenizer,
    tokenizer_from_json,
)
from meshwright.data.train_tokenizer import parse_vocab, train_tokenizer
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import Source

NOVELS = Path(__file__).parents[2] / "examples" / "tokenizer" / "novels-bpe-4096.json"
TEXT = "It's a truth, 1234 times —\n\n  “universally” acknowledged!\t naïve   <|endoftext|> end \r\n"


@pytest.fixture(scope="module")
def novels() -> RankTokenizer:
    tokenizer = load_tokenizer(NOVELS)
    assert isinstance(tokenizer, RankTokenizer)
    return tokenizer


@given(text=st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
@settings(max_examples=50)
def test_bytes_come_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode([tokenizer.end, *ids]) == text
    assert len(ids) == len(text.encode())


def test_ranks_give_the_ids_of_the_file_they_are_from(novels: RankTokenizer) -> None:
    whole = FileTokenizer(NOVELS.read_text())
    assert (novels.vocab, novels.end) == (whole.vocab, whole.end) == (4096, 0)
    for text in (TEXT, TEXT * 50, "", "\n\n\n", "ﬁ ☃ 𝔘"):
        (fast,), (slow,) = novels.encode_batch([text]), whole.encode_batch([text])
        assert fast.tolist() == slow.tolist()
        assert novels.decode(fast.tolist()) == text
        assert novels.byte_lengths is not None
        assert novels.byte_lengths[fast].sum() == len(text.encode())
        assert novels.end not in fast


@pytest.mark.parametrize("text", [TEXT * 2000, "漢字仮名、交じり文、" * 20_000, "漢字仮名。\nalso\n" * 20_000])
def test_a_cut_text_encodes_as_the_whole(text: str, novels: RankTokenizer) -> None:
    assert len(cut(text)) > 1
    (parts,) = novels.encode_batch([text])
    assert parts.tolist() == novels._encoding.encode_ordinary(text)


def test_ids_beyond_the_vocabulary_decode_to_nothing(novels: RankTokenizer) -> None:
    (ids,) = novels.encode_batch(["hello"])
    assert novels.decode([*ids.tolist(), 0, 5000]) == "hello"


def test_a_tiktoken_file_loads_and_saves(tmp_path: Path) -> None:
    ranks = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the"]
    path = tmp_path / "own.tiktoken"
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)))
    tokenizer = load_tokenizer(path)
    assert (tokenizer.vocab, tokenizer.end) == (260, 259)
    (ids,) = tokenizer.encode_batch(["the cat"])
    assert ids.tolist() == [257, 32, 99, 97, 116]
    again = tokenizer_from_json(tokenizer.to_json())
    assert again.encode_batch(["the cat"])[0].tolist() == ids.tolist()
    assert again.vocab == 260


@pytest.mark.parametrize("name", ["bytes", str(NOVELS)])
def test_what_is_saved_loads(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(name)
    saved = tmp_path / "tokenizer.json"
    saved.write_text(tokenizer.to_json())
    again = load_tokenizer(saved)
    assert again.encode_batch([TEXT])[0].tolist() == tokenizer.encode_batch([TEXT])[0].tolist()


def test_training_is_deterministic_and_fills_the_vocabulary(stories: Path) -> None:
    told = []
    sources = [Source(path=str(stories))]
    first = train_tokenizer(sources, vocab=350, progress=lambda _, done, total: told.append(done / total))
    again = train_tokenizer(sources, vocab=350)
    assert first.to_json() == again.to_json()
    assert first.vocab == 350
    assert told[-1] == 1.0
    (ids,) = first.encode_batch([TEXT])
    assert first.decode(ids.tolist()) == TEXT


def test_words_that_have_no_ranks_run_on_the_library(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "words.json"
    path.write_text(model.to_str())
    tokenizer = load_tokenizer(path)
    assert isinstance(tokenizer, FileTokenizer)
    assert tokenizer.encode_batch(["a b c"])[0].tolist() == [1, 2, 0]
    assert (tokenizer.end, tokenizer.vocab) == (3, 4)


# A merge that makes a token longer than any of the vocabulary: the tokenizers library panics, which is no Exception.
LONGER_THAN_ITS_WORDS = json.dumps(
    {"model": {"type": "BPE", "vocab": {"t": 0, "h": 1, "e": 2, "th": 3}, "merges": ["t h", "th e"]}}
)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", "{not json", "not JSON"),
        ("a.json", '{"some": "thing"}', "not a tokenizer file"),
        ("a.json", LONGER_THAN_ITS_WORDS, "not a tokenizer file .range end"),
        ("a.tiktoken", "aGVsbG8= 0\nnonsense\n", "a.tiktoken:2: not a line of ranks"),
        ("a.tiktoken", "aGVsbG8= 0\n", "256 single bytes have no rank"),
        ("a.tiktoken", "", "holds no ranks"),
    ],
)
def test_files_that_are_no_tokenizers_are_refused(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=said):
        load_tokenizer(tmp_path / name)


def test_what_stops_a_reader_is_not_said_to_be_the_tokenizer_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(BaseException):
        """A limit of time."""

    def wait(_text: str) -> None:
        raise Late

    monkeypatch.setattr(tokenizer, "FileTokenizer", wait)
    with pytest.raises(Late):
        tokenizer_from_json("{}")


def test_a_missing_tokenizer_says_what_can_be_written() -> None:
    with pytest.raises(ConfigError, match="train:8192"):
        load_tokenizer("nowhere.json")


@pytest.mark.parametrize("name", ["train:", "train:x", "train:256", "train:-5", "train:99999999"])
def test_vocabularies_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is no tokenizer"):
        parse_vocab(name)
