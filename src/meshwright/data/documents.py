"""Text in: JSONL, plain text, xz of either, or a folder of them, streamed document by document."""

from __future__ import annotations

import lzma
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.job import Source
from meshwright.spec.json_text import parse_json
from meshwright.spec.paths import expanded, near_names

PIECE_CHARACTERS = 32768
LONGEST_PIECE = 4 * PIECE_CHARACTERS
_MOST_NAMED = 5
_JSON_SUFFIXES = (".jsonl", ".ndjson")
_TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
_FIELDS = ("prompt_field", "text_field")
_CUT = re.compile(r"(?<=\S)(?= \S)")
# A mark between letters, or a line's end: tokenizers that split at words end one before the first and after the second.
_CUT_WITHOUT_SPACES = re.compile(r"(?<=[^\W\d_])(?=[^\w\s][^\W\d_])|(?<=\S\n)(?=\S)")


class Progress(Protocol):
    """Told how far a long preparation is: `what` is being done, `done` of `total` bytes."""

    def __call__(self, what: str, done: float, total: float) -> None: ...


def silent(what: str, done: float, total: float) -> None:
    """The progress that tells nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Part of a document; `opens` on its first part. A document's parts joined are its text.

    `masked` where it is part of a prompt, whose tokens are no targets.
    """

    text: str
    opens: bool
    masked: bool = False


def files_of(source: Source) -> tuple[Path, ...]:
    """The files of a source in a fixed order: the file itself, or the texts of a folder, sorted by path.

    Raises ConfigError when the path does not exist (with near names) or a folder holds no text file.
    """
    path = expanded(source.path)
    if path.is_file():
        return (path,)
    if not path.is_dir():
        raise ConfigError(Problem(what="no such file or folder", where=source.path, fix=_near_names(path)))
    visible = [entry for entry in path.rglob("*") if not _is_hidden(entry.relative_to(path))]
    found = sorted(entry for entry in visible if entry.is_file() and _form(entry) is not None)
    if not found:
        endings = ", ".join((*_JSON_SUFFIXES, *_TEXT_SUFFIXES))
        problem = Problem(
            what="the folder holds no text", where=source.path, why=f"looked for {endings} and .xz of them"
        )
        raise ConfigError(problem)
    return tuple(found)


def read_pieces(source: Source, *, progress: Progress = silent) -> Iterator[Piece]:
    """Every document of `source` in order, cut into pieces of about PIECE_CHARACTERS.

    A piece ends before a space that follows a word, where no tokenizer that splits at words joins anything. Raises
    ConfigError, after the last good document, that counts every line that could not be read and names the first.
    """
    files = files_of(source)
    total = float(sum(file.stat().st_size for file in files)) or 1.0
    problems = _Problems()
    before = 0.0
    for file in files:
        with file.open("rb") as raw:
            stream = lzma.LZMAFile(raw) if file.suffix == ".xz" else raw  # noqa: SIM115 - raw owns the file
            lines = _watched(stream, raw, before=before, total=total, progress=progress, what=f"reading {file.name}")
            is_json = (_form(file) or ".txt") in _JSON_SUFFIXES
            try:
                if source.prompt_field and not is_json:
                    problems.add(str(file), "plain text has no prompts", fix="leave out prompt_field of the source")
                elif is_json:
                    yield from _json_pieces(lines, file, source, problems)
                else:
                    yield from _text_pieces(lines, file, problems)
            except (lzma.LZMAError, EOFError) as error:
                problems.add(str(file), "not a whole xz file", why=str(error))
        before += file.stat().st_size
    problems.raise_any()


def cut(text: str) -> list[str]:
    """Parts of `text` of about PIECE_CHARACTERS, cut before spaces that follow a word; joined they are the text.

    Where none comes for LONGEST_PIECE, as in scripts without spaces, the cut is where words end otherwise, or there.
    """
    parts, start = [], 0
    while len(text) - start > 2 * PIECE_CHARACTERS:
        first, last = start + PIECE_CHARACTERS, start + LONGEST_PIECE
        match = _CUT.search(text, first, last)
        if match is None and len(text) <= last:
            break
        match = match or _CUT_WITHOUT_SPACES.search(text, first, last)
        end = last if match is None else match.start()
        parts.append(text[start:end])
        start = end
    parts.append(text[start:])
    return parts


