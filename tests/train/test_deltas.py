"""What stands still is not written again: shared by every second checkpoint, whole in each, and never the only copy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.parallel import stored
from meshwright.spec.errors import EnvironmentUnfit
from meshwright.spec.job import CheckpointSpec
from meshwright.spec.plan import Design
from meshwright.train.checkpoint import Checkpoint, Store, corrupt, newest, open_checkpoint
from meshwright.train.checkpoint.find import path_of
from meshwright.train.checkpoint.manifest import COMMITTED
from meshwright.train.state import TrainState
from tests.parallel.move_cases import SEED, Runner, runner
from tests.support.designs import Layout, design, frozen
from tests.support.models import all_models
from tests.train.checkpoint_cases import train

BLOCKS = frozenset({0, 1, 2})


def made(*, keep: int = 2) -> Design:
    entry = frozen(design(all_models()["tiny"], Layout(batch=8)), BLOCKS)
    return replace(entry, job=replace(entry.job, checkpoint=CheckpointSpec(keep=keep, asynchronous=False)))


class Saves:
    """A run that is saved after every step."""

    def __init__(self, directory: Path, *, keep: int = 2) -> None:
        self.directory, self.design = directory, made(keep=keep)
        self.run, self.state = runner(self.design), TrainState(seed=SEED)
        self.store = Store(directory, design=self.design)

    def save(self, *, steps: int = 1) -> None:
        for _ in range(steps):
            train(self.run, self.state, 1)
            self.store.save(self.run.state(), step=self.state.step, progress=self.state.to_dict())

    def at(self, step: int) -> Checkpoint:
        found = open_checkpoint(self.directory / f"step-{step:08d}")
        assert isinstance(found, Checkpoint)
        return found

    def frozen_bytes(self) -> int:
        """Of what no step changes."""
        parameters = {name: x for name, x in self.run.laid.named_parameters() if not x.requires_grad}
        return sum(x.numel() * x.element_size() for x in parameters.values())


def tensors(run: Runner) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in run.state().tensors.items()}


def resumed(saves: Saves) -> tuple[Runner, int]:
    """A run that goes on from the newest whole checkpoint, and that one's step."""
    store, run = Store(saves.directory, design=saves.design), runner(saves.design, seed=SEED + 1)
    found = store.newest()
    assert found is not None
    store.load(found, run.state())
    return run, found.step


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


def test_frozen_parts_are_written_twice_and_then_no_more(tmp_path: Path) -> None:
    saves = Saves(tmp_path, keep=0)
    saves.save(steps=6)
    told = [saves.at(step).manifest for step in range(1, 7)]
    whole, still = told[0].written_bytes, saves.frozen_bytes()
    assert 0 < still < whole
    assert [each.referred_bytes for each in told] == [0, 0, 0, still, still, still]
    assert [each.written_bytes for each in told] == [whole, whole, whole, *[whole - still] * 3]
    shared = {step: {file.stat().st_ino for file in saves.at(step).path.glob("*still*")} for step in range(2, 7)}
    assert shared[2] == shared[4] == shared[6]
    assert shared[3] == shared[5]
    assert not shared[2] & shared[3]
    run, step = resumed(saves)
    assert step == 6
    assert same(tensors(run), tensors(saves.run))


def test_retention_takes_nothing_that_a_kept_checkpoint_needs(tmp_path: Path) -> None:
    for keep in (1, 2):
        saves = Saves(tmp_path / str(keep), keep=keep)
        saves.save(steps=6)
        left = sorted(path.name for path in saves.directory.iterdir())
        assert left == [f"step-{step:08d}" for step in range(7 - keep, 7)]
        assert saves.at(6).manifest.referred_bytes == saves.frozen_bytes()
        alone = tmp_path / f"alone-{keep}" / "step-00000006"
        shutil.copytree(saves.at(6).path, alone)
        shutil.rmtree(saves.directory)
        found = open_checkpoint(alone)
        assert isinstance(found, Checkpoint)
        assert corrupt(found) is None


