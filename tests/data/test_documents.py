from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from meshwright.data import documents as documents_module
from meshwright.data.documents import LONGEST_PIECE, PIECE_CHARACTERS, cut, read_pieces
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import Source


def documents(path: Path, **options: str) -> list[str]:
    found: list[str] = []
    for piece in read_pieces(Source(path=str(path), **options)):
        if piece.opens:
            found.append("")
        found[-1] += piece.text
    return found


def failure(path: Path, **options: str) -> str:
    with pytest.raises(ConfigError) as caught:
        documents(path, **options)
    return str(caught.value)


def test_every_form_gives_the_same_documents(tmp_path: Path) -> None:
    texts = ["first text\nof two lines\n", "second " * 30000, "thïrd"]
    rows = "".join(json.dumps({"body": text}) + "\n" for text in texts).encode()
    (tmp_path / "a.jsonl").write_bytes(rows)
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(rows))
    assert documents(tmp_path / "a.jsonl", text_field="body") == texts
    assert documents(tmp_path / "a.jsonl.xz", text_field="body") == texts
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "1.txt").write_text(texts[0])
    (folder / "2.txt.xz").write_bytes(lzma.compress(texts[1].encode()))
    (folder / "deep" / "3.md").write_text(texts[2])
    (folder / "picture.png").write_bytes(b"\x89PNG\0")
    (folder / ".hidden" / "4.txt").write_text("not seen")
    assert documents(folder) == texts


def test_a_long_text_is_cut_before_spaces_after_words_and_nothing_is_lost() -> None:
    text = "one  two\n three four" * 20000
    parts = cut(text)
    assert len(parts) > 5
    assert "".join(parts) == text
    assert all(part[0] == " " and not part[1].isspace() for part in parts[1:])
    assert all(not part[-1].isspace() for part in parts[:-1])
    assert all(len(part) <= 2 * PIECE_CHARACTERS for part in parts)


@pytest.mark.parametrize(
    "text",
    [
        "漢字仮名交じり文、" * 60_000,
        "漢字仮名交じり文。\n" * 60_000,
        "漢字仮名交じり文。\n\n" * 60_000,
        "QUJD" * 150_000,
        "QUJDREVGR0g=\n" * 50_000,
    ],
)
def test_a_text_without_spaces_is_cut_too_and_read_in_a_time_that_its_length_tells(text: str, tmp_path: Path) -> None:
    """Every line joined what was held before it and searched that again: two million characters took minutes."""
    parts = cut(text)
    assert "".join(parts) == text
    assert max(map(len, parts)) <= LONGEST_PIECE
    path = tmp_path / "long.txt"
    path.write_text(text)
    searched = 0

    def counted(given: str) -> list[str]:
        nonlocal searched
        searched += len(given)
        return cut(given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "cut", counted)
        assert [piece.text for piece in read_pieces(Source(path=str(path)))] == parts
    assert searched < 8 * len(text)


def test_a_plain_text_file_is_one_document_and_its_mark_is_dropped(tmp_path: Path) -> None:
    text = "".join(f"line {number} of many\n" for number in range(20000))
    path = tmp_path / "long.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert documents(path) == [text]


def test_progress_reaches_the_size_of_the_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("word " * 1000)
    told: list[tuple[float, float]] = []
    list(read_pieces(Source(path=str(path)), progress=lambda _, done, total: told.append((done, total))))
    assert told[-1] == (5000.0, 5000.0)


def test_a_missing_file_is_named_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "novels.jsonl").write_text("{}")
    assert "novels.jsonl" in failure(tmp_path / "novel.jsonl").split("did you mean")[1]
    assert "does not exist either" in failure(tmp_path / "nowhere" / "novel.jsonl")


def test_bad_lines_are_all_counted_and_the_first_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [
        '{"text": "good"}',
        "{broken",
        '{"body": "x"}',
        '["list"]',
        '{"text": 3}',
        '{"text": "a\\u0000b"}',
        "{",
        "{",
    ]
    path.write_text("\n".join(lines) + "\n")
    message = failure(path)
    for number in (2, 3, 4, 5, 6):
        assert f"rows.jsonl:{number}" in message
    assert "rows.jsonl:7" not in message
    assert "and 2 more" in message
    assert "it has body" in message


def test_good_documents_come_before_the_failure(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "good"}\n{bad\n{"text": "also good"}\n')
    got = []
    with pytest.raises(ConfigError):
        got.extend(piece.text for piece in read_pieces(Source(path=str(path))))
    pieces = read_pieces(Source(path=str(path)))
    assert [next(pieces).text, next(pieces).text] == ["good", "also good"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"fine\nbroken \xff here", "a.txt:2: not UTF-8 text (byte 12 is 0xff)"),
        ("a.bin", b"\x01\x02\0\0", "a.bin:1: not text but a binary file (byte 2 is NUL)"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "\xff"}\n', "a.jsonl:2: not UTF-8 text"),
        ("a.jsonl", b'{"text": 3}\n', "a.jsonl:1: no text in field 'text' (its value is not a string)"),
        ("a.jsonl", b'{"text": "\\ud83d"}\n', "a.jsonl:1: not text (the text holds half of a character"),
        ("a.txt.xz", b"not xz at all", "a.txt.xz: not a whole xz file"),
        ("b.txt.xz", lzma.compress(b"some text" * 100)[:-20], "b.txt.xz: not a whole xz file"),
    ],
)
def test_what_is_not_text_is_said_with_its_place(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert said in failure(tmp_path / name)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"x")
    assert "holds no text" in failure(tmp_path)
