"""Writing one checkpoint: into a folder that does not count, checked, renamed, and only then committed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from meshwright.parallel import stored
from meshwright.parallel.stored import Written
from meshwright.spec.errors import Problem
from meshwright.train.checkpoint.find import PARTIAL, Checkpoint, folders, newest, open_checkpoint, path_of
from meshwright.train.checkpoint.manifest import COMMITTED, FileRecord, Manifest, digest_of, seal, write_manifest
from meshwright.train.checkpoint.peers import Peers
from meshwright.train.disk import file_system

_REPLACED = ".replaced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which complete checkpoints stay: the `newest` (0: all), those of steps that are multiples of `every_steps`, and
    those of steps `pinned`."""

    newest: int
    every_steps: int = 0
    pinned: frozenset[int] = frozenset()

    def stays(self, step: int, *, newer: int) -> bool:
        """Whether the checkpoint of `step` does, of which `newer` are kept for being newest."""
        regular = self.every_steps > 0 and step % self.every_steps == 0
        return step in self.pinned or regular or self.newest == 0 or newer < self.newest


def write(
    write_tensors: Callable[[Path], Written],
    manifest: Manifest,
    *,
    directory: Path,
    peers: Peers,
    retention: Retention,
) -> Written | Problem:
    """The checkpoint is committed and of those before it stay whom `retention` names, or nothing changed and the
    problem is returned.

    `write_tensors` writes those of this rank into the folder that it is given. Collective; the result is what this
    rank wrote, or on every rank the same problem.
    """
    final = path_of(directory, manifest.step)
    begun = final.with_name(final.name + PARTIAL)
    done: Written | Problem | None = peers.agree(partial(_on_first, peers, partial(_begin, begun, final)))
    if done is None:
        done = peers.agree(partial(write_tensors, begun))
    if isinstance(done, Written):
        files = _gathered(done, peers)
        commit = partial(_commit, begun, final, replace(manifest, files=files), retention)
        failure = peers.agree(partial(_on_first, peers, commit))
        if failure is None:
            return replace(done, folder=final)
        done = failure
    if peers.rank == 0:
        shutil.rmtree(begun, ignore_errors=True)
    return failed(manifest.step, done.what, directory=directory, fix=done.fix)


def _gathered(written: Written, peers: Peers) -> Mapping[str, FileRecord]:
    """The files of all ranks, by name."""
    mine = {name: FileRecord(bytes=file.bytes, step=file.step) for name, file in written.files.items()}
    return dict(sorted(entry for share in peers.gather(mine) for entry in share.items()))


def failed(step: int, why: str, *, directory: Path, fix: str) -> Problem:
    """The checkpoint of `step` could not be saved, or what follows a save not be done; what is left to resume from."""
    last = newest(directory).checkpoint
    left = "no checkpoint is left" if last is None else f"the checkpoint of step {last.step} is whole"
    is_whole = last is not None and last.step == step
    return Problem(
        what=f"the checkpoint of step {step} {'was saved, and the run cannot go on' if is_whole else 'was not saved'}",
        where=str(directory),
        why=why,
        fix=f"{fix}, then resume; {left}; {file_system(directory)}",
    )


def _on_first(peers: Peers, work: Callable[[], None]) -> None:
    if peers.rank == 0:
        work()


def _begin(begun: Path, final: Path) -> None:
    for place in (begun, final, final.with_name(final.name + _REPLACED)):
        if place.exists() and not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "a file is where a folder of checkpoints would be", str(place))
    shutil.rmtree(begun, ignore_errors=True)
    begun.mkdir(parents=True)


def _commit(begun: Path, final: Path, manifest: Manifest, retention: Retention) -> None:
    """From here on the folder counts: it is renamed when its manifest is right, and sealed when it has its name."""
    write_manifest(begun, replace(manifest, index=digest_of(begun / stored.INDEX)))
    _flush_folder(begun)
    # What is replaced stays a whole checkpoint, under another name, until the new one is.
    replaced = final.with_name(final.name + _REPLACED)
    if isinstance(open_checkpoint(final), Checkpoint) or not replaced.exists():
        _remove(replaced)
        if final.exists():
            final.rename(replaced)
    else:
        _remove(final)
    begun.rename(final)
    seal(final)
    _flush_folder(final)
    _flush_folder(final.parent)
    _remove(replaced)
    _retain(final.parent, retention)


def forget(directory: Path, *, after: int) -> None:
    """No checkpoint of a later step than `after` is left."""
    for folder in folders(directory):
        opened = open_checkpoint(folder)
        if not isinstance(opened, Checkpoint) or opened.step > after:
            _remove(folder)


def _retain(directory: Path, retention: Retention) -> None:
    """Complete checkpoints that `retention` does not name, those that were saved again, and halves of saves that never
    ended, are gone."""
    newer, whole = 0, set[str]()
    for folder in folders(directory):
        opened = open_checkpoint(folder)
        if folder.suffix == _REPLACED and folder.stem in whole:
            _remove(folder)
        elif isinstance(opened, Checkpoint):
            whole.add(folder.name)
            if not retention.stays(opened.step, newer=newer):
                _remove(folder)
            newer += opened.step not in retention.pinned
        elif folder.name.endswith(PARTIAL) or not (folder / COMMITTED).exists():
            _remove(folder)


def _remove(folder: Path) -> None:
    """The marker goes first: a folder that is half removed never counts."""
    (folder / COMMITTED).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _flush_folder(folder: Path) -> None:
    """The names in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
