"""Writing one rank's parts of tensors: flushes and reading back go on beside the writes, and what has not changed since
an earlier checkpoint is referred to by a hard link."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from meshwright.parallel.stored.blob import Bytes, SpoiltBlock, block, bytes_of, check_part, num_blocks, sum_of_block

FLUSH_BYTES = 2**25
BESIDE = 2  # threads beside the one that writes: a flush, and what is read back

Key = tuple[str, tuple[int, ...], tuple[int, ...], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a part lies in its file, and the sums of its blocks."""

    at: int
    sums: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file of parts by name, box and type, as it was written and read back at `step`."""

    step: int
    bytes: int
    parts: Mapping[Key, Place]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The files that one rank has in `folder`."""

    folder: Path
    files: Mapping[str, File] = field(default_factory=dict)

    def sums(self) -> dict[Key, tuple[int, ...]]:
        """Of every part."""
        return {key: place.sums for file in self.files.values() for key, place in file.parts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What this rank wrote before: a part that is as in `last` stands still and is kept apart from those that change,
    and a file of `shared` of which every part is as it was is referred to."""

    last: Written | None = None
    shared: Written | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part to be written, and the sums of its first blocks, as many as were asked for until now."""

    key: Key
    data: Bytes
    sums: list[int] = field(default_factory=list)

    def sum(self, number: int) -> int:
        """Of block `number`; those before it were asked for."""
        if number == len(self.sums):
            self.sums.append(sum_of_block(self.data, number))
        return self.sums[number]

    def is_as(self, sums: Sequence[int] | None) -> bool:
        """Whether its blocks have these sums. No more of them are summed than it takes to tell."""
        if sums is None or len(sums) != num_blocks(self.data.nbytes):
            return False
        return all(self.sum(number) == known for number, known in enumerate(sums))


def write_parts(
    keys: Sequence[Key],
    resolve: Callable[[int], Tensor],
    folder: Path,
    *,
    rank: int,
    step: int,
    earlier: Earlier,
) -> Written:
    """`folder` has the parts `keys` of this rank, of which `resolve(i)` gives the i-th; each is on the disk and reads
    back as it was. None is asked for before the one before it is written, or waits to be referred to. Raises OSError
    otherwise."""
    with ExitStack() as stack, ThreadPoolExecutor(BESIDE) as pool:
        outs = _Outs(folder, rank=rank, step=step, last=earlier.last, pool=pool, stack=stack)
        referring = _Referring(folder, keys, shared=earlier.shared, write=outs.put)
        for number, key in enumerate(keys):
            referring.put(Piece(key=key, data=bytes_of(resolve(number))))
        return Written(folder=folder, files={**outs.finish(), **referring.files})


class _Referring:
    """Parts of a shared file wait until the last of them is found as it was; then the file is linked. Else all of them
    are written, as are those of a file that cannot be linked, whatever keeps it from being: no file system has to."""

    def __init__(self, folder: Path, keys: Sequence[Key], *, shared: Written | None, write: Callable[[Piece], None]):
        self._folder, self._shared, self._write = folder, shared, write
        mine = set(keys)
        files = {} if shared is None else shared.files
        self._waiting: dict[str, list[Piece]] = {name: [] for name, file in files.items() if file.parts.keys() <= mine}
        self._file_of = {key: name for name in self._waiting for key in files[name].parts}
        self.files: dict[str, File] = {}

    def put(self, piece: Piece) -> None:
        name = self._file_of.get(piece.key)
        if self._shared is None or name not in self._waiting:
            self._write(piece)
            return
        file, waiting = self._shared.files[name], self._waiting[name]
        waiting.append(piece)
        same = piece.is_as(file.parts[piece.key].sums)
        if same and len(waiting) < len(file.parts):
            return
        del self._waiting[name]
        if same and self._linked(self._shared.folder / name):
            self.files[name] = file
        else:
            for each in waiting:
                self._write(each)

    def _linked(self, path: Path) -> bool:
        try:
            os.link(path, self._folder / path.name)
        except OSError:
            return False
        return True


class _Outs:
    """The files that are written: one of what changes and one of what stands still, begun when there is something."""

    def __init__(
        self, folder: Path, *, rank: int, step: int, last: Written | None, pool: ThreadPoolExecutor, stack: ExitStack
    ) -> None:
        self._folder, self._rank, self._step = folder, rank, step
        self._last = {} if last is None else last.sums()
        self._pool, self._stack = pool, stack
        self._open: dict[str, _Out] = {}

    def put(self, piece: Piece) -> None:
        still = piece.is_as(self._last.get(piece.key))
        name = f"rank-{self._rank}-still-{self._step:08d}.tensors" if still else f"rank-{self._rank}.tensors"
        if name not in self._open:
            self._open[name] = self._stack.enter_context(_Out(self._folder / name, self._pool))
        self._open[name].append(piece)

    def finish(self) -> dict[str, File]:
        for out in self._open.values():
            out.finish()
        return {name: File(step=self._step, bytes=out.bytes, parts=dict(out.parts)) for name, out in self._open.items()}


class _Out:
    """A file that is written from its beginning to its end, while what it has already is flushed and read back."""

    def __init__(self, path: Path, pool: ThreadPoolExecutor) -> None:
        self._path, self._pool = path, pool
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._flush: Future[None] | None = None
        self._flushed = 0
        self._checks: list[Future[None]] = []
        self.bytes = 0
        self.parts: dict[Key, Place] = {}

    def __enter__(self) -> _Out:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def append(self, piece: Piece) -> None:
        at, data = self.bytes, piece.data
        for number in range(num_blocks(data.nbytes)):
            start, stop = block(number, data.nbytes)
            piece.sum(number)  # brings the block into the caches from which it is written
            self._write(data.data[start:stop])
            if self.bytes - self._flushed >= FLUSH_BYTES:
                self._begin_flush()
        self.parts[piece.key] = Place(at=at, sums=tuple(piece.sums))
        self._checks.append(self._pool.submit(self._check, self.parts[piece.key], data.nbytes))

    def finish(self) -> None:
        for check in self._checks:
            check.result()
        if self._flush is not None:
            self._flush.result()
        os.fsync(self._file)

    def _write(self, data: memoryview) -> None:
        while data:
            count = os.write(self._file, data)
            data, self.bytes = data[count:], self.bytes + count

    def _begin_flush(self) -> None:
        """The disk begins to take what is written. What one flush failed of, a later one does not tell."""
        if self._flush is not None:
            if not self._flush.done():
                return
            self._flush.result()
        self._flushed = self.bytes
        self._flush = self._pool.submit(os.fsync, self._file)

    def _check(self, place: Place, size: int) -> None:
        try:
            check_part(self._file, at=place.at, size=size, sums=place.sums)
        except SpoiltBlock as error:
            raise OSError(f"{self._path} does not read back as it was written") from error
