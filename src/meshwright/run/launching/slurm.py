"""SLURM: a plan as a batch script, whose job saves before its time limit and queues itself again."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from meshwright.run.launching.ask import Ask
from meshwright.run.launching.command import node_command
from meshwright.run.launching.shares import Share, check_alike
from meshwright.spec.errors import ConfigError, ExitCode, Problem
from meshwright.spec.plan import Design

# Jobs of one node meet at ports of their own, by the number of the job, below those that systems give out (32768 on).
_FIRST_PORT, _PORTS = 20000, 10000
_ENDING_SECONDS = 60  # from the first node that ends to the last
# What the script rests on; other options of sbatch are for whoever knows the site.
_OURS = (
    *("nodes", "ntasks", "ntasks-per-node", "partition", "account", "time"),
    *("signal", "requeue", "no-requeue", "open-mode", "output"),
)

_RUN, _HEAD, _SESSION = '"$run"', '"$head:$port"', '"$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"'

_BODY = """
run={run}
port=$(({first_port} + SLURM_JOB_ID % {ports}))
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
head=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
if [ -z "$head" ]; then
  echo "meshwright: scontrol tells no address of node '$first' of '$SLURM_JOB_NODELIST' to meet at" >&2
  exit {environment}
fi

# The signal of the time limit comes to this shell alone; only a run that it stopped is queued again.
near_limit=no
step=
trap 'near_limit=yes; [ -z "$step" ] || kill -USR1 "$step"' USR1
trap '[ -z "$step" ] || kill -TERM "$step"' TERM

srun --nodes={nodes} --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 {ending} \\
  {command} &
step=$!
while kill -0 "$step" 2>/dev/null; do wait "$step"; done
wait "$step"
code=$?
if [ "$near_limit" = yes ] && [ "$code" -eq {saved} ]; then
  echo "meshwright: the state is saved before the time limit; job $SLURM_JOB_ID is queued again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def output_of(run: Path) -> Path:
    """The file that the job writes to; %j is its number."""
    return run / "logs" / "slurm-%j.out"


def script(design: Design, ask: Ask, *, found: Sequence[Share], grace: int) -> str:
    """The batch script. Raises ConfigError where nodes are unlike, or an extra option is one that it rests on."""
    share = check_alike(tuple(found), place=ask.place)
    command = _command(ask)
    body = _BODY.format(
        run=shlex.quote(str(ask.run)),
        first_port=_FIRST_PORT,
        ports=_PORTS,
        environment=int(ExitCode.ENVIRONMENT),
        saved=int(ExitCode.SAVED),
        nodes=len(found),
        ending="--no-kill --wait=0" if design.job.elastic.on else f"--wait={_ENDING_SECONDS}",
        command=command,
    )
    plan = design.plan
    told = [f"# plan {plan.digest()}: {plan.describe()}", "# Node i of the plan is the i-th node of the job."]
    options = _options(ask, share=share, nodes=len(found), grace=grace)
    options += ["#SBATCH --no-kill"] if design.job.elastic.on else []
    lines = ["#!/bin/bash", *options, *told]
    return "\n".join(lines) + "\n" + body


def _command(ask: Ask) -> str:
    """The node's command as a line of the shell, in which only what this file writes is expanded."""
    words = node_command(
        Path(_RUN),
        python=ask.python or sys.executable,
        node="SLURM_NODEID",
        nodes="SLURM_JOB_NUM_NODES",
        head=_HEAD,
        session=_SESSION,
    )
    return " ".join(word if word in (_RUN, _HEAD, _SESSION) else shlex.quote(word) for word in words)


def _options(ask: Ask, *, share: Share, nodes: int, grace: int) -> list[str]:
    """The #SBATCH lines; those of `ask.extra` take the place of ours of that name, and an empty one takes it away."""
    wanted: dict[str, str | None] = {
        "job-name": ask.name,
        "nodes": str(nodes),
        "ntasks-per-node": "1",
        "exclusive": None,
        "mem": "0",  # all of a node's, of which many sites give a whole node a part unless asked
    }
    if share.accelerator:
        wanted["gres"] = f"gpu:{share.count}"
    wanted |= {"partition": ask.partition} if ask.partition else {}
    wanted |= {"account": ask.account} if ask.account else {}
    wanted |= {"time": _limit(ask.time_seconds)} if ask.time_seconds is not None else {}
    wanted |= {"signal": f"B:USR1@{grace}", "requeue": None, "open-mode": "append", "output": str(output_of(ask.run))}
    for option in ask.extra or ():
        name, equals, value = option.removeprefix("--").partition("=")
        if not name or name in _OURS:
            fix = "--partition, --account, --time and --grace set theirs; the rest the plan decides"
            what = f"{option!r} is not for --scheduler to set"
            raise ConfigError(Problem(what=what, where="--scheduler", fix=fix))
        wanted.pop(name, None)
        wanted |= {} if equals and not value else {name: value or None}
    for name, text in wanted.items():
        if text and not text.isprintable():
            fix = "a line of the script ends where it does"
            raise ConfigError(Problem(what=f"{text!r} is not one line of text", where=f"--{name}", fix=fix))
    return [f"#SBATCH --{name}" + (f"={shlex.quote(value)}" if value else "") for name, value in wanted.items()]


def _limit(seconds: float) -> str:
    """`1-02:03:04`, rounded down to seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{rest:02}"
