"""Token shards: a source tokenised once, kept in a cache as memory-mapped arrays that any process may share.

Every byte has a checksum: offsets and the index when a shard is opened, tokens by the block when they are read.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from meshwright.data.documents import Piece, Progress, files_of, read_pieces, silent
from meshwright.data.sums import Summed, sums_of
from meshwright.data.tokenizer import Tokenizer, digest_of
from meshwright.spec.errors import ConfigError, EnvironmentUnfit, Problem
from meshwright.spec.job import Source
from meshwright.spec.json_text import parse_json

FORMAT = 1
_WHOLE_BYTES = 64 << 20
_BATCH_PIECES = 64
_TOKENS, _MASKED, _OFFSETS, _INDEX = "tokens.bin", "masked.bin", "offsets.bin", "index.json"
_SUMS = ".sums"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """One tokenised source. Document d is tokens[offsets[d]:offsets[d + 1]]; its first token is the end token.

    `masked` is 1 for every token of a prompt, None where the source has none. `text_bytes` counts the UTF-8 bytes of
    all documents.
    """

    digest: str
    tokens: Summed
    masked: Summed | None
    offsets: npt.NDArray[np.int64]
    text_bytes: int

    @property
    def num_documents(self) -> int:
        return len(self.offsets) - 1

    def verify(self) -> int:
        """How many bytes of text were read, every one of which is as it was written. Raises EnvironmentUnfit."""
        arrays = [array for array in (self.tokens, self.masked) if array is not None]
        for array in arrays:
            array.verify()
        return sum(array.nbytes for array in arrays)


def source_digest(source: Source) -> str:
    """Sixteen hex digits that name the text of a source: the contents of its files in order.

    Files over 64 MiB count by size, time of change and their first and last megabyte.
    """
    fields = f"{source.text_field}\0{source.prompt_field}" if source.prompt_field else source.text_field
    state = hashlib.sha256(fields.encode())
    for file in files_of(source):
        size = file.stat().st_size
        state.update(f"\0{file.suffixes}\0{size}\0".encode())
        with file.open("rb") as stream:
            if size <= _WHOLE_BYTES:
                state.update(stream.read())
                continue
            state.update(str(file.stat().st_mtime_ns).encode())
            state.update(stream.read(1 << 20))
            stream.seek(-(1 << 20), os.SEEK_END)
            state.update(stream.read())
    return state.hexdigest()[:16]


def open_shard(source: Source, *, tokenizer: Tokenizer, cache: Path, progress: Progress = silent) -> Shard:
    """The shard of `source` under `tokenizer`, from `cache` when it holds a whole one, else made and kept there.

    Processes that ask at once make it once: the others wait. What was left half-written is never seen. Raises
    ConfigError for a source that cannot be read or holds no text, EnvironmentUnfit when the cache cannot be written.
    """
    name = f"{FORMAT}:{source_digest(source)}:{digest_of(tokenizer)}"
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    folder = cache / f"shard-{digest}"
    with exclusive(cache / f"shard-{digest}.lock"):
        masks = bool(source.prompt_field)
        found = _load(folder, digest, masks=masks)
        if found is None:
            if folder.exists():
                progress(
                    f"{folder.name} in the cache is spoilt, or of a version without checksums: making it anew", 0, 1
                )
            _make(source, tokenizer, folder, digest, progress)
            found = _load(folder, digest, masks=masks)
    if found is None:
        raise EnvironmentUnfit(Problem(what="a shard written now cannot be read back", where=str(folder)))
    return found


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; one process at a time. The system lets go of it if the process dies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("w")
    except OSError as error:
        raise unwritable(path.parent, error) from error
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(stream, fcntl.LOCK_UN)


def unwritable(folder: Path, error: OSError) -> EnvironmentUnfit:
    fix = "set data.cache to a folder with room that you may write"
    return EnvironmentUnfit(Problem(what="the cache cannot be written", where=str(folder), why=str(error), fix=fix))


def _load(folder: Path, digest: str, *, masks: bool) -> Shard | None:
    """None unless every file is there, of the size the index says, with the sums of what is read whole."""
    try:
        index = parse_json((folder / _INDEX).read_text())
        if index.pop("check") != _check(index) or index["digest"] != digest:
            return None
        offsets = np.frombuffer(_summed(folder, _OFFSETS, index), dtype=np.int64)
        tokens = _open(folder, _TOKENS, index, dtype=np.dtype(index["dtype"]))
        masked = _open(folder, _MASKED, index, dtype=np.dtype(np.uint8)) if masks else None
        whole = len(tokens) == index["tokens"] == int(offsets[-1])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    if not whole or len(offsets) != index["documents"] + 1 or (masked is not None and len(masked) != len(tokens)):
        return None
    return Shard(digest=digest, tokens=tokens, masked=masked, offsets=offsets, text_bytes=index["text_bytes"])


def _open(folder: Path, name: str, index: Mapping[str, Any], *, dtype: np.dtype[Any]) -> Summed:
    sums = np.frombuffer(_summed(folder, name + _SUMS, index), dtype=np.uint32)
    return Summed(folder / name, dtype=dtype, sums=sums, index=folder / _INDEX)


def _summed(folder: Path, name: str, index: Mapping[str, Any]) -> bytes:
    """The content of a file that is read whole. Raises ValueError where it is not what was written."""
    content = (folder / name).read_bytes()
    if zlib.crc32(content) != index["sums"][name]:
        raise ValueError(f"{name} is not what was written")
    return content


def _check(index: Mapping[str, Any]) -> int:
    """The sum of all that an index says."""
    return zlib.crc32(json.dumps(dict(index), sort_keys=True).encode())


def _make(source: Source, tokenizer: Tokenizer, folder: Path, digest: str, progress: Progress) -> None:
    try:
        building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise unwritable(folder.parent, error) from error
    try:
        _write(source, tokenizer, building, digest, progress)
        if folder.exists():
            shutil.rmtree(folder)
        building.rename(folder)
    except OSError as error:
        raise unwritable(folder.parent, error) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write(source: Source, tokenizer: Tokenizer, building: Path, digest: str, progress: Progress) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab <= 1 << 16 else np.uint32)
    offsets, written, text_bytes = [0], 0, 0
    end = np.array([tokenizer.end], dtype=dtype)
    with (building / _TOKENS).open("wb") as stream, _marks(source, building / _MASKED) as marks:
        for batch in _batches(read_pieces(source, progress=progress), piecewise=tokenizer.piecewise):
            encoded = tokenizer.encode_batch([piece.text for piece in batch])
            for piece, tokens in zip(batch, encoded, strict=True):
                if piece.opens:
                    if written:
                        offsets.append(written)
                    stream.write(end.tobytes())
                    marks.write(bytes(1))
                    written += 1
                stream.write(tokens.astype(dtype).tobytes())
                marks.write(bytes([piece.masked]) * len(tokens))
                written += len(tokens)
                text_bytes += len(piece.text.encode())
    if not text_bytes:
        fix = "give a file with text in it"
        raise ConfigError(Problem(what="the corpus is empty", where=source.path, fix=fix))
    offsets.append(written)
    np.array(offsets, dtype=np.int64).tofile(building / _OFFSETS)
    index = {
        "digest": digest,
        "dtype": dtype.name,
        "tokens": written,
        "documents": len(offsets) - 1,
        "text_bytes": text_bytes,
        "source": source.path,
        "format": FORMAT,
        "sums": _write_sums(building),
    }
    (building / _INDEX).write_text(json.dumps({**index, "check": _check(index)}, indent=1))


def _write_sums(building: Path) -> dict[str, int]:
    """Beside every large file the sums of its blocks; those of what is read whole are returned."""
    for name in (_TOKENS, _MASKED):
        if (building / name).exists():
            sums_of(building / name).tofile(building / f"{name}{_SUMS}")
    small = [_OFFSETS, *(path.name for path in building.glob(f"*{_SUMS}"))]
    return {name: zlib.crc32((building / name).read_bytes()) for name in small}


def _marks(source: Source, path: Path) -> IO[bytes]:
    """Where the marks of masked tokens are written; nowhere for a source without prompts."""
    return path.open("wb") if source.prompt_field else Path(os.devnull).open("wb")


def _batches(pieces: Iterator[Piece], *, piecewise: bool) -> Iterator[Sequence[Piece]]:
    """Pieces by the batch; whole documents where the tokenizer must see them whole."""
    batch: list[Piece] = []
    for piece in pieces if piecewise else _whole(pieces):
        batch.append(piece)
        if len(batch) == _BATCH_PIECES:
            yield batch
            batch = []
    if batch:
        yield batch


def _whole(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Documents in one piece, or two where they have a prompt."""
    parts: list[Piece] = []
    for piece in pieces:
        if parts and (piece.opens or piece.masked != parts[0].masked):
            yield _joined(parts)
            parts = []
        parts.append(piece)
    if parts:
        yield _joined(parts)


def _joined(parts: Sequence[Piece]) -> Piece:
    return replace(parts[0], text="".join(part.text for part in parts))
