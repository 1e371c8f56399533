"""ssh: a plan on hosts that are named, one for each of its nodes in its order."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from meshwright.run.launching import token
from meshwright.run.launching.ask import PORT, Ask
from meshwright.run.launching.command import node_command
from meshwright.run.launching.shares import Share
from meshwright.run.machine import installed
from meshwright.spec.errors import ConfigError, EnvironmentUnfit, ExitCode, Problem
from meshwright.spec.json_text import parse_json
from meshwright.spec.plan import Design

# A host that asks for a password or whose key is not known is told, and waits for nobody.
ENTER = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15")
_PROBE_MODULE = "meshwright.run.launching.probe"
_PROBE_SECONDS = 120.0
_MOST_AT_ONCE = 32
_NO_CONNECTION, _NO_PROGRAM = 255, 127
# Background commands of a shell do not hear Ctrl-C; all of them hear that what they read has ended.
_LEASH = """\
#!/bin/sh
# Ctrl-C and SIGTERM ask every host to save and stop; so does the end of this shell.
leash=${TMPDIR:-/tmp}/meshwright-leash.$$
mkfifo -m 600 "$leash" || exit 4
exec 3<>"$leash" 4<"$leash"
rm -f "$leash"
trap 'exec 3>&-' INT TERM HUP USR1
hosts=
"""
_KNOWN = "|".join(str(code.value) for code in ExitCode if code not in (ExitCode.OK, ExitCode.SAVED))
_WAIT = f"""\
for host in $hosts; do
  # A signal that comes just before a shell waits would be seen when the host has ended, which it would not.
  while kill -0 "$host" 2>/dev/null; do sleep 1; done
  wait "$host"; code=$?
  case $code in
    {ExitCode.OK:d}) well=${{well:-{ExitCode.OK:d}}} ;;
    {ExitCode.SAVED:d}) well={ExitCode.SAVED:d} ;;
    {_KNOWN}) failed=${{failed:-$code}} ;;
    *) lost={ExitCode.WORKER:d} ;;
  esac
done
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A host as it was named, and what runs its part of the plan on it."""

    host: str
    words: tuple[str, ...]

    @property
    def entered(self) -> list[str]:
        """The words that run it from here: ssh gives one line to the host's shell."""
        return [*ENTER, self.host, shlex.join(self.words)]


def hosts_of(ask: Ask, *, found: Sequence[Share]) -> tuple[str, ...]:
    """The host of each node. Raises ConfigError where they are not as many as the nodes, or have other devices."""
    names, problems = [], []
    for index, text in enumerate(ask.hosts or ()):
        host, _, slots = text.partition(":")
        names.append(host)
        if not host or host.startswith("-"):
            problems.append(Problem(what=f"{text!r} names no host", where="--hosts", fix="write HOST or HOST:DEVICES"))
        if slots and index < len(found) and slots != str(found[index].count):
            what = f"{host} has {slots} devices and node {index} of the plan {found[index].count}"
            problems.append(
                Problem(what=what, where="--hosts", fix="name hosts in the plan's order, or plan for these")
            )
    if len(names) != len(found):
        plural = ["" if len(each) == 1 else "s" for each in (names, found)]
        what = f"{len(names)} host{plural[0]} for the plan's {len(found)} node{plural[1]}"
        problems.append(Problem(what=what, where="--hosts", fix="name one for each node, in the plan's order"))
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice and found[0].accelerator:
        what = f"{', '.join(twice)} is named twice, and two nodes would share its devices"
        problems.append(Problem(what=what, where="--hosts", fix="name each host once"))
    if problems:
        raise ConfigError(problems)
    return tuple(names)


def commands(ask: Ask, *, found: Sequence[Share], head: str, session: str, leash: bool) -> tuple[Named, ...]:
    """What each host runs; nodes meet at `head`, HOST:PORT, and stop on a `leash` with whoever started them."""
    hosts = hosts_of(ask, found=found)
    return tuple(
        Named(
            host=host,
            words=tuple(
                node_command(
                    ask.run.absolute(),
                    python=ask.python or sys.executable,
                    node=str(node),
                    nodes=str(len(found)),
                    head=head,
                    session=session,
                    stop_after=ask.time_seconds,
                    leash=leash,
                )
            ),
        )
        for node, host in enumerate(hosts)
    )


