"""Store: the checkpoints of one run. A save is atomic, in the background, and one at a time."""

from __future__ import annotations

import json
import platform
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

import meshwright
from meshwright.catalog.huggingface.folder import open_folder
from meshwright.parallel import relocate, stored
from meshwright.parallel.stored import Earlier, SpoiltError, Written
from meshwright.spec.errors import ConfigError, EnvironmentUnfit, Problem
from meshwright.spec.low_rank import ranks_of
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design
from meshwright.spec.units import format_seconds
from meshwright.train.checkpoint.find import (
    Checkpoint,
    by_step,
    corrupt,
    corruption,
    is_corrupt,
    is_other_model,
    newest,
    open_checkpoint,
    other_model,
    path_of,
    reader_of,
)
from meshwright.train.checkpoint.manifest import Manifest, model_digest
from meshwright.train.checkpoint.peers import PATIENCE, Peers, mended_by, told
from meshwright.train.checkpoint.staging import Staging
from meshwright.train.checkpoint.write import Retention, failed, forget, write
from meshwright.train.huggingface import load_weights
from meshwright.train.state import TrainState

T = TypeVar("T")
UNANSWERED = "see that the disk answers"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTook:
    """Of all ranks the most: seconds that a save stopped training, until the newest that is safe was, and of a step."""

    stall_seconds: float
    write_seconds: float | None
    step_seconds: float


