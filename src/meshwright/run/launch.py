"""Launch: local workers under torchrun's elastic agent, which is watched from a thread so that signals are ours."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshwright.run.machine import this_machine
from meshwright.run.screen import Screen
from meshwright.spec.errors import Problem, WorkerFailed
from meshwright.train.disk import file_system

WORKER_MODULE = "meshwright.run.worker"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """How the workers ended: `failures` by the plan's rank, empty when all ended well; whether they were killed at
    once.
    """

    failures: Mapping[int, ProcessFailure] = field(default_factory=dict)
    asked_to_stop: bool = False
    killed: bool = False


def launch(
    run_dir: Path,
    *,
    ranks: Sequence[int],
    arguments: Sequence[str],
    say: Callable[[str], None],
    module: str = WORKER_MODULE,
    screen: Screen = Screen.NORMAL,
) -> Launched:
    """All workers have ended. The first signal asks them to save and stop, the second stops them at once.

    `ranks[d]` is the rank of the worker on device d. Rank 0 writes to this terminal unless `screen` is quiet; what
    other ranks write is under `RUN/logs`.
    """
    num_workers = len(ranks)
    quiet = {device: Std.ALL for device, rank in enumerate(ranks) if rank or screen is Screen.QUIET}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_workers,
        run_id=f"{run_dir.name}-{os.getpid()}-{time.monotonic_ns()}",
        role="worker",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        rdzv_configs={"timeout": 300},
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=str(run_dir / "logs"), redirects=quiet),
    )
    agent = _Agent(config, ("-m", module, str(run_dir), *arguments))
    with _environment(num_workers), _agent_log(screen), _forwarding(say, module=module) as asked:
        agent.start()
        while agent.is_alive():
            agent.join(0.2)
    if isinstance(agent.error, json.JSONDecodeError):
        why = f"what it left in {run_dir / 'logs'} is cut off: {agent.error}"
        raise WorkerFailed(Problem(what="a worker failed and could not write why", why=why, fix=file_system(run_dir)))
    if agent.error is not None and not isinstance(agent.error, ChildFailedError):
        raise agent.error
    failures = agent.error.failures if isinstance(agent.error, ChildFailedError) else {}
    failures = {ranks[device]: failure for device, failure in failures.items()}
    return Launched(failures=failures, asked_to_stop=asked.count > 0, killed=asked.count > 1)


class _Agent(threading.Thread):
    """The elastic agent in a thread: off the main thread it leaves signal handlers alone."""

    def __init__(self, config: LaunchConfig, arguments: Sequence[str]) -> None:
        super().__init__(name="elastic-agent", daemon=True)
        self._config, self._arguments = config, arguments
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            elastic_launch(self._config, sys.executable)(*self._arguments)
        except BaseException as error:
            self.error = error


@dataclass(slots=True)
class _Asked:
    count: int = 0


@contextmanager
def _forwarding(say: Callable[[str], None], *, module: str) -> Iterator[_Asked]:
    """Signals of this process go to its workers: the first as SIGTERM, any further one as SIGKILL."""
    asked = _Asked()

    def handle(number: int, _frame: FrameType | None) -> None:
        asked.count += 1
        if asked.count == 1:
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            _say_if_heard(say, f"{name}: the workers finish this step and save; once more stops at once")
        _signal_workers(signal.SIGTERM if asked.count == 1 else signal.SIGKILL, module=module)

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in heeded}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say_if_heard(say: Callable[[str], None], line: str) -> None:
    """The line is said unless the terminal is gone, which may be what the signal is about."""
    with suppress(OSError):
        say(line)


def _signal_workers(number: signal.Signals, *, module: str) -> None:
    for child in psutil.Process().children():
        try:
            if module in child.cmdline():
                child.send_signal(number)
        except psutil.Error:
            continue


@contextmanager
def _environment(num_workers: int) -> Iterator[None]:
    """What workers and the agent read from the environment, as it was before afterwards."""
    wanted: dict[str, Any] = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads_per_worker(num_workers)),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "PYTHONUNBUFFERED": "1",
    }
    if Path("/sys/class/net/lo").exists():
        wanted["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def threads_per_worker(num_workers: int) -> int:
    """Cores of this machine that this process may use, shared evenly among workers; at least one."""
    return max(1, this_machine().cores // num_workers)


@contextmanager
def _agent_log(screen: Screen) -> Iterator[None]:
    """The agent says nothing, since what failed is told once, in our words; where `screen` is verbose it says all."""
    names = ("torch.distributed.elastic", "torch.distributed.launcher")
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO if screen is Screen.VERBOSE else logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
