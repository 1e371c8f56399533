"""What one node runs: `python -m meshwright.run.launching.node RUN --node I --nodes N --head HOST:PORT --session NAME`.

It meets the other nodes, starts its workers under torchrun's elastic agent, and ends with the run's exit code: 0, 75
when the state is saved and there is more to train, else what went wrong. Starting it again is going on.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from meshwright import cost
from meshwright.run import preflight
from meshwright.run.claim import claimed
from meshwright.run.elastic.hosts import leading
from meshwright.run.files import load_design
from meshwright.run.launching.elastic_node import ElasticNode
from meshwright.run.launching.meeting import MEETING_SECONDS, Greeting, Met, agree_on_end, meet
from meshwright.run.launching.shares import Share, shares
from meshwright.run.machine import installed
from meshwright.run.outcome import read_ended
from meshwright.run.resume import check_resumable, is_done, nothing_left
from meshwright.run.train import end_workers, failure_of, remove_empty_logs, write_design
from meshwright.spec import codec
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.errors import ConfigError, EnvironmentUnfit, ExitCode, Gathering, MeshwrightError, Problem
from meshwright.spec.plan import Design
from meshwright.train.events import Ending

_ENDING_SECONDS = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Takes this node's part in a run; its exit code. What went wrong is on standard error, a line for each problem."""
    options = _options(arguments)
    who = f"node {options.node}"
    try:
        number = number_in(options.node, os.environ) + options.first_node
        nodes = number_in(options.nodes, os.environ)
        who = f"node {number} ({socket.gethostname()})"
        if options.leash:
            threading.Thread(target=_heed, daemon=True).start()
        return take_part(
            options.run,
            node=number,
            nodes=nodes,
            head=options.head,
            session=options.session,
            begin_with=options.design,
            stop_at=None if options.stop_after is None else time.time() + options.stop_after,
        )
    except MeshwrightError as error:
        for problem in error.problems:
            print(f"meshwright: {who}: error: {problem}", file=sys.stderr, flush=True)
        return int(error.exit_code)


def take_part(
    run_dir: Path,
    *,
    node: int,
    nodes: int,
    head: str,
    session: str,
    begin_with: Path | None = None,
    stop_at: float | None = None,
) -> int:
    """The run has ended on all nodes, of which this is `node`, and its exit code is the same on each.

    `begin_with` is a design by which node 0 begins the run, or goes on with it. The run stops, saved, from `stop_at`
    on, in seconds since the epoch. Where no step is left to train, its folder stays as it is. Raises EnvironmentUnfit
    where nodes do not meet or differ, WorkerFailed with what the first failing worker of this node says.
    """
    gathered = Gathering()
    design = gathered.attempt(lambda: load_design(begin_with or run_dir / "design.json"))
    if design is not None and nothing_left(run_dir, design):
        _say(str(is_done(run_dir, design)))
        return int(ExitCode.OK)
    greeting, mine = _greeting(node=node, nodes=nodes, session=session), None
    if design is not None:
        wanted = design
        mine = gathered.attempt(lambda: _share(wanted, node=node, nodes=nodes))
        greeting = replace(greeting, design=_digest(design))
    with ExitStack() as stack:
        if design is not None:
            gathered.attempt(lambda: stack.enter_context(claimed(run_dir, node=node, end=end_workers)))
        elastic: ElasticNode | None = None
        if design is not None and design.job.elastic.on and not gathered.problems:
            elastic = ElasticNode(
                design=design,
                run_dir=run_dir,
                number=node,
                name=greeting.host,
                digest=greeting.design,
                stop_at=stop_at,
                say=_say,
            )
            leader = leading(run_dir, digest=greeting.design)
            if leader is not None:
                return elastic.come_back(leader)
        if design is not None and node == 0 and not gathered.problems:
            begun = design
            gathered.attempt(lambda: _begin(begun, run_dir, again=begin_with is not None))
        greeting = replace(greeting, problems=tuple(gathered.problems))
        met = meet(greeting, head=head, run_dir=run_dir, say=_say, seconds=MEETING_SECONDS)
        assert design is not None
        assert mine is not None
        if elastic is not None:
            return elastic.begin(met, nodes=nodes)
        return _train(design, run_dir, mine=mine, nodes=nodes, met=met, stop_at=stop_at)


def _greeting(*, node: int, nodes: int, session: str) -> Greeting:
    """What this node says of itself before it has read the design."""
    return Greeting(
        node=node,
        nodes=nodes,
        host=socket.gethostname(),
        session=session,
        design="",
        meshwright=installed("meshwright"),
        torch=installed("torch"),
    )


def number_in(text: str, environment: Mapping[str, str]) -> int:
    """The number that `text` is, or that the variable of that name holds. Raises ConfigError where neither is one."""
    value = text if text.isdigit() else environment.get(text, "")
    if not value.isdigit():
        told = f"{text} is {value!r}" if value else f"{text} is not set"
        fix = "start it as the script of `meshwright launch` does"
        raise ConfigError(Problem(what=f"this node has no number: {told}", fix=fix))
    return int(value)


