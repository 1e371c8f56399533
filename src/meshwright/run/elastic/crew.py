"""Crew: the workers of an elastic run, each under an elastic agent of its own, so that none ends with another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from meshwright.run import failure
from meshwright.run.failure import Failure
from meshwright.run.launch import WORKER_MODULE, Agent, config_of

_MONITOR_SECONDS = 0.05


class Crew:
    """Starts workers by name and knows which have ended, and how. All that they print goes to `RUN/logs`."""

    def __init__(self, run_dir: Path, *, port: int, arguments: Sequence[str]) -> None:
        self._run_dir, self._arguments, self._port = run_dir, tuple(arguments), port
        self._agents: dict[str, Agent] = {}

    def start(self, name: str) -> None:
        """The worker `name` is on its way."""
        told = ("--board", str(self._port), "--member", name)
        command = ("-m", WORKER_MODULE, str(self._run_dir), *self._arguments, *told)
        config = config_of(self._run_dir, workers=1, quiet={0: Std.ALL}, monitor_seconds=_MONITOR_SECONDS)
        agent = Agent(config, command, run_dir=self._run_dir)
        self._agents[name] = agent
        agent.start()

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
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if name in child.cmdline():
                    child.kill()

    def failures(self, ranks: Mapping[str, int]) -> dict[int, ProcessFailure]:
        """What torch's agents say of those of the workers in `ranks` that failed, by rank."""
        ended = {rank: self._agents[name].failures for name, rank in ranks.items() if self.has_ended(name)}
        return {rank: found[0] for rank, found in ended.items() if found}
