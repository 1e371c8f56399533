"""A checkpoint that a stranger made, with sums that hold, runs nothing: each of its files may be a pickle."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from meshwright.parallel.stored import INDEX
from meshwright.spec.errors import ConfigError
from meshwright.train.checkpoint.manifest import COMMITTED, MANIFEST, digest_of, seal
from tests.train.test_checkpoint import Saved, once, saved

TENSORS = "rank-0.tensors"

__all__ = ["once", "saved"]


class Mischief:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def sealed(folder: Path, **files: object) -> None:
    """The manifest is of the files as they are now, and of `files`, and the marker of the manifest."""
    told = json.loads((folder / MANIFEST).read_text())
    for name, record in told["files"].items():
        record["bytes"] = (folder / name).stat().st_size
    told["files"].update(files)
    told["index"] = digest_of(folder / INDEX)
    (folder / MANIFEST).write_text(json.dumps(told))
    seal(folder)


@pytest.mark.parametrize("name", [INDEX, TENSORS, MANIFEST, COMMITTED])
def test_a_pickle_in_place_of_any_file_is_not_run(saved: Saved, name: str) -> None:
    folder, ran = saved.folder(2), saved.directory / "ran"
    pickled = pickle.dumps(Mischief(ran))
    if name == TENSORS:  # of the size that the index expects
        pickled = pickled.ljust((folder / name).stat().st_size, b".")
    (folder / name).write_bytes(pickled)
    if name not in (MANIFEST, COMMITTED):
        sealed(folder)
    with pytest.raises(ConfigError) as raised:
        saved.store.load(saved.store.at(folder), saved.run.state())
    assert str(folder) in str(raised.value)
    assert not ran.exists()


def test_names_and_links_that_leave_the_folder_are_refused(saved: Saved, tmp_path: Path) -> None:
    folder, outside = saved.folder(2), tmp_path / "outside"
    outside.write_bytes(b"x")
    sealed(folder, **{"../outside": {"bytes": 1, "step": 2}})
    with pytest.raises(ConfigError, match=r"names '../outside', which leaves the folder"):
        saved.store.at(folder)
    (folder / TENSORS).rename(tmp_path / "tensors")
    (folder / TENSORS).symlink_to(tmp_path / "tensors")
    told = json.loads((folder / MANIFEST).read_text())
    del told["files"]["../outside"]
    (folder / MANIFEST).write_text(json.dumps(told))
    seal(folder)
    with pytest.raises(ConfigError, match=r"leaves the folder"):
        saved.store.at(folder)
