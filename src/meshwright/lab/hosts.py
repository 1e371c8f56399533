"""Hosts that commands run on, all in one way: a namespace of this machine, a container, or a machine over ssh."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import IO

from meshwright.lab.entering import failure, not_started
from meshwright.spec.errors import EnvironmentUnfit, Problem

Say = Callable[[str, str], None]  # (host, line)
_ENDING_SECONDS, _APART_SECONDS = 10.0, 0.02
_KEPT_LINES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host: `enter` are the words before a command that run it there, as one quoted word where it `quotes`;
    `interface` carries its traffic.
    """

    name: str
    address: str
    interface: str
    enter: tuple[str, ...] = ()
    quotes: bool = False

    def command(self, words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
        """What runs `words` there with `environment` added to its own."""
        told = ["env", *(f"{name}={value}" for name, value in environment.items()), *words]
        return [*self.enter, shlex.join(told)] if self.quotes else [*self.enter, *told]

    def read(
        self, *words: str, environment: Mapping[str, str] = MappingProxyType({}), within_seconds: float = 60.0
    ) -> str:
        """What a command prints there. Raises EnvironmentUnfit where it fails, or has not ended in time."""
        told = self.command(words, environment)
        try:
            done = subprocess.run(told, capture_output=True, text=True, timeout=within_seconds)
        except subprocess.TimeoutExpired as error:
            what = f"{shlex.join(words)} has not ended after {within_seconds:.0f} s there"
            raise EnvironmentUnfit(Problem(what=what, where=self.name)) from error
        except OSError as error:
            raise EnvironmentUnfit(not_started(self, told[0], error)) from error
        if done.returncode:
            raise EnvironmentUnfit(failure(self, words, code=done.returncode, said=done.stderr))
        return done.stdout

    def traffic(self) -> Traffic:
        """What its interface has sent and received so far; nothing where no interface is known."""
        if not self.interface:
            return Traffic()
        # /sys tells of the namespace that mounted it, /proc/net of the one that reads it.
        for line in self.read("cat", "/proc/net/dev").splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == self.interface:
                sent, received = counts.split()[8], counts.split()[0]
                return Traffic(sent_bytes=int(sent), received_bytes=int(received))
        raise EnvironmentUnfit(Problem(what=f"there is no interface {self.interface}", where=self.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that crossed an interface, headers with them."""

    sent_bytes: int = 0
    received_bytes: int = 0

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(
            sent_bytes=self.sent_bytes - before.sent_bytes, received_bytes=self.received_bytes - before.received_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a command ended on one host: its exit code (minus the signal that ended it), last lines and traffic."""

    host: str
    exit_code: int
    seconds: float
    output: str
    traffic: Traffic


@dataclass(slots=True)
class _Running:
    host: Host
    process: subprocess.Popen[str]
    before: Traffic
    began: float
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    ended: float = 0.0
    reader: threading.Thread | None = None


def run_everywhere(
    hosts: Sequence[Host],
    commands: Sequence[Sequence[str]],
    *,
    environments: Sequence[Mapping[str, str]],
    say: Say,
    timeout_seconds: float | None = None,
) -> tuple[Outcome, ...]:
    """All commands at once, one a host, to their ends; every line that they print goes to `say` as it comes.

    Those that still run after `timeout_seconds`, or when this is interrupted, are ended.
    """
    running: list[_Running] = []
    try:
        for host, words, environment in zip(hosts, commands, environments, strict=True):
            running.append(_start(host, words, environment, say))
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        for each in running:
            assert each.reader is not None
            each.reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
    finally:
        for each in running:
            _end(each)
    return tuple(
        Outcome(
            host=each.host.name,
            exit_code=each.process.wait(),
            seconds=each.ended - each.began,
            output="".join(each.lines),
            traffic=each.host.traffic() - each.before,
        )
        for each in running
    )


def _start(host: Host, words: Sequence[str], environment: Mapping[str, str], say: Say) -> _Running:
    before, began = host.traffic(), time.monotonic()
    process = subprocess.Popen(
        host.command(words, environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    each = _Running(host=host, process=process, before=before, began=began)
    assert process.stdout is not None
    each.reader = threading.Thread(target=_read, args=(each, process.stdout, say), daemon=True)
    each.reader.start()
    return each


def _read(each: _Running, lines: IO[str], say: Say) -> None:
    for line in lines:
        each.lines.append(line)
        say(each.host.name, line.rstrip("\n"))
    each.process.wait()
    each.ended = time.monotonic()


def _end(each: _Running) -> None:
    """The process has ended, where it had not with all that it started, and what they printed is read."""
    running = each.process.poll() is None
    for number in (signal.SIGTERM, signal.SIGKILL):
        if running:
            with suppress(ProcessLookupError):
                os.killpg(each.process.pid, number)
            running = not _is_gone(each.process, within_seconds=_ENDING_SECONDS)
    assert each.reader is not None
    each.reader.join(_ENDING_SECONDS)


def _is_gone(process: subprocess.Popen[str], *, within_seconds: float) -> bool:
    """None of the group that `process` leads is there any more, or soon."""
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline:
        process.poll()
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(_APART_SECONDS)
    return False
