"""A checkpoint is whole or does not count; it loads on any plan; what is wrong with one is said in words."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from meshwright.cost.holdings import Contents
from meshwright.parallel import relocate
from meshwright.spec.errors import ConfigError, EnvironmentUnfit
from meshwright.spec.job import CheckpointSpec
from meshwright.spec.plan import Design, Sharding
from meshwright.train.checkpoint import Store, newest
from meshwright.train.state import TrainState
from tests.parallel.move_cases import SEED, Runner, runner
from tests.support.designs import Layout, design, frozen
from tests.support.models import all_models
from tests.support.pool import Pool, WorkerError
from tests.train.checkpoint_cases import (
    die_while_saving,
    fill_the_disk_of_the_last_rank,
    resume,
    save_then_train,
    train,
    weights,
)

ONE = Layout(batch=8)
PIPELINE = Layout(pipeline=2, shard=2, sharding=Sharding.PARAMETERS, batch=8)
TENSOR = Layout(tensor=2, sharding=Sharding.NONE, batch=8)
FROZEN = frozenset({0, 2})


def of(layout: Layout, *, keep: int = 2, asynchronous: bool = True, model: str = "tiny") -> Design:
    made = design(all_models()[model], layout)
    job = replace(made.job, checkpoint=CheckpointSpec(keep=keep, asynchronous=asynchronous))
    return replace(made, job=job)


@dataclass
class Saved:
    """A directory with whole checkpoints of steps 1 and 2, made by one process."""

    directory: Path
    run: Runner
    store: Store

    def folder(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Made once; nobody trains its run, nor writes to its directory."""
    directory = tmp_path_factory.mktemp("once")
    made, state = of(ONE), TrainState(seed=SEED)
    run, store = runner(made), Store(directory, design=made)
    for _ in range(2):
        train(run, state, 1)
        store.save(run.state(), step=state.step, progress=state.to_dict())
    store.wait()
    return Saved(directory=directory, run=run, store=store)


@pytest.fixture
def saved(once: Saved, tmp_path: Path) -> Saved:
    """A copy of it, which a test may spoil."""
    shutil.copytree(once.directory, tmp_path, dirs_exist_ok=True)
    return Saved(directory=tmp_path, run=once.run, store=Store(tmp_path, design=of(ONE)))


def test_any_plan_resumes_at_the_same_data_with_the_same_loss(pool: Pool, tmp_path: Path) -> None:
    """From a checkpoint whose frozen parts an earlier one wrote."""
    told = pool.run(save_then_train, frozen(of(PIPELINE), FROZEN), str(tmp_path), ranks=4)
    losses, state, _ = told[0]
    assert state == {"step": 4, "tokens": 4 * 8 * 16, "consumed": 32, "seed": SEED}
    found = newest(tmp_path).checkpoint
    assert found is not None
    assert found.manifest.referred_bytes == sum(still for _, _, still in told) > 0
    for layout in (TENSOR, ONE, PIPELINE):
        for again, loaded in pool.run(resume, frozen(of(layout), FROZEN), str(tmp_path), ranks=layout.ranks):
            assert loaded == state, layout.name
            assert again == pytest.approx(losses, abs=1e-9), layout.name


def test_a_full_disk_on_one_rank_is_told_to_all_and_costs_no_other_checkpoint(pool: Pool, tmp_path: Path) -> None:
    for told, left in pool.run(fill_the_disk_of_the_last_rank, of(PIPELINE), str(tmp_path), ranks=4):
        assert "the checkpoint of step 2 was not saved" in told
        assert "File too large" in told
        assert "the checkpoint of step 1 is whole" in told
        assert left == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("at", ["write_manifest", "seal"])
