"""A node of an elastic run: it begins the run with the others, or is taken in by those that train."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistError

from meshwright import cost
from meshwright.run import failure
from meshwright.run.elastic.crew import Place
from meshwright.run.elastic.homes import Home
from meshwright.run.elastic.hosts import Finished, Host
from meshwright.run.environment import environment
from meshwright.run.files import write_json
from meshwright.run.launch import Launched
from meshwright.run.launching import token
from meshwright.run.launching.meeting import Met, interface_towards
from meshwright.run.launching.shares import shares
from meshwright.run.outcome import read_ended
from meshwright.run.train import failure_of, remove_empty_logs
from meshwright.spec.errors import EnvironmentUnfit, ExitCode, Problem, WorkerFailed
from meshwright.spec.plan import Design
from meshwright.train.events import Ending
from meshwright.train.observe.timekeeper import launched, note

_SEEING_SECONDS = 60.0  # the longest that NFS keeps what it knows of a folder
_PAUSE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticNode:
    """Node `number`, which its machine calls `name`, of a run of `design`, whose digest is `digest`."""

    design: Design
    run_dir: Path
    number: int
    name: str
    digest: str
    stop_at: float | None
    say: Callable[[str], None]

    def begin(self, met: Met, *, nodes: int) -> int:
        """The run has ended, which all nodes begin; its exit code. Raises as `take_part`."""
        host = self._host(met.address, met.interface, word=met.word)
        met.store.set(f"home/{self.number}", str(host.home))
        try:
            met.store.wait([f"home/{node}" for node in range(nodes)], timedelta(seconds=_SEEING_SECONDS))
        except DistError:
            raise EnvironmentUnfit(Problem(what="not all nodes say where they keep a board")) from None
        homes = [Home.of(met.store.get(f"home/{node}").decode()) for node in range(nodes)]
        if self.number == 0:
            token.leave(self.run_dir, word=met.word, use=token.Use.BOARDS)
            write_json(self.run_dir / "environment.json", environment(self.design))
            note(self.run_dir, launched(self.run_dir, plan=self.design.plan.digest(), at=time.time()))
        return self._code(host.begin(homes))

    def come_back(self, to: Home) -> int:
        """The run has ended, which others train; its exit code. Raises as `take_part`."""
        self.say(f"node {to.host} leads the run; this node is taken in after a step")
        address, interface = interface_towards(to.address, to.port)
        word = token.read(self.run_dir, use=token.Use.BOARDS)
        return self._code(self._host(address, interface, word=word).come_back(to))

    def _host(self, address: str, interface: str, *, word: str) -> Host:
        places = (Place(host=one.node, group=one.group) for one in shares(self.design) for _ in range(one.count))
        return Host(
            design=self.design,
            run_dir=self.run_dir,
            number=self.number,
            name=self.name,
            address=address,
            interface=interface,
            places=tuple(places),
            digest=self.digest,
            word=word,
            say=self.say,
            arguments=() if self.stop_at is None else ("--stop-at", str(self.stop_at)),
        )

    def _code(self, ended: Finished) -> int:
        if ended.killed:
            return int(ExitCode.INTERRUPTED)
        own = [one for one in failure.read(ended.failures) if one.nearness is failure.Nearness.OWN]
        if own:
            launched = Launched(failures=ended.failures)
            raise failure_of(self.design, self.run_dir, predicted=cost.predict(self.design), launched=launched)
        if ended.why:
            fix = "starting all nodes again goes on from the newest checkpoint"
            raise WorkerFailed(Problem(what=ended.why, fix=fix))
        remove_empty_logs(self.run_dir / "logs")
        found, end = read_ended(self.run_dir), time.monotonic() + _SEEING_SECONDS
        while found is None:
            if time.monotonic() > end:
                raise EnvironmentUnfit(Problem(what="the workers ended and did not say how", where=str(self.run_dir)))
            time.sleep(_PAUSE)
            found = read_ended(self.run_dir)
        if ended.led:
            note(self.run_dir, found.mark(at=time.time()))
        saved = found.ending is Ending.SIGNALLED
        if saved and ended.led:
            self.say(f"step {found.step:,} of {found.total_steps:,} is saved; starting this again goes on")
        return int(ExitCode.SAVED if saved else ExitCode.OK)
