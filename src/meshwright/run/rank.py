"""Rank: what every worker process does around a run: settings of the process, its group, and the end of the run."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from meshwright.run.allocator import keep_freed_memory
from meshwright.run.files import write_json
from meshwright.run.outcome import Ended, ended_path
from meshwright.run.torch_compat import remember_collectives
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.plan import Design
from meshwright.spec.report import Report
from meshwright.train.events import Ending
from meshwright.train.observe.whereabouts import Section
from meshwright.train.run import Run

_PARENT_SECONDS = 0.1
_LAUNCHER_LOST = "the process that started the workers is gone, as one that is killed"


class StopRequest:
    """True once this process was asked to stop, once it is `stop_at` by the system's clock, or, where it heeds that,
    once the process that launched it is gone."""

    def __init__(self, *, stop_at: float | None = None, heeds_launcher: bool = True) -> None:
        self._asked = False
        self._stop_at = math.inf if stop_at is None else stop_at
        self._parent = os.getppid() if heeds_launcher else None

    def listen(self) -> None:
        """SIGTERM, SIGINT and SIGUSR1, by which schedulers tell of a time limit, ask; they never interrupt a step."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._ask)

    def __call__(self) -> bool:
        return self._asked or time.time() >= self._stop_at or self._is_orphaned

    @property
    def lost_launcher(self) -> bool:
        """Whether nothing asked but that the process that launched this one is gone."""
        return self._is_orphaned and not self._asked and time.time() < self._stop_at

    @property
    def _is_orphaned(self) -> bool:
        return self._parent is not None and os.getppid() != self._parent

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        self._asked = True


def end_with_launcher() -> None:
    """This process is killed as soon as the one that launched it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def settle(design: Design, *, quiet: bool) -> None:
    """Threads, warnings and determinism of this process are as the design and the launcher want them."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if design.cluster.groups[0].device.kind is DeviceKind.CPU:
        keep_freed_memory()
    if quiet:
        warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    if design.job.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def join(
    design: Design, *, rank: int, ranks: int, local_device: int, store: dist.Store, timeout: timedelta
) -> torch.device:
    """The device of this rank, with the process group of all `ranks` made, numbered as the plan numbers them."""
    cuda = design.cluster.groups[0].device.kind.value in ("cuda", "rocm")
    device = torch.device("cuda", local_device) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    remember_collectives()
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    return device


def finish(run: Run, *, run_dir: Path, predicted: Report, ending: Ending, seconds: float, stop: StopRequest) -> None:
    """The run is closed, rank 0 has written how it ended, and the process group is gone."""
    measured = run.profiler.report(predicted)
    run.marker.mark(step=run.state.step, section=Section.SAVE)
    run.close()
    if run.observer is not None:
        run.observer.finish()
        if measured is not None:
            notes = (*measured.notes, *run.observer.decided)
            write_json(run_dir / "measured.json", replace(measured, notes=notes))
            write_json(run_dir / "predicted.json", predicted)
        last, validation = run.observer.last, run.observer.validation
        ended = Ended(
            ending=ending,
            step=run.state.step,
            total_steps=run.design.job.total_steps,
            tokens=run.state.tokens,
            seconds=seconds,
            loss=last.get("loss"),
            validation_loss=validation.get("validation_loss"),
            bits_per_byte=validation.get("bits_per_byte"),
            validation_step=int(validation["step"] or 0) if validation else None,
        )
        write_json(ended_path(run_dir), ended)
        (run_dir / "tokenizer.json").write_text(run.corpus.tokenizer.to_json(), encoding="utf-8")
    lost = _on_any_rank(ending is Ending.SIGNALLED and stop.lost_launcher)
    if dist.is_initialized():
        dist.destroy_process_group()
    if run.observer is not None:
        why = f"{_LAUNCHER_LOST}; they saved step {run.state.step:,} and ended" if lost else ""
        run.observer.timekeeper.end(asked=not lost, why=why)


def _on_any_rank(found: bool) -> bool:
    """Whether it is so on any rank, once all of them have come here."""
    if not dist.is_initialized():
        return found
    most = torch.tensor(float(found))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.item() > 0.0