def test_what_spoils_a_shared_part_is_told_of_both_and_leaves_the_one_between(tmp_path: Path) -> None:
    saves = Saves(tmp_path, keep=3)
    saves.save(steps=6)
    before = tensors(saves.run)
    (shared,) = saves.at(6).path.glob("*still*")
    content = bytearray(shared.read_bytes())
    content[len(content) // 2] ^= 1
    with shared.open("r+b") as file:
        file.write(content)
    for step in (4, 6):
        problem = corrupt(saves.at(step))
        assert problem is not None
        assert f"in {shared.name}" in problem.why
        assert "which step 2 wrote and others may have in common" in problem.why
    run, step = resumed(saves)
    assert step == 5
    again = Saves(tmp_path, keep=3)
    again.run = run
    again.state.load(saves.at(5).manifest.state)
    again.save()
    assert corrupt(again.at(6)) is None
    assert same(tensors(again.run), before)


def test_a_part_that_moves_again_is_written_again(tmp_path: Path) -> None:
    saves = Saves(tmp_path, keep=0)
    saves.save(steps=4)
    name, parameter = next(iter((n, x) for n, x in saves.run.laid.named_parameters() if not x.requires_grad))
    with torch.no_grad():
        parameter.add_(1.0)
    saves.save()
    manifest = saves.at(5).manifest
    assert manifest.referred_bytes == 0
    run, step = resumed(saves)
    assert step == 5
    assert torch.equal(dict(run.laid.named_parameters())[name], parameter)


def test_a_file_system_without_hard_links_writes_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("the file system has no links")

    monkeypatch.setattr(os, "link", refuse)
    saves = Saves(tmp_path)
    saves.save(steps=5)
    assert saves.at(5).manifest.referred_bytes == 0
    assert corrupt(saves.at(5)) is None


CALLS = ("mkdir", "open", "write", "fsync", "link", "rename", "unlink", "rmdir")


@contextmanager
def at_every_call(monkeypatch: pytest.MonkeyPatch, do: Callable[[str], None]) -> Iterator[None]:
    """Before each call that changes a file system `do` is called, which may make such calls itself."""
    busy = [False]
    with monkeypatch.context() as patch:
        for name in CALLS:
            real = getattr(os, name)

            def call(*given: Any, name: str = name, real: Callable[..., Any] = real, **named: Any) -> Any:
                if not busy[0]:
                    busy[0] = True
                    do(name)
                    busy[0] = False
                return real(*given, **named)

            patch.setattr(os, name, call)
        yield


def test_a_marker_is_on_the_disk_before_older_checkpoints_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a folder's names a power cut takes those that were not flushed."""
    saves, calls = Saves(tmp_path / "run", keep=1), list[str]()
    saves.save(steps=1)
    real_fsync, real_rmtree = os.fsync, shutil.rmtree

    def fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        marked = path.is_dir() and (path / COMMITTED).exists()
        calls.append(f"flush {path.name}{' with its marker' if marked else ''}")
        real_fsync(handle)

    def rmtree(folder: Path, **settings: bool) -> None:
        calls.append(f"remove {Path(folder).name}")
        real_rmtree(folder, **settings)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    saves.save()
    first, second = (path_of(saves.directory, step).name for step in (1, 2))
    assert calls.index(f"flush {second} with its marker") < calls.index(f"remove {first}")


@pytest.mark.parametrize("goes", CALLS)
def test_a_folder_that_vanishes_costs_that_save_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes: str
) -> None:
    """Before the first call of each kind, of a save: it is told or not begun yet, and the next one is whole."""
    saves, gone = Saves(tmp_path / "run"), list[str]()
    saves.save(steps=4)

    def vanish(call: str) -> None:
        if call == goes and not gone:
            gone.append(call)
            shutil.rmtree(saves.directory)

    with at_every_call(monkeypatch, vanish), suppress(EnvironmentUnfit):
        saves.save()
    assert gone == [goes]
    saves.save()
    found = newest(saves.directory).checkpoint
    assert found is not None
    assert found.step == 6
    assert corrupt(found) is None


def test_a_kill_at_any_point_leaves_a_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder as a kill would leave it, before every call of the fifth save: what is newest there is whole."""
    saves, seen = Saves(tmp_path / "run"), list[tuple[str, int]]()
    saves.save(steps=4)

    def killed_here(call: str) -> None:
        left = tmp_path / "left"
        shutil.copytree(saves.directory, left)
        found = newest(left).checkpoint
        assert found is not None, call
        assert corrupt(found) is None, call
        stored.Reader(found.path)
        seen.append((call, found.step))
        shutil.rmtree(left)

    with at_every_call(monkeypatch, killed_here):
        saves.save()
    assert {call for call, _ in seen} == set(CALLS)
    steps = [step for _, step in seen]
    assert sorted(set(steps)) == [4, 5]
    assert steps == sorted(steps)