class Store:
    """The checkpoints under `directory` (RUN/checkpoints), kept as `design.job.checkpoint` says.

    Every rank makes one and calls its methods alike: they are collective over a gloo group of the store's own.
    Every rank sees the same directory. Checkpoints of steps `pinned` stay, however many are newer.
    """

    def __init__(self, directory: Path, *, design: Design) -> None:
        self._directory, self._design = Path(directory), design
        self._model = model_digest(design.model)
        self._peers = Peers()
        self._thread: threading.Thread | None = None
        self._failure: Problem | None = None
        self._write_seconds: float | None = None
        self._agreeing_seconds = 0.0
        self._saving = 0
        self._written: dict[int, Written] = {}
        self._staging = Staging()
        self.skipped: tuple[Problem, ...] = ()
        self.pinned: frozenset[int] = frozenset()

    @property
    def writing(self) -> bool:
        """Whether this rank writes a checkpoint beside training."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def spoilt(self) -> tuple[Problem, ...]:
        """Of those passed over the ones that were complete before, by their steps."""
        return tuple(by_step(problem) for problem in self.skipped if is_corrupt(problem))

    def follow(self, design: Design) -> Design:
        """What is saved from here on is of `design`, whose model has the same matrices, of any ranks; it itself."""
        self._design = design
        return design

    def share(self, look: Callable[[], T]) -> T:
        """What `look` gave on rank 0, which alone looks, on every rank. Collective. Waits for a save that is under way,
        whose ranks speak to each other in the same group; raises as `wait` does."""
        self.wait()
        return self._peers.share(look)

    def of_step(self, step: int) -> Checkpoint:
        """The checkpoint of `step`, and none that is later is left. Raises ConfigError that says why it cannot be."""
        found = self.at(path_of(self._directory, step))
        self._peers.agree(lambda: forget(self._directory, after=step) if self._peers.rank == 0 else None)
        return found

    def committed(self) -> Checkpoint | None:
        """The newest complete checkpoint by its marker and the sizes of its files, or None; no tensor is read.

        `skipped` tells what was passed over. Collective. Raises ConfigError when all that is complete is of another
        model.
        """
        return self._newest(lambda _: None)

    def newest(self, load: Callable[[Checkpoint], object] | None = None) -> Checkpoint | None:
        """The newest complete checkpoint that `load` took up, or None; `skipped` tells what was passed over.

        `load` ends in `self.load`; one that it finds corrupt is passed over, and the one before is taken up in its
        place. Without it every byte is read and checked. Collective. Raises as `committed` and `load` do.
        """
        return self._newest(self._spoilt if load is None else partial(self._loaded, load))

    def _newest(self, problem_of: Callable[[Checkpoint], Problem | None]) -> Checkpoint | None:
        self.wait()
        spoilt: dict[Path, Problem] = {}
        while True:
            found = self._peers.share(partial(newest, self._directory, model=self._model, without=tuple(spoilt)))
            problem = problem_of(found.checkpoint) if found.checkpoint else None
            if found.checkpoint is None or problem is None:
                break
            spoilt[found.checkpoint.path] = problem
        self.skipped = (*found.skipped, *spoilt.values())
        others = [problem for problem in found.skipped if is_other_model(problem)]
        if found.checkpoint is None and others:
            raise ConfigError(others)
        return found.checkpoint

    def _loaded(self, load: Callable[[Checkpoint], object], checkpoint: Checkpoint) -> Problem | None:
        """What `load` found corrupt of `checkpoint`."""
        try:
            load(checkpoint)
        except ConfigError as error:
            problem = error.problems[0]
            if is_corrupt(problem) and problem.where == str(checkpoint.path):
                return problem
            raise
        return None

    def at(self, path: Path) -> Checkpoint:
        """The checkpoint in `path`. Raises ConfigError that says why it cannot be used."""
        self.wait()
        opened = self._peers.share(partial(open_checkpoint, Path(path)))
        if isinstance(opened, Problem):
            raise ConfigError(opened)
        problem = other_model(opened) if opened.manifest.model != self._model else self._spoilt(opened)
        if problem is not None:
            raise ConfigError(problem)
        return opened

    def load(self, checkpoint: Checkpoint, target: relocate.State) -> dict[str, Any]:
        """`target` holds the checkpoint, whatever plan saved it; returns the progress given to `save`.

        Every byte is read once, and checked as it is taken. Raises ConfigError before anything is changed when it is
        of another model, lacks a tensor or has one too many; and on every rank, with `target` half of it, when a block
        is not what was saved.
        """
        if checkpoint.manifest.model != self._model:
            raise ConfigError(other_model(checkpoint))
        self.wait()
        reader = reader_of(checkpoint)
        problems = self._peers.gather(reader if isinstance(reader, Problem) else None)
        if isinstance(reader, Problem) or any(problems):
            raise ConfigError([problem for problem in problems if problem is not None])
        try:
            relocate.load(reader, target, group=self._peers.group)
        except (SpoiltError, OSError) as error:
            raise ConfigError(corruption(checkpoint, error)) from error
        return dict(checkpoint.manifest.state)

    def prepare(self, source: relocate.State) -> None:
        """The memory that a first save of `source` copies to is got beside training from now on."""
        self._staging.prepare(relocate.kept(source, group=self._peers.group))

    def save(
        self, source: relocate.State, *, step: int, progress: Mapping[str, Any], step_seconds: float = 0.0
    ) -> SaveTook:
        """What is saved is what the tensors are now, and a checkpoint of `step` is begun; `wait` says when it counts.

        `progress` is JSON values; `step_seconds` is what a step takes on this rank. Waits for the save before it.
        Raises EnvironmentUnfit when that one failed.
        """
        began = time.perf_counter()
        self.wait()
        kept = relocate.kept(source, group=self._peers.group)
        beside = self._design.job.checkpoint.asynchronous
        tensors = self._staging.take(kept) if beside else kept
        work = partial(self._write, tensors, self._manifest(step, progress), self.pinned, began=began)
        if not beside:
            work()
            self.wait()
        took = self._agreed(time.perf_counter() - began, step_seconds)
        if beside:
            self._saving = step
            self._thread = threading.Thread(target=work, name=f"checkpoint-{step}", daemon=True)
            self._thread.start()
        return took

    def begin(self, write_tensors: Callable[[Path], Written]) -> None:
        """A checkpoint of step 0 is committed whose tensors `write_tensors` writes into the folder it is given.

        By one process alone. Raises EnvironmentUnfit when it cannot be.
        """
        manifest = self._manifest(0, {**TrainState(seed=self._design.job.seed).to_dict(), "techniques": {}})
        done = write(
            write_tensors, manifest, directory=self._directory, peers=self._peers, retention=Retention(newest=0)
        )
        if isinstance(done, Problem):
            raise EnvironmentUnfit(done)

    def start(self, path: Path, target: relocate.State) -> None:
        """The model of `target` holds the weights of the Hugging Face folder `path`, each rank its part. Collective.

        Raises ConfigError, before anything is changed, with all that is wrong with the folder or when it is of
        another model.
        """
        folder = self._peers.agree(lambda: open_folder(path))
        if isinstance(folder, Problem):
            raise ConfigError(folder)
        if model_digest(folder.model) != self._model:
            raise ConfigError(other_weights(self._design.model, path))
        failure = self._peers.agree(lambda: load_weights(target, folder, group=self._peers.group))
        if isinstance(failure, Problem):
            raise ConfigError(failure)

    def abandon(self) -> None:
        """No save is under way: one that was may have failed, since other ranks were lost."""
        self._staging.end()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """No save is under way, and the last one is committed. Raises EnvironmentUnfit when it failed, on all ranks, or
        when a disk does not answer for as long as ranks wait for each other."""
        if self._thread is not None:
            self._thread.join(PATIENCE.total_seconds())
            if self._thread.is_alive():
                why = f"its files are not written after {format_seconds(PATIENCE.total_seconds())} of waiting"
                raise EnvironmentUnfit(failed(self._saving, why, directory=self._directory, fix=UNANSWERED))
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise EnvironmentUnfit(failure)

    def close(self) -> None:
        """As `wait`; then the store's group is gone."""
        self._staging.end()
        try:
            self.wait()
        finally:
            self._peers.close()

    def _agreed(self, stall_seconds: float, step_seconds: float) -> SaveTook:
        """The largest of all ranks; that they hear of it stops training too, as long as it took the last time."""
        began = time.perf_counter()
        everyone = self._peers.gather(
            (stall_seconds + self._agreeing_seconds, self._write_seconds or 0.0, step_seconds)
        )
        self._agreeing_seconds = time.perf_counter() - began
        stall, write, step = (max(each) for each in zip(*everyone, strict=True))
        return SaveTook(stall_seconds=stall, write_seconds=write or None, step_seconds=step)

    def _write(self, tensors: dict[str, Tensor], manifest: Manifest, pinned: frozenset[int], *, began: float) -> None:
        """The checkpoint is committed, or `_failure` says why not. Runs beside training."""
        kept, step = self._design.job.checkpoint, manifest.step
        earlier = self._earlier(step, keep=kept.keep)
        retention = Retention(newest=kept.keep, every_steps=kept.keep_every_steps, pinned=pinned)
        tensors_of = partial(stored.write, tensors, group=self._peers.group, step=step, earlier=earlier)
        try:
            done = write(tensors_of, manifest, directory=self._directory, peers=self._peers, retention=retention)
        except (Exception, CheckpointException) as error:  # a thread's exception is lost; the run must hear of it
            done = failed(step, told(error), directory=self._directory, fix=mended_by(error))
        if isinstance(done, Problem):
            self._failure = done
        else:
            self._written = {**self._before(step, most=1), step: done}
        self._write_seconds = time.perf_counter() - began

    def _earlier(self, step: int, *, keep: int) -> Earlier:
        """A file is shared with the checkpoint before the last: of two that follow each other each has its own bytes,
        and what spoils one leaves the other whole. Where only one is kept it is shared with that."""
        known = [written for _, written in sorted(self._before(step, most=2).items())]
        if not known:
            return Earlier()
        return Earlier(last=known[-1], shared=known[-1] if keep == 1 else (known[-2] if len(known) > 1 else None))

    def _before(self, step: int, *, most: int) -> dict[int, Written]:
        """What this rank wrote of the `most` newest checkpoints before `step`, itself and since it was started."""
        steps = sorted(known for known in self._written if known < step)[-most:]
        return {known: self._written[known] for known in steps}

    def _spoilt(self, checkpoint: Checkpoint) -> Problem | None:
        """The first part whose checksum is wrong, the ranks reading a share of the parts each."""
        found = self._peers.gather(corrupt(checkpoint, share=self._peers.rank, ways=self._peers.size))
        return next((problem for problem in found if problem is not None), None)

    def _manifest(self, step: int, state: Mapping[str, Any]) -> Manifest:
        return Manifest(
            step=step,
            state=json.loads(json.dumps(dict(state))),
            plan=self._design.plan.digest(),
            layout=self._design.plan.describe(),
            model=self._model,
            model_name=self._design.model.name,
            world_size=self._peers.size,
            versions={
                "meshwright": meshwright.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            files={},
            index="",
            ranks=ranks_of(self._design.model),
        )


def other_weights(model: ModelSpec, path: Path) -> Problem:
    """The folder `path` holds weights of another model than `model`."""
    fix = f"design the plan with --model {path}, or name a folder of {model.name}"
    return Problem(what=f"its config.json is not of {model.name}", where=f"job.start: {path}", fix=fix)
