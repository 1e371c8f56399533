"""Crew: the workers of an elastic run, each under an elastic agent of its own, so that none ends with another."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from meshwright.run import failure
from meshwright.run.elastic.board import Board
from meshwright.run.elastic.halted import is_stopped
from meshwright.run.elastic.homes import Home
from meshwright.run.failure import Failure
from meshwright.run.launch import WORKER_MODULE, Agent, config_of
from meshwright.run.signals import send

_MONITOR_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A host, and the group of the cluster that it is of."""

    host: int
    group: int


class Crew:
    """Starts workers by name and knows which have ended, and how. All that they print goes to `RUN/logs`.

    Workers turn to the boards of `successors` where that of the host that leads is lost.
    """

    def __init__(self, run_dir: Path, *, board: Board, arguments: Sequence[str]) -> None:
        self._run_dir, self._arguments, self.board = run_dir, tuple(arguments), board
        self.successors: tuple[Home, ...] = ()
        self._agents: dict[str, Agent] = {}

    def start(self, name: str) -> None:
        """The worker `name` is on its way."""
        home = self.board.home
        homes = dict.fromkeys((home, *self.board.homes, *self.successors))
        told = ("--board", ",".join(map(str, homes)), "--member", name)
        command = ("-m", WORKER_MODULE, str(self._run_dir), *self._arguments, *told)
        config = config_of(self._run_dir, workers=1, quiet={0: Std.ALL}, monitor_seconds=_MONITOR_SECONDS)
        agent = Agent(config, command, run_dir=self._run_dir)
        self._agents[name] = agent
        agent.start()

    def look(self) -> None:
        """Nothing is told from elsewhere: all workers are of this process."""

    def can_start(self, name: str) -> bool:
        """Whether there is a host for it."""
        return True

    def is_here(self, name: str) -> bool:
        """Whether this process has started it."""
        return name in self._agents

    def place(self, name: str) -> Place:
        """Where the worker is, whether it runs or not."""
        return Place(host=0, group=0)

    def holds(self) -> bool:
        """Whether it is for this process alone to say who goes on."""
        return True

    @property
    def agents(self) -> dict[str, Agent]:
        """Of every worker that was started here."""
        return self._agents

    @property
    def homes(self) -> tuple[Home, ...]:
        """The boards of all hosts that are there, that of the one that leads first."""
        return (self.board.home,)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._agents)

    def has_ended(self, name: str) -> bool:
        return not self._agents[name].is_alive()

    def failure(self, name: str, *, rank: int) -> Failure | None:
        """How the worker failed, which had `rank`; None where it runs or has ended well."""
        if not self.has_ended(name) or not self._agents[name].failures:
            return None
        (found,) = failure.read({rank: self._agents[name].failures[0]})
        return replace(found, rank=rank)

    def kill(self, name: str) -> None:
        """The worker ends at once, where it has begun."""
        process = self.process(name)
        if process is not None:
            with suppress(psutil.Error):
                process.kill()

    def process(self, name: str) -> psutil.Process | None:
        """Of a worker that was started here and runs; it need not have spoken to the board."""
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if name in child.cmdline():
                    return child
        return None

    def end_stopped(self, name: str, *, pid: int, late: bool) -> bool:
        """Whether the worker, which others wait for in vain, is ended now: where it is stopped, or `late` at all."""
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            late = late or is_stopped(process)
            if late:
                send(process, signal.SIGKILL)
        return late

    def failures(self, ranks: Mapping[str, int]) -> dict[int, ProcessFailure]:
        """What torch's agents say of those of the workers in `ranks` that failed, by rank."""
        ended = {rank: self._agents[name].failures for name, rank in ranks.items() if self.has_ended(name)}
        return {rank: found[0] for rank, found in ended.items() if found}
