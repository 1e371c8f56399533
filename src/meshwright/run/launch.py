"""Launch: this node's workers under torchrun's elastic agent, watched from a thread so that signals are ours."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from meshwright.run.handshake import WORD_VARIABLE
from meshwright.run.lookout import Lookout
from meshwright.run.machine import this_machine
from meshwright.run.rendezvous import alone
from meshwright.run.screen import Screen
from meshwright.run.signals import TO_STOP, heeding
from meshwright.run.vigil import Stood
from meshwright.run.workers import Asked
from meshwright.spec.errors import Problem, WorkerFailed
from meshwright.train.disk import file_system

WORKER_MODULE = "meshwright.run.worker"
LOOPBACK = "lo"
_LOOK_SECONDS = 0.05
_PARTY = "meshwright"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """How the workers ended: `failures` by the plan's rank, empty when all ended well; whether they were killed at
    once.

    Ranks `ended` are those that this process had to end after others had failed, `missing` those that others waited for
    in vain, and `stood` those that stood still where nobody waited for them.
    """

    failures: Mapping[int, ProcessFailure] = field(default_factory=dict)
    asked_to_stop: bool = False
    killed: bool = False
    ended: frozenset[int] = frozenset()
    missing: tuple[int, ...] = ()
    stood: tuple[Stood, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """This node among `nodes` that have met by `rendezvous`: it is `node` of them, has `count` devices of the plan from
    `first` on, and reaches the others by the network `interface`."""

    node: int
    nodes: int
    first: int
    count: int
    rendezvous: RendezvousHandler
    interface: str


def launch(
    run_dir: Path,
    *,
    ranks: Sequence[int],
    arguments: Sequence[str],
    say: Callable[[str], None],
    module: str = WORKER_MODULE,
    screen: Screen = Screen.NORMAL,
    party: Party | None = None,
    patience_seconds: float = math.inf,
) -> Launched:
    """All workers of this node have ended. A signal asks them to save and stop; a second Ctrl-C or SIGQUIT stops them
    at once, and no other however often it comes.

    `ranks[d]` is the rank of the worker on device d of the plan, all of which are here unless there is a `party`. Rank
    0 writes to this terminal unless `screen` is quiet; what other ranks write is under `RUN/logs`. A rank that stands
    still for `patience_seconds` or more, though nobody waits for it, is ended (`vigil.Vigil`).
    """
    here = range(len(ranks)) if party is None else range(party.first, party.first + party.count)
    quiet = {local: Std.ALL for local, device in enumerate(here) if ranks[device] or screen is Screen.QUIET}
    config = config_of(run_dir, workers=len(here), quiet=quiet, party=party)
    agent = Agent(config, ("-m", module, str(run_dir), *arguments), run_dir=run_dir)
    with (
        workers_environment(len(here), interface=LOOPBACK if party is None else party.interface),
        agent_log(screen),
        forwarding(say, module=module) as asked,
    ):
        agent.start()
        lookout = Lookout(
            run_dir=run_dir,
            ranks=[ranks[device] for device in here],
            alone=len(ranks) == 1,
            module=module,
            patience_seconds=patience_seconds,
            say=say,
            asked=asked,
        )
        while agent.is_alive():
            agent.join(_LOOK_SECONDS)
            lookout.look()
        failures = {ranks[device]: failure for device, failure in agent.failures.items()}
        lookout.conclude(failures)
    return Launched(
        failures=failures,
        asked_to_stop=asked.once,
        killed=asked.at_once,
        ended=frozenset(lookout.ended),
        missing=lookout.missing,
        stood=lookout.stood,
    )


def config_of(
    run_dir: Path,
    *,
    workers: int,
    quiet: Mapping[int, Std],
    party: Party | None = None,
    monitor_seconds: float = 0.1,
) -> LaunchConfig:
    """Of one attempt: a run goes on by another launch, which may have another plan. Output of `quiet` workers, counted
    on this node, goes to the logs of the run."""
    rendezvous_handler_registry.register(_PARTY, _handler_of)
    nodes = 1 if party is None else party.nodes
    logs = run_dir / "logs" if party is None else run_dir / "logs" / f"node-{party.node}"
    return LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        rdzv_backend=_PARTY,
        rdzv_configs={"rendezvous": alone() if party is None else party.rendezvous},
        nproc_per_node=workers,
        run_id=f"{run_dir.name}-{os.getpid()}-{time.monotonic_ns()}",
        role="worker",
        max_restarts=0,
        monitor_interval=monitor_seconds,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=dict(quiet)),
    )


def _handler_of(parameters: RendezvousParameters) -> RendezvousHandler:
    found: RendezvousHandler = parameters.config["rendezvous"]
    return found


class Agent(threading.Thread):
    """The elastic agent in a thread: off the main thread it leaves signal handlers alone."""

    def __init__(self, config: LaunchConfig, arguments: Sequence[str], *, run_dir: Path) -> None:
        super().__init__(name="elastic-agent", daemon=True)
        self._config, self._arguments, self._run_dir = config, arguments, run_dir
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            elastic_launch(self._config, sys.executable)(*self._arguments)
        except BaseException as error:
            self._error = error

    @property
    def failures(self) -> Mapping[int, ProcessFailure]:
        """By worker, once the agent has ended; empty when all ended well. Raises what kept it from launching them, and
        WorkerFailed where a worker could not write why it failed."""
        if isinstance(self._error, json.JSONDecodeError):
            why = f"what it left in {self._run_dir / 'logs'} is cut off: {self._error}"
            fix = file_system(self._run_dir)
            raise WorkerFailed(Problem(what="a worker failed and could not write why", why=why, fix=fix))
        if self._error is not None and not isinstance(self._error, ChildFailedError):
            raise self._error
        return self._error.failures if isinstance(self._error, ChildFailedError) else {}


@contextmanager
def forwarding(say: Callable[[str], None], *, module: str) -> Iterator[Asked]:
    """Signals of this process go to its workers as SIGTERM; a second Ctrl-C, or SIGQUIT, as SIGKILL.

    Schedulers may send SIGTERM twice, and mean it once.
    """
    asked = Asked()

    def handle(number: int) -> None:
        asked.insisted += number == signal.SIGINT
        asked.at_once = asked.at_once or asked.insisted > 1 or number == signal.SIGQUIT
        if not asked.once and not asked.at_once:
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            again = "once more" if number == signal.SIGINT else "SIGQUIT"
            _say_if_heard(say, f"{name}: the workers finish this step and save; {again} stops at once")
        asked.once = True
        signal_workers(signal.SIGKILL if asked.at_once else signal.SIGTERM, module=module)

    with heeding([*TO_STOP, signal.SIGQUIT], handle):
        yield asked


def _say_if_heard(say: Callable[[str], None], line: str) -> None:
    """The line is said unless the terminal is gone, which may be what the signal is about."""
    with suppress(OSError):
        say(line)


def signal_workers(number: signal.Signals, *, module: str) -> None:
    """Every worker of this process that still runs has the signal."""
    for child in psutil.Process().children():
        try:
            if module in child.cmdline():
                child.send_signal(number)
        except psutil.Error:
            continue


def end_at_once() -> None:
    """Workers of this process are killed as SIGQUIT does, and none is started in their place."""
    handler = signal.getsignal(signal.SIGQUIT)
    if callable(handler):
        handler(signal.SIGQUIT, None)
    else:
        signal_workers(signal.SIGKILL, module=WORKER_MODULE)


@contextmanager
def workers_environment(num_workers: int, *, interface: str, word: str = "") -> Iterator[None]:
    """What workers and the agent read from the environment, as it was before afterwards; `word` is for those of an
    elastic run, since others of this machine see arguments and not this.

    Gloo would else take the interface of the host's own name, which on many systems is the loopback.
    """
    wanted: dict[str, Any] = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads_per_worker(num_workers)),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "PYTHONUNBUFFERED": "1",
        "RUST_LOG": os.environ.get("RUST_LOG", "error"),
    }
    if Path("/sys/class/net", interface).exists():
        wanted["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", interface)
    if word:
        wanted[WORD_VARIABLE] = word
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
def agent_log(screen: Screen) -> Iterator[None]:
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
