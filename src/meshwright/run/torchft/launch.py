"""Launch replicas that meet by torchft: each under an elastic agent of its own, and what was lost started again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import psutil
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from meshwright.run import failure
from meshwright.run.elastic.board import Epoch
from meshwright.run.elastic.epochs import epochs_path, of_this_launch
from meshwright.run.failure import Nearness
from meshwright.run.launch import (
    LOOPBACK,
    WORKER_MODULE,
    Agent,
    Launched,
    agent_log,
    config_of,
    forwarding,
    workers_environment,
)
from meshwright.run.launching import token
from meshwright.run.outcome import ended_path
from meshwright.run.screen import Screen
from meshwright.run.torchft.lighthouse import READY, lighthouse
from meshwright.spec.plan import Design
from meshwright.spec.replicas import fewest_replicas, ranks_of_replica

_LOOK_SECONDS = 0.05


def launch_replicas(
    design: Design, run_dir: Path, *, arguments: Sequence[str], say: Callable[[str], None], screen: Screen
) -> Launched:
    """All workers have ended. Signals are as of `launch`; after the first one nothing is started for what is lost.

    The first of the replicas that train writes to this terminal unless `screen` is quiet; all else is under `RUN/logs`.
    """
    plan, spec = design.plan, design.job.elastic
    shutil.rmtree(run_dir / READY, ignore_errors=True)
    with (
        workers_environment(plan.world_size, interface=LOOPBACK, word=token.drawn()),
        agent_log(screen),
        _found(design) as address,
        forwarding(say, module=WORKER_MODULE) as asked,
    ):
        told = [*arguments, "--lighthouse", address, *(["--quiet"] if screen is Screen.QUIET else [])]
        keeper = _Keeper(design=design, run_dir=run_dir, arguments=told, replacements=spec.replacements, say=say)
        keeper.begin()
        while keeper.look():
            keeper.replaces = not asked.once
            time.sleep(_LOOK_SECONDS)
    return Launched(failures=keeper.failures, asked_to_stop=asked.once, killed=asked.at_once)


@contextmanager
def _found(design: Design) -> Iterator[str]:
    """The lighthouse that the job names, or one of this launch."""
    if design.job.elastic.lighthouse:
        yield design.job.elastic.lighthouse
        return
    fewest = fewest_replicas(design.plan, design.job.elastic)
    with lighthouse(fewest=fewest, patience_seconds=design.job.peer_timeout_seconds) as address:
        yield address


@dataclass(slots=True, kw_only=True)
class _Keeper:
    """Starts the replicas of one launch, each by name, `PLACE.TIMES`, and those that are lost `replacements` times.

    One that the others went on without, and that has not come back for as long as they would wait for it, is ended.
    """

    design: Design
    run_dir: Path
    arguments: Sequence[str]
    replacements: int
    say: Callable[[str], None]
    replaces: bool = True
    agents: dict[int, Agent] = field(default_factory=dict)
    times: dict[int, int] = field(default_factory=dict)
    began: dict[int, float] = field(default_factory=dict)
    hung: set[str] = field(default_factory=set)
    epochs: Sequence[Epoch] = ()
    read_at: int = 0
    ended: set[int] = field(default_factory=set)
    broke: Mapping[int, ProcessFailure] = field(default_factory=dict)
    lost: Mapping[int, ProcessFailure] = field(default_factory=dict)
    given_up: bool = False
    since_end: float | None = None

    def begin(self) -> None:
        for replica in range(self.design.plan.replicate):
            self._start(replica, times=0)

    def look(self) -> bool:
        """What there is to decide is decided; whether any still runs. Call it often."""
        running = {replica for replica, agent in self.agents.items() if agent.is_alive()}
        for replica in set(self.agents) - running - self.ended:
            running |= self._meet_end(replica)
        if self.since_end is not None and time.monotonic() - self.since_end > self.design.job.peer_timeout_seconds:
            self._kill()  # the run has ended, and these wait for others in vain
        elif not self.given_up and self.since_end is None:
            fewest = fewest_replicas(self.design.plan, self.design.job.elastic)
            if len(running) < fewest:
                self._give_up()
            else:
                self._end_hung(running)
        return bool(running)

    def _end_hung(self, running: set[int]) -> None:
        self._read_epochs()
        for replica in running:
            name, since = f"{replica}.{self.times[replica]}", self._missed_since(replica)
            late = since is not None and time.time() - since > self.design.job.peer_timeout_seconds
            if late and name not in self.hung:
                self.hung.add(name)
                self.say(f"replica {replica} has not come back: it hung or was stopped, and is ended")
                self._kill(name)

    def _read_epochs(self) -> None:
        path = epochs_path(self.run_dir)
        written = path.stat().st_mtime_ns if path.is_file() else 0
        if written != self.read_at:
            self.epochs, self.read_at = of_this_launch(self.run_dir), written

    def _missed_since(self, replica: int) -> float | None:
        """When the others went on without one that had trained since it was started; None where it is there, or was
        not yet."""
        rank = f"{ranks_of_replica(self.design.plan, replica)[0]}.0"
        without = list(takewhile(lambda epoch: rank not in epoch.members, reversed(self.epochs)))
        if len(without) in (0, len(self.epochs)):
            return None
        trained = self.epochs[-len(without) - 1]
        return without[-1].since if trained.since >= self.began[replica] else None

    def _meet_end(self, replica: int) -> set[int]:
        """What follows from the end of one: the replica, where it is started again."""
        failures = self.agents[replica].failures
        if not failures:
            self.ended.add(replica)
            self.since_end = self.since_end or time.monotonic()
            return set()
        found = self._by_rank(replica, failures)
        first = failure.read(found)[0]
        lost = first.nearness is not Nearness.OWN
        again = self.replaces and not self.given_up and self.since_end is None
        if lost and again and self.times[replica] < self.replacements:
            self._start(replica, times=self.times[replica] + 1)
            return {replica}
        self.ended.add(replica)
        if not lost:
            self.broke = self.broke or found
            self._give_up()
        elif not self.given_up:
            self.lost = found
        return set()

    @property
    def failures(self) -> Mapping[int, ProcessFailure]:
        """Of the replica that broke, or of the last that was lost where nobody told how the run ended."""
        return self.broke or ({} if ended_path(self.run_dir).is_file() else self.lost)

    def _give_up(self) -> None:
        self.given_up = True
        self._kill()

    def _start(self, replica: int, *, times: int) -> None:
        ranks = ranks_of_replica(self.design.plan, replica)
        quiet = dict.fromkeys(range(len(ranks)), Std.ALL)
        config = config_of(self.run_dir, workers=len(ranks), quiet=quiet, monitor_seconds=_LOOK_SECONDS)
        words = ("-m", WORKER_MODULE, str(self.run_dir), *self.arguments, "--replica", f"{replica}.{times}")
        self.agents[replica], self.times[replica] = Agent(config, words, run_dir=self.run_dir), times
        self.began[replica] = time.time()
        self.agents[replica].start()

    def _by_rank(self, replica: int, failures: Mapping[int, ProcessFailure]) -> dict[int, ProcessFailure]:
        ranks = ranks_of_replica(self.design.plan, replica)
        return {ranks[local]: found for local, found in failures.items()}

    def _kill(self, name: str = "") -> None:
        """All replicas, or the one of that name, are ended at once."""
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                words = child.cmdline()
                if "--replica" in words and (not name or name in words):
                    child.kill()
