"""Writing one rank's parts of tensors: they are summed while they are written and read back from the disk, and what has
not changed since an earlier checkpoint is referred to by a hard link."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from meshwright.parallel.stored.blob import Bytes, block, bytes_of, num_blocks, sum_of_block
from meshwright.parallel.stored.direct import DirectFile
from meshwright.parallel.stored.reading import Caches, FileReader

FILES = 2  # of what changes and of what stands still

Key = tuple[str, tuple[int, ...], tuple[int, ...], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a part lies in its file, and the sums of its blocks."""

    at: int
    size: int
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
    with ExitStack() as stack, ThreadPoolExecutor(FILES) as pool:
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
    """A file of parts."""

    def __init__(self, path: Path, pool: ThreadPoolExecutor) -> None:
        self._path = path
        self._file = DirectFile(path, pool)
        self.parts: dict[Key, Place] = {}

    def __enter__(self) -> _Out:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def bytes(self) -> int:
        return self._file.bytes

    def append(self, piece: Piece) -> None:
        at, data = self.bytes, piece.data
        for number in range(num_blocks(data.nbytes)):
            start, stop = block(number, data.nbytes)
            piece.sum(number)  # brings the block into the caches that it is taken from
            self._file.append(data[start:stop])
        self.parts[piece.key] = Place(at=at, size=data.nbytes, sums=tuple(piece.sums))

    def finish(self) -> None:
        """Every part is on the disk and reads back from there. Raises OSError."""
        self._file.finish()
        with FileReader(self._path, caches=Caches.PASS) as file:
            for place in self.parts.values():
                file.check(at=place.at, size=place.size, sums=place.sums, spoilt=self._spoilt)

    def _spoilt(self, number: int) -> OSError:
        return OSError(f"{self._path} does not read back as it was written")