def test_a_process_killed_while_saving_leaves_the_checkpoint_before(pool: Pool, tmp_path: Path, at: str) -> None:
    with pytest.raises(WorkerError, match="the process ended"):
        pool.run(die_while_saving, of(ONE), str(tmp_path), at, ranks=1)
    store = Store(tmp_path, design=of(ONE))
    found = store.newest()
    assert found is not None
    assert found.step == 1
    assert [problem.what for problem in store.skipped] == ["half-written"]
    run = runner(of(ONE))
    store.load(found, run.state())
    store.save(run.state(), step=2, progress={})
    store.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_what_is_saved_is_what_was_there_when_save_was_called(tmp_path: Path) -> None:
    made, state = of(ONE), TrainState(seed=SEED)
    run, store = runner(made), Store(tmp_path, design=made)
    for _ in range(2):
        train(run, state, 1)
        before = weights(run)
        store.save(run.state(), step=state.step, progress={})
    with torch.no_grad():
        for _, parameter in run.laid.named_parameters():
            parameter.fill_(7.0)
    store.wait()
    found = store.newest()
    assert found is not None
    store.load(found, run.state())
    assert all(torch.equal(x, before[name]) for name, x in weights(run).items())


def test_the_newest_of_an_empty_directory_is_none(tmp_path: Path) -> None:
    assert newest(tmp_path / "nothing").checkpoint is None
    assert Store(tmp_path, design=of(ONE)).newest() is None


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for keep, left in ((2, [3, 4]), (1, [4]), (0, [1, 2, 3, 4])):
        directory, made = tmp_path / str(keep), of(ONE, keep=keep, asynchronous=False)
        run, store = runner(made), Store(directory, design=made)
        for step in (1, 2, 3, 4):
            store.save(run.state(), step=step, progress={})
        assert sorted(int(path.name[-8:]) for path in directory.iterdir()) == left


def test_those_of_every_so_many_steps_stay_for_good(tmp_path: Path) -> None:
    made = of(ONE, keep=2, asynchronous=False)
    job = replace(made.job, checkpoint=replace(made.job.checkpoint, keep_every_steps=4))
    run, store = runner(made), Store(tmp_path, design=replace(made, job=job))
    store.pinned = frozenset({3})
    for step in range(1, 12):
        store.save(run.state(), step=step, progress={})
    assert sorted(int(path.name[-8:]) for path in tmp_path.iterdir()) == [3, 4, 8, 10, 11]


