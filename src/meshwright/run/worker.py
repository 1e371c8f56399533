"""What one worker process runs: `python -m meshwright.run.worker RUN`, under our launcher or under torchrun.

RUN holds design.json. The run goes on from its newest complete checkpoint, so starting again is going on.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import logging
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType

import psutil
import torch
import torch.distributed as dist

from meshwright import cost
from meshwright.run import failure
from meshwright.run.allocator import keep_freed_memory
from meshwright.run.environment import environment
from meshwright.run.files import load_design, write_json
from meshwright.run.last_words import LastWords
from meshwright.run.machine import cache_root
from meshwright.run.outcome import Ended, ended_path, read_report
from meshwright.run.torch_compat import limit_waits, remember_collectives
from meshwright.run.waiting import waiting_of
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.errors import ConfigError, ExitCode, Problem, WorkerFailed
from meshwright.spec.plan import Design
from meshwright.spec.report import Report
from meshwright.train.build import Place, build
from meshwright.train.checkpoint.peers import DESCRIBED as CHECKPOINTS
from meshwright.train.events import Ending
from meshwright.train.loop import fit
from meshwright.train.observe.collective_log import CollectiveLog
from meshwright.train.observe.listening import listening
from meshwright.train.observe.timekeeper import first_line, note_launch
from meshwright.train.observe.whereabouts import Marker
from meshwright.train.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What the launcher told this process: its number among all and on its node, and how many there are."""

    device: int
    local_device: int
    size: int


class StopRequest:
    """True once this process was asked to stop, once it is `stop_at` by the system's clock, or once the process that
    launched it is gone."""

    def __init__(self, *, stop_at: float | None = None) -> None:
        self._asked = False
        self._stop_at = math.inf if stop_at is None else stop_at
        self._parent = os.getppid()

    def listen(self) -> None:
        """SIGTERM, SIGINT and SIGUSR1, by which schedulers tell of a time limit, ask; they never interrupt a step."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._ask)

    def __call__(self) -> bool:
        return self._asked or time.time() >= self._stop_at or os.getppid() != self._parent

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        self._asked = True


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains as one rank; the exit code. What went wrong is in the file that the launcher reads."""
    faulthandler.enable()
    options = _options(arguments)
    error_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"]) if "TORCHELASTIC_ERROR_FILE" in os.environ else None
    failure.keep_room(error_file)
    begun: list[Begun] = []
    try:
        work(options.run, max_steps=options.steps, stop_at=options.stop_at, begun=begun.append)
    except Exception as error:
        if begun:
            begun[0].words.of(error)
        waiting = waiting_of(error, now=begun[0].marker.now) if begun and failure.is_lost_peer(error) else None
        code = failure.record(error, path=error_file, run_dir=options.run, waiting=waiting)
        if error_file is None:
            print(f"meshwright: {error}", file=sys.stderr)
        return code
    failure.give_room(error_file)
    return int(ExitCode.OK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What knows where this rank is, and what it leaves behind where it fails."""

    marker: Marker
    words: LastWords


def work(run_dir: Path, *, max_steps: int | None, stop_at: float | None, begun: Callable[[Begun], None]) -> None:
    """This rank's part of the run in `run_dir` is done, and rank 0 has written how it ended.

    `begun` is told before this rank meets any other. From `stop_at` on, in seconds since the epoch, the run saves and
    stops as if a signal had asked for it.
    """
    stop = StopRequest(stop_at=stop_at)
    stop.listen()
    world = _world()
    design = load_design(run_dir / "design.json")
    rank = _settle(design, world)
    predicted = read_report(run_dir / "predicted.json") or cost.predict(design)
    if rank == 0:
        _fill(run_dir, design, predicted)
        note_launch(run_dir, plan=design.plan.digest(), began=psutil.Process().create_time())
    marker = Marker(run_dir, rank=rank)
    words = LastWords(run_dir, rank=rank)
    begun(Begun(marker=marker, words=words))
    timeout = timedelta(seconds=design.job.peer_timeout_seconds)
    device = _join(design, world, rank=rank, timeout=timeout)
    techniques = importlib.import_module("meshwright.techniques").build(design.job.all_techniques, design=design)
    log = CollectiveLog(run_dir, rank=rank)
    place = Place(
        rank=rank,
        device=device,
        run_dir=run_dir,
        cache=cache_root() / "data",
        screen=sys.stderr,
        marker=marker,
        log=log,
    )
    run = build(design, place=place, predicted=predicted, max_steps=max_steps, stop_asked=stop, techniques=techniques)
    limit_waits(timeout, but=CHECKPOINTS)
    start = time.perf_counter()
    try:
        with listening(log):
            ending = fit(run)
        seconds = time.perf_counter() - start
        if run.design.model != design.model:
            predicted = cost.predict(run.design)
        _finish(run, run_dir=run_dir, predicted=predicted, ending=ending, seconds=seconds)
    except Exception as error:
        if run.observer is not None:
            run.observer.timekeeper.end(why=first_line(error))
        if isinstance(error, WorkerFailed):
            # Every rank raises it alike, so the checkpoint that its message names can still be completed.
            run.store.wait()
        raise
    words.unneeded()


def _fill(run_dir: Path, design: Design, predicted: Report) -> None:
    """A run that torchrun started has what `train` would have written of it."""
    for name, make in (("predicted.json", lambda: predicted), ("environment.json", lambda: environment(design))):
        if not (run_dir / name).exists():
            write_json(run_dir / name, make())


def _finish(run: Run, *, run_dir: Path, predicted: Report, ending: Ending, seconds: float) -> None:
    measured = run.profiler.report(predicted)
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
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    if run.observer is not None:
        run.observer.timekeeper.end(asked=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="meshwright.run.worker", description=__doc__)
    parser.add_argument("run", type=Path, help="run directory with design.json")
    parser.add_argument("--steps", type=int, default=None, help="run at most this many steps now")
    parser.add_argument("--stop-at", type=float, default=None, help="save and stop then, in seconds since the epoch")
    return parser.parse_args(arguments)


def _world() -> World:
    """From torchrun's variables; alone in a world of one without them."""
    return World(
        device=int(os.environ.get("RANK", "0")),
        local_device=int(os.environ.get("LOCAL_RANK", "0")),
        size=int(os.environ.get("WORLD_SIZE", "1")),
    )


def _settle(design: Design, world: World) -> int:
    """The plan's rank of this process, whose threads, warnings and determinism are as the design and it want them."""
    wanted = design.plan.world_size
    if world.size != wanted:
        why = f"{world.size} workers were started and the plan has {wanted} ranks"
        raise ConfigError(Problem(what="wrong number of workers", why=why, fix=f"start {wanted} workers"))
    rank = design.plan.rank_on(world.device)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if design.cluster.groups[0].device.kind is DeviceKind.CPU:
        keep_freed_memory()
    if rank != 0:
        warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    if design.job.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return rank


def _join(design: Design, world: World, *, rank: int, timeout: timedelta) -> torch.device:
    """The device of this rank, with the process group of all ranks made, numbered as the plan numbers them."""
    cuda = design.cluster.groups[0].device.kind.value in ("cuda", "rocm")
    device = torch.device("cuda", world.local_device) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    store = next(dist.rendezvous("env://", timeout=timeout))[0] if "MASTER_ADDR" in os.environ else dist.HashStore()
    remember_collectives()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world.size, timeout=timeout)
    return device


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of a failed process group may wait for peers for minutes; the sockets must close now.
    os._exit(code)
