"""Launch an elastic run: a worker under an agent of its own for each rank, a board, and a warden that looks after them.

While a run is not elastic `run.launch` launches it, and nothing here is there.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from meshwright.run.elastic.board import Board, Epoch, named
from meshwright.run.elastic.crew import Crew
from meshwright.run.elastic.templates import Templates
from meshwright.run.elastic.warden import Warden
from meshwright.run.launch import (
    LOOPBACK,
    WORKER_MODULE,
    Launched,
    agent_log,
    forwarding,
    signal_workers,
    workers_environment,
)
from meshwright.run.launching import token
from meshwright.run.screen import Screen
from meshwright.spec.errors import EnvironmentUnfit, Problem
from meshwright.spec.plan import Design
from meshwright.train.observe.timekeeper import first_line


def launch_elastic(
    design: Design, run_dir: Path, *, arguments: Sequence[str], say: Callable[[str], None], screen: Screen
) -> Launched:
    """All workers have ended. Signals are as of `launch`; after the first one none is started for those that are lost.

    Rank 0 writes to this terminal unless `screen` is quiet, whichever process it is; all else is under `RUN/logs`.
    Raises EnvironmentUnfit, with no worker left, where this process does not reach its own board any more.
    """
    ranks = design.plan.world_size
    word = token.drawn()
    board, templates = Board.host(word=word, say=say), Templates(design, run_dir)
    first = Epoch(
        number=0,
        members=tuple(named(place, times=0) for place in range(ranks)),
        design=str(run_dir / "design.json"),
        screen=screen is not Screen.QUIET,
    )
    warden = Warden(
        run_dir=run_dir,
        board=board,
        crew=Crew(run_dir, board=board, arguments=arguments),
        templates=templates,
        spec=design.job.elastic,
        patience_seconds=design.job.peer_timeout_seconds,
        epoch=first,
    )
    with (
        workers_environment(ranks, interface=LOOPBACK, word=word),
        agent_log(screen),
        forwarding(say, module=WORKER_MODULE) as asked,
    ):
        warden.begin()
        templates.start()
        try:
            while warden.look():
                warden.replaces = not asked.once
                time.sleep(warden.pause_seconds)
        except dist.DistError as error:
            signal_workers(signal.SIGKILL, module=WORKER_MODULE)
            fix = "see that its loopback is up; --resume goes on from the newest checkpoint"
            raise EnvironmentUnfit(
                Problem(what="the launcher has lost its own network", why=first_line(error), fix=fix)
            ) from None
    return Launched(
        failures=warden.failures,
        asked_to_stop=asked.once,
        killed=asked.at_once,
        stood=tuple(warden.hung.stood.values()),
    )