def _share(design: Design, *, node: int, nodes: int) -> Share:
    """What this node holds of the plan. Raises ConfigError where it does not lie on these nodes."""
    found = shares(design)
    if len(found) != nodes or node >= nodes:
        what = f"this is node {node} of {nodes} and the plan lies on {len(found)}"
        fix = f"start {len(found)} nodes, numbered from 0, or plan for {nodes}"
        raise ConfigError(Problem(what=what, fix=fix))
    mine = found[node]
    if mine.machine.device.kind is not DeviceKind.CPU:
        import torch

        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if seen < mine.count:
            what = f"the plan has {mine.count} {mine.machine.device.name} here and torch sees {seen} devices"
            raise ConfigError(Problem(what=what, fix="see `meshwright doctor` there, and what the scheduler granted"))
    return mine


def _begin(design: Design, run_dir: Path, *, again: bool) -> None:
    """The run is begun by `design`, or can go on by it. Raises ConfigError or EnvironmentUnfit where it cannot."""
    exists = (run_dir / "design.json").is_file()
    if again:
        preflight.check_run_dir(design, run_dir=run_dir, resume=exists)
    line = check_resumable(run_dir) if exists else None
    if line and (run_dir / "metrics.jsonl").is_file():
        print(f"meshwright: {line}", file=sys.stderr, flush=True)
    try:
        write_design(design, run_dir, predicted=cost.predict(design), decision=None)
    except OSError as error:
        what = f"nothing can be written there: {error.strerror}"
        raise ConfigError(Problem(what=what, where=str(run_dir))) from None


def _train(design: Design, run_dir: Path, *, mine: Share, nodes: int, met: Met, stop_at: float | None) -> int:
    from meshwright.run.launch import Party, launch

    plan = design.plan
    ranks = [plan.rank_on(device) for device in range(plan.world_size)]
    party = Party(
        node=mine.node,
        nodes=nodes,
        first=mine.first,
        count=mine.count,
        rendezvous=met.rendezvous,
        interface=met.interface,
    )
    arguments = [] if stop_at is None else ["--stop-at", str(stop_at)]
    patience = design.job.peer_timeout_seconds
    launched = launch(run_dir, ranks=ranks, arguments=arguments, say=_say, party=party, patience_seconds=patience)
    if launched.killed:
        return int(ExitCode.INTERRUPTED)
    if launched.failures:
        raise failure_of(design, run_dir, predicted=cost.predict(design), launched=launched)
    remove_empty_logs(run_dir / "logs" / f"node-{mine.node}")
    holds_first = 0 in ranks[mine.first : mine.first + mine.count]
    code = _code(run_dir) if holds_first else None
    return agree_on_end(met.store, code, node=mine.node, nodes=nodes, seconds=_ENDING_SECONDS)


def _code(run_dir: Path) -> int:
    ended = read_ended(run_dir)
    if ended is None:
        raise EnvironmentUnfit(Problem(what="the workers ended and did not say how", where=str(run_dir)))
    saved = ended.ending is Ending.SIGNALLED
    if saved:
        _say(f"step {ended.step:,} of {ended.total_steps:,} is saved; starting this again goes on")
    return int(ExitCode.SAVED if saved else ExitCode.OK)


def _digest(design: Design) -> str:
    """Of all that a worker reads: the plan, and the model, cluster and job with it."""
    return hashlib.sha256(codec.canonical(design).encode()).hexdigest()[:12]


def _say(line: str) -> None:
    print(f"meshwright: {line}", file=sys.stderr, flush=True)


def _heed() -> None:
    """Whoever holds standard input asks this node to save, by its end or a line, or by `stop` to stop at once."""
    # Not by sys.stdin, whose lock a thread that reads holds when the interpreter ends.
    while said := os.read(0, 4096):
        os.kill(os.getpid(), signal.SIGQUIT if b"stop" in said else signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="meshwright.run.launching.node", description=__doc__)
    parser.add_argument("run", type=Path, help="run directory, which all nodes see")
    parser.add_argument("--node", required=True, help="this node's number, or the variable that holds it")
    parser.add_argument("--nodes", required=True, help="how many there are, or the variable that holds it")
    parser.add_argument("--head", required=True, help="HOST:PORT of node 0")
    parser.add_argument("--session", required=True, help="a name that this launch alone has")
    parser.add_argument("--first-node", type=int, default=0, help="added to the number")
    parser.add_argument("--design", type=Path, default=None, help="a design that begins the run")
    parser.add_argument("--stop-after", type=float, default=None, help="save and stop after so many seconds")
    parser.add_argument("--leash", action="store_true", help="save and stop when standard input ends")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