def test_a_disk_that_does_not_answer_is_told(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    module = sys.modules[Store.__module__]
    monkeypatch.setattr(module, "PATIENCE", timedelta(milliseconds=50))
    monkeypatch.setattr(module, "write", lambda *_, **__: answers.wait() and None)
    saved.store.save(saved.run.state(), step=7, progress={})
    with pytest.raises(EnvironmentUnfit) as told:
        saved.store.wait()
    answers.set()
    (problem,) = told.value.problems
    assert problem.what == "the checkpoint of step 7 was not saved"
    assert "the checkpoint of step 2 is whole" in str(problem.fix)


def test_a_step_saved_again_replaces_the_first(saved: Saved) -> None:
    saved.store.save(saved.run.state(), step=2, progress={"again": 1})
    saved.store.wait()
    found = saved.store.newest()
    assert found is not None
    assert found.manifest.state == {"again": 1}
    assert len(list(saved.directory.iterdir())) == 2


@pytest.mark.parametrize("left", ["both", "half", "spoilt"])
def test_a_step_that_a_killed_save_left_twice_is_saved_again(saved: Saved, left: str) -> None:
    """The new one whole, or before it was sealed; the one that it replaced half removed."""
    folder = saved.folder(2)
    beside = folder.with_name(f"{folder.name}.replaced")
    shutil.copytree(folder, beside)
    if left == "half":
        (folder / "COMMITTED").unlink()
    elif left == "spoilt":
        largest(beside).unlink()
    saved.store.save(saved.run.state(), step=2, progress={"again": 1})
    saved.store.wait()
    found = saved.store.newest()
    assert found is not None
    assert found.manifest.state == {"again": 1}
    assert sorted(saved.directory.iterdir()) == [saved.folder(1), folder]


@pytest.mark.parametrize("harm", [lambda _: None, lambda folder: largest(folder).unlink()], ids=["whole", "spoilt"])
def test_what_was_saved_again_goes_and_counts_for_none(saved: Saved, harm: Callable[[Path], None]) -> None:
    folder = saved.folder(2)
    beside = folder.with_name(f"{folder.name}.replaced")
    shutil.copytree(folder, beside)
    harm(beside)
    store = Store(saved.directory, design=of(ONE, keep=3, asynchronous=False))
    store.save(saved.run.state(), step=3, progress={})
    assert sorted(saved.directory.iterdir()) == [saved.folder(step) for step in (1, 2, 3)]


def largest(folder: Path) -> Path:
    return max(folder.glob("*.tensors"), key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def older(manifest: Path) -> None:
    manifest.write_text(manifest.read_text().replace('"schema": 3', '"schema": 2'))


@pytest.mark.parametrize(
    ("harm", "what", "why"),
    [
        (lambda folder: flip(largest(folder)), "corrupt", "in rank-0.tensors is not the one that was saved"),
        (lambda folder: largest(folder).unlink(), "corrupt", "rank-0.tensors is missing"),
        (lambda folder: largest(folder).write_bytes(b"half"), "corrupt", "rank-0.tensors has 4 bytes, not"),
        (lambda folder: flip(folder / "index.json"), "corrupt", "the checksum of index.json is not the one"),
        (lambda folder: (folder / "index.json").unlink(), "corrupt", "it cannot be read"),
        (lambda folder: (folder / "COMMITTED").unlink(), "half-written", "it has no COMMITTED marker"),
        (lambda folder: flip(folder / "COMMITTED"), "corrupt", "manifest.json is not the one that was committed"),
        (lambda folder: flip(folder / "manifest.json"), "corrupt", "its manifest cannot be read"),
        (lambda folder: (folder / "manifest.json").unlink(), "corrupt", "it has no manifest"),
        (lambda folder: older(folder / "manifest.json"), "corrupt", "its form is number 2"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "corrupt", "its manifest cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text('{"step": 2}'), "corrupt", "its manifest is not one"),
    ],
    ids=[
        "bit",
        "missing",
        "short",
        "bit of index",
        "no index",
        "marker",
        "bit of marker",
        "bit of manifest",
        "no manifest",
        "older form",
        "cut manifest",
        "other manifest",
    ],
)
def test_what_is_not_whole_is_passed_over_and_told(saved: Saved, harm: object, what: str, why: str) -> None:
    harm(saved.folder(2))  # type: ignore[operator]  # a function of a parameter list
    found = saved.store.newest()
    assert found is not None
    assert found.step == 1
    (problem,) = saved.store.skipped
    assert (problem.what, problem.where) == (what, str(saved.folder(2)))
    assert why in problem.why
    with pytest.raises(ConfigError, match=what):
        saved.store.at(saved.folder(2))
    assert saved.store.at(saved.folder(1)).step == 1
    with pytest.raises(ConfigError, match="there is no checkpoint"):
        saved.store.at(saved.folder(9))


def test_what_a_load_finds_spoilt_is_passed_over_and_the_one_before_is_loaded(saved: Saved) -> None:
    flip(largest(saved.folder(2)))
    run, other = (runner(of(ONE), seed=SEED + number) for number in (1, 2))
    found = saved.store.newest(lambda checkpoint: saved.store.load(checkpoint, run.state()))
    assert found is not None
    assert found.step == 1
    assert [problem.where for problem in saved.store.skipped] == [str(saved.folder(2))]
    assert "in rank-0.tensors is not the one that was saved, from byte" in saved.store.skipped[0].why
    saved.store.load(saved.store.at(saved.folder(1)), other.state())
    assert all(torch.equal(x, weights(other)[name]) for name, x in weights(run).items())


def test_a_manifest_that_was_changed_is_not_the_committed_one(saved: Saved) -> None:
    path = saved.folder(2) / "manifest.json"
    path.write_text(path.read_text().replace('"consumed": 16', '"consumed": 99'))
    found = saved.store.newest()
    assert found is not None
    assert found.step == 1
    assert "not the one that was committed" in saved.store.skipped[0].why


def test_a_checkpoint_of_another_model_is_refused_before_anything_changes(saved: Saved) -> None:
    other = of(ONE, model="gpt")
    store, run = Store(saved.directory, design=other), runner(other)
    before = weights(run)
    with pytest.raises(ConfigError, match="it is of another model, tiny"):
        store.newest()
    with pytest.raises(ConfigError, match="it is of another model, tiny"):
        store.at(saved.folder(2))
    found = saved.store.newest()
    assert found is not None
    with pytest.raises(ConfigError, match="it is of another model, tiny"):
        store.load(found, run.state())
    assert all(torch.equal(x, before[name]) for name, x in weights(run).items())


def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Seven parameters and one moment left out, two tensors of nobody, and one cut."""
    moment = next(name for name in tensors if name.endswith("exp_avg_sq"))
    gone = [*(name for name in tensors if "norm" in name and name.startswith("model."))][:7]
    assert len(gone) == 7
    kept = {name: x for name, x in tensors.items() if name not in (*gone, moment)}
    head = "model.head.output.weight"
    return {**kept, head: kept[head][:-1], "model.ghost": torch.ones(2), "model.layers.99.ghost": torch.ones(2)}


def test_tensors_too_few_and_too_many_are_named_and_nothing_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, state = of(ONE), TrainState(seed=SEED)
    run, store = runner(made), Store(tmp_path, design=made)
    train(run, state, 1)
    whole = relocate.kept
    monkeypatch.setattr(relocate, "kept", lambda source, *, group: changed(whole(source, group=group)))
    store.save(run.state(), step=1, progress={})
    store.wait()
    other = runner(made, seed=SEED + 1)
    before, found = weights(other), store.newest()
    assert found is not None
    with pytest.raises(ConfigError) as caught:
        store.load(found, other.state())
    told = [problem.what for problem in caught.value.problems]
    missing, extra, shapes, moment = told
    assert missing.startswith("the checkpoint has no ")
    assert missing.endswith("norm.weight and 6 more")
    assert extra == "the run has no ghost and 1 more"
    assert shapes.startswith("head.output.weight is (")
    assert moment == (
        "the checkpoint's optimizer keeps step, exp_avg of embedding.tokens.weight, the run's step, exp_avg, exp_avg_sq"
    )
    assert {problem.where for problem in caught.value.problems} == {str(found.path)}
    assert all(torch.equal(x, before[name]) for name, x in weights(other).items())


def test_a_model_by_another_name_is_the_same_model(saved: Saved) -> None:
    made = of(ONE)
    renamed = replace(made, model=replace(made.model, name="other", source="elsewhere"))
    found = Store(saved.directory, design=renamed).newest()
    assert found is not None
    assert found.step == 2


def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    made = of(ONE)
    run, store = runner(made), Store(tmp_path / "checkpoints", design=made)
    store.save(run.state(), step=1, progress={})
    with pytest.raises(EnvironmentUnfit, match=r"step 1 was not saved.*; move away what is in its place, then resume"):
        store.wait()
    store.close()


def test_a_model_alone_loads_without_an_optimizer(saved: Saved) -> None:
    run = runner(of(ONE), seed=SEED + 1)
    found = saved.store.newest()
    assert found is not None
    saved.store.load(found, run.state(Contents.PARAMETERS))
    assert all(torch.equal(x, weights(saved.run)[name]) for name, x in weights(run).items())


def test_newest_needs_no_store_and_checks_no_model(saved: Saved) -> None:
    shutil.copytree(saved.folder(2), saved.directory / "step-00000003.partial")
    found = newest(saved.directory)
    assert found.checkpoint is not None
    assert found.checkpoint.step == 2
    assert [problem.why for problem in found.skipped] == ["its save never ended"]