class _Problems:
    """Counts everything that is wrong and keeps the first few by name."""

    def __init__(self) -> None:
        self.named: list[Problem] = []
        self.count = 0

    def add(self, where: str, what: str, *, why: str = "", fix: str = "") -> None:
        self.count += 1
        if self.count <= _MOST_NAMED:
            self.named.append(Problem(what=what, where=where, why=why, fix=fix))

    def raise_any(self) -> None:
        if self.count > len(self.named):
            self.named.append(Problem(what=f"and {self.count - len(self.named):,} more lines like these"))
        if self.named:
            raise ConfigError(self.named)


def _watched(
    stream: Iterable[bytes], raw: BinaryIO, *, before: float, total: float, progress: Progress, what: str
) -> Iterator[bytes]:
    told = 0
    for line in stream:
        place = raw.tell()
        if place - told >= 1 << 20:
            told = place
            progress(what, before + place, total)
        yield line
    progress(what, before + raw.tell(), total)


def _json_pieces(lines: Iterator[bytes], file: Path, source: Source, problems: _Problems) -> Iterator[Piece]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            row = parse_json(line, halves=True)  # beside the text they hurt nobody
        except UnicodeDecodeError as error:
            problems.add(
                where, "not UTF-8 text", why=f"byte {error.start + 1} of the line is 0x{line[error.start]:02x}"
            )
            continue
        except ValueError as error:
            problems.add(where, "not JSON", why=str(error))
            continue
        fields = {"prompt_field": source.prompt_field} if source.prompt_field else {}
        fields |= {"text_field": source.text_field}
        prompt, text = (_text_in(row, fields[key], key, where, problems) if key in fields else "" for key in _FIELDS)
        if prompt is None or text is None or not text.strip():
            continue
        parts = [(part, True) for part in cut(prompt) if part] + [(part, False) for part in cut(text)]
        for index, (part, masked) in enumerate(parts):
            yield Piece(text=part, opens=index == 0, masked=masked)


def _text_in(row: object, field: str, key: str, where: str, problems: _Problems) -> str | None:
    """The text of one field of a line; None where it has none, which `problems` knows then."""
    text = row.get(field) if isinstance(row, dict) else None
    if isinstance(text, str):
        flaw = _flaw(text)
        if not flaw:
            return text
        problems.add(where, "not text", why=flaw)
        return None
    have = f"it has {', '.join(row)}" if isinstance(row, dict) and row else "the line is not an object"
    if isinstance(row, dict) and field in row:
        have = "its value is not a string"
    problems.add(where, f"no text in field {field!r}", why=have, fix=f"set {key} of the source")
    return None


def _flaw(text: str) -> str:
    """Why a string of JSON is no text; "" where it is."""
    if "\0" in text:
        return "the text holds a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "the text holds half of a character: a surrogate without the other one"
    return ""


def _text_pieces(lines: Iterator[bytes], file: Path, problems: _Problems) -> Iterator[Piece]:
    """One document: the whole file."""
    buffer: list[str] = []
    held, due, place, opens, blank = 0, 2 * PIECE_CHARACTERS, 0, True, True
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            why = f"byte {place + error.start:,} is 0x{line[error.start]:02x}"
            problems.add(f"{file}:{number}", "not UTF-8 text", why=why)
            return
        if "\0" in text:
            why = f"byte {place + line.index(0):,} is NUL"
            problems.add(f"{file}:{number}", "not text but a binary file", why=why)
            return
        place += len(line)
        buffer.append(text)
        held += len(text)
        blank = blank and not text.strip()
        if held > due and not blank:
            *parts, rest = cut("".join(buffer))
            for part in parts:
                yield Piece(text=part, opens=opens)
                opens = False
            buffer, held = [rest], len(rest)
            due = 2 * PIECE_CHARACTERS if parts else LONGEST_PIECE
    if not blank:
        for part in cut("".join(buffer)):
            yield Piece(text=part, opens=opens)
            opens = False


def _form(path: Path) -> str | None:
    """The ending that says how a file is read, without .xz; None for a file that is not text by its name."""
    suffix = Path(path.stem).suffix if path.suffix == ".xz" else path.suffix
    return suffix.lower() if suffix.lower() in _JSON_SUFFIXES + _TEXT_SUFFIXES else None


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _near_names(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist either"
    names = [entry.name for entry in folder.iterdir()]
    close = near_names(path.name, names)
    return f"did you mean {' or '.join(str(folder / name) for name in close)}?" if close else "check the path"