def text(design: Design, ask: Ask, *, found: Sequence[Share]) -> str:
    """The commands as a POSIX shell runs them all at once, before any host is asked: the head is the first one's name.

    A signal to that shell, or its end, asks all hosts to save; its exit code is ranked as `remote.run` does.
    """
    head = f"{_name(hosts_of(ask, found=found)[0], ask)}:{PORT}"
    named = commands(ask, found=found, head=head, session=design.plan.digest(), leash=True)
    begun = "".join(f'{shlex.join(each.entered)} <&4 3>&- 4<&- &\nhosts="$hosts $!"\n' for each in named)
    last = "${well:-${failed:-$lost}}" if design.job.elastic.on else "${failed:-${lost:-$well}}"
    return f'{_LEASH}{begun}{_WAIT}exit "{last}"\n'


def examined(design: Design, ask: Ask, *, found: Sequence[Share]) -> tuple[Named, ...]:
    """What each host is to run, now that all of them have answered and are fit for it.

    Raises EnvironmentUnfit with every host that cannot be entered, has other versions or does not see the run.
    """
    hosts, word = hosts_of(ask, found=found), token.leave(ask.run)
    probe = (ask.python or sys.executable, "-m", _PROBE_MODULE, str(ask.run.absolute()))
    distinct = tuple(dict.fromkeys(hosts))
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        answers = dict(zip(distinct, pool.map(lambda host: _answer(host, probe), distinct), strict=True))
    problems = [problem for host in distinct for problem in _problems(host, answers[host], word, ask)]
    if problems:
        raise EnvironmentUnfit(problems)
    first = answers[hosts[0]]
    assert isinstance(first, dict)
    address = ask.address or first["address"] or _name(hosts[0], ask)
    session = f"{design.plan.digest()}-{os.getpid()}-{time.time_ns()}"
    return commands(ask, found=found, head=f"{address}:{first['port']}", session=session, leash=True)


def _answer(host: str, probe: Sequence[str]) -> dict[str, str] | Problem:
    """What the probe says on `host`, or why it says nothing."""
    try:
        done = subprocess.run(
            [*ENTER, host, shlex.join(probe)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
        )
    except FileNotFoundError:
        return Problem(what="this machine has no ssh", fix="install an OpenSSH client")
    except subprocess.TimeoutExpired:
        return Problem(what=f"does not answer within {_PROBE_SECONDS:g} s", where=host)
    said = [line for line in done.stderr.strip().splitlines() if line.strip()]
    why = said[-1] if said else ""
    if done.returncode == _NO_CONNECTION:
        return Problem(what="cannot be entered", where=host, why=why, fix=f"try: ssh -o BatchMode=yes {host} true")
    if done.returncode == _NO_PROGRAM:
        return Problem(what=f"has no {probe[0]}", where=host, why=why, fix="--python names the one that it has")
    try:
        found = parse_json(done.stdout.strip().splitlines()[-1])
        return {name: str(found[name]) for name in ("meshwright", "torch", "token", "address", "port")}
    except (ValueError, LookupError, TypeError):
        fix = "install this version of meshwright there, or name the python that has it with --python"
        return Problem(what="cannot run meshwright", where=host, why=why, fix=fix)


def _problems(host: str, answer: dict[str, str] | Problem, word: str, ask: Ask) -> list[Problem]:
    if isinstance(answer, Problem):
        return [answer]
    ours = {name: installed(name) for name in ("meshwright", "torch")}
    found = [
        Problem(what=f"has {name} {answer[name]} and this machine {ours[name]}", where=host, fix="install one of them")
        for name in ours
        if answer[name] != ours[name]
    ]
    if answer["token"] != word:
        what, fix = f"does not see what is in {ask.run} here", "--run names a directory that all hosts mount there"
        found.append(Problem(what=what, where=host, fix=fix))
    return found


def _name(host: str, ask: Ask) -> str:
    return ask.address or host.rpartition("@")[2]


def log_of(run: Path, index: int, host: str) -> Path:
    """Where what the host of node `index` printed is kept."""
    return run / "logs" / f"node-{index}-{_plain(host)}.log"


def _plain(host: str) -> str:
    return "".join(sign if sign.isalnum() or sign in ".-" else "_" for sign in host)
