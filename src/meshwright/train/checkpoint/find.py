"""Which checkpoints of a directory are complete, which is the newest, and what is wrong with the others."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.parallel import stored
from meshwright.parallel.stored import Reader, Spoilt, SpoiltError
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.low_rank import ranks_of
from meshwright.spec.plan import Design
from meshwright.train.checkpoint.manifest import COMMITTED, MANIFEST, Manifest, digest_of, is_sealed, read_manifest

PARTIAL = ".partial"
_OTHER = "it is of another model,"
_CORRUPT = "corrupt"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One committed checkpoint."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


def of_checkpoint(design: Design, checkpoint: Checkpoint) -> Design:
    """The design with the ranks that the model had when `checkpoint` was saved."""
    ranks = checkpoint.manifest.ranks
    if ranks == ranks_of(design.model):
        return design
    return replace(design, model=design.model.dense().with_ranks(ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest complete checkpoint, or None, and every newer one that was passed over, with the reason."""

    checkpoint: Checkpoint | None
    skipped: tuple[Problem, ...]


def path_of(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def folders(directory: Path) -> tuple[Path, ...]:
    """Folders of checkpoints, finished or not, newest first."""
    return tuple(path for path in places(directory) if path.is_dir())


def places(directory: Path) -> tuple[Path, ...]:
    """As `folders`, with whatever else has the name of a checkpoint."""
    if not directory.is_dir():
        return ()
    found = {path: match for path in directory.iterdir() if (match := _NAME.match(path.name))}
    steps = {path: match for path, match in found.items() if path.is_dir() or path.name == match[0]}
    return tuple(sorted(steps, key=lambda path: (int(steps[path][1]), not path.suffix), reverse=True))


def newest(directory: Path, *, model: str | None = None, without: Collection[Path] = ()) -> Found:
    """The newest complete checkpoint in `directory` (RUN/checkpoints), by its marker, manifest and file sizes.

    `model` is the digest of the model it has to be of; None takes any. `without` is known to be unfit.
    """
    skipped = []
    for folder in places(directory):
        if folder in without:
            continue
        checkpoint = open_checkpoint(folder)
        if isinstance(checkpoint, Problem):
            skipped.append(checkpoint)
        elif model is not None and checkpoint.manifest.model != model:
            skipped.append(other_model(checkpoint))
        else:
            return Found(checkpoint=checkpoint, skipped=tuple(skipped))
    return Found(checkpoint=None, skipped=tuple(skipped))


def open_checkpoint(folder: Path) -> Checkpoint | Problem:
    """The checkpoint in `folder`, or what keeps it from being one. Checksums are left to `corrupt`."""
    fix = "resume from another checkpoint, or delete this one"
    named = _NAME.match(folder.name)
    if named and folder.exists() and not folder.is_dir():
        return Problem(what=_CORRUPT, where=str(folder), why="it is a file, not a folder", fix="move it away")
    if not folder.is_dir():
        return Problem(what="there is no checkpoint", where=str(folder), fix="name a folder of RUN/checkpoints")
    if folder.name.endswith(PARTIAL):
        return Problem(what="half-written", where=str(folder), why="its save never ended", fix=fix)
    if not (folder / COMMITTED).exists():
        return Problem(what="half-written", where=str(folder), why=f"it has no {COMMITTED} marker", fix=fix)
    manifest = read_manifest(folder)
    if isinstance(manifest, str):
        return Problem(what=_CORRUPT, where=str(folder), why=manifest, fix=fix)
    if not is_sealed(folder):
        why = f"{MANIFEST} is not the one that was committed"
        return Problem(what=_CORRUPT, where=str(folder), why=why, fix=fix)
    if named and int(named[1]) != manifest.step:
        why = f"it holds step {manifest.step}, which is not that of its name"
        return Problem(what=_CORRUPT, where=str(folder), why=why, fix="give it its own name back, or delete it")
    for name, record in manifest.files.items():
        path = folder / name
        if _leaves(path, name):
            why = f"its manifest names {name[:200]!r}, which leaves the folder or is no name of a file"
            return Problem(what=_CORRUPT, where=str(folder), why=why, fix=fix)
        size = path.stat().st_size if path.is_file() else None
        if size != record.bytes:
            why = f"{name} is missing" if size is None else f"{name} has {size} bytes, not {record.bytes}"
            return Problem(what=_CORRUPT, where=str(folder), why=why, fix=fix)
    return Checkpoint(path=folder, manifest=manifest)


def _leaves(path: Path, name: str) -> bool:
    """Whether `name` is not of a file of the folder that `path` is in, or of a link out of it."""
    try:
        return path.name != name or (path.is_symlink() and path.resolve().parent != path.parent.resolve())
    except (OSError, ValueError):
        return True


def corrupt(checkpoint: Checkpoint, *, share: int = 0, ways: int = 1) -> Problem | None:
    """The first block of a tensor whose content is not what was saved; None when all are. Share `share` of `ways` of
    what it holds is read."""
    try:
        _check_index(checkpoint)
        found = stored.spoilt_part(checkpoint.path, index=share, ways=ways)
    except (OSError, ConfigError) as error:
        return corruption(checkpoint, error)
    return None if found is None else corruption(checkpoint, SpoiltError(found))


def reader_of(checkpoint: Checkpoint) -> Reader | Problem:
    """Its tensors, whose blocks are checked as they are read; or why there are none."""
    try:
        _check_index(checkpoint)
        return Reader(checkpoint.path)
    except (OSError, ConfigError) as error:
        return corruption(checkpoint, error)


def corruption(checkpoint: Checkpoint, error: SpoiltError | OSError | ConfigError) -> Problem:
    """What `error`, met where `checkpoint` was read, tells of it."""
    if isinstance(error, SpoiltError):
        why = _told(error.spoilt, checkpoint.manifest)
    else:
        why = str(error.problems[0]) if isinstance(error, ConfigError) else f"it cannot be read: {error}"
    fix = "resume from another checkpoint, or delete it"
    return Problem(what=_CORRUPT, where=str(checkpoint.path), why=why, fix=fix)


def _check_index(checkpoint: Checkpoint) -> None:
    path = checkpoint.path / stored.INDEX
    if digest_of(path) != checkpoint.manifest.index:
        what = f"the checksum of {stored.INDEX} is not the one that was saved"
        raise ConfigError(Problem(what=what))


def _told(found: Spoilt, manifest: Manifest) -> str:
    if found.file not in manifest.files:
        return f"{found.tensor} is in {found.file}, of which {MANIFEST} does not know"
    step = manifest.files[found.file].step
    common = "" if step == manifest.step else f", which step {step} wrote and others may have in common,"
    where = f"from byte {found.start} to {found.stop}"
    return f"the checksum of {found.tensor} in {found.file}{common} is not the one that was saved, {where}"


def other_model(checkpoint: Checkpoint) -> Problem:
    return Problem(
        what=f"{_OTHER} {checkpoint.manifest.model_name}",
        where=str(checkpoint.path),
        fix="name the model it was saved with, or another run directory",
    )


def is_other_model(problem: Problem) -> bool:
    """The problem is one that `other_model` makes."""
    return problem.what.startswith(_OTHER)


def is_corrupt(problem: Problem) -> bool:
    """The problem is of a checkpoint that was complete and is not any more."""
    return problem.what == _CORRUPT


def by_step(problem: Problem) -> Problem:
    """`checkpoint 40 is corrupt`, and why, of a problem of a folder of checkpoints that `is_corrupt`."""
    named = _NAME.match(Path(problem.where).name)
    which = f"checkpoint {int(named[1]):,}" if named else problem.where
    return Problem(what=f"{which} is {_CORRUPT}", why=problem.why)
