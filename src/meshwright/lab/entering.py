"""Why a command did not run on a host: nothing enters it from here, nobody lets it in, or it lacks the program."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Protocol

from meshwright.spec.errors import Problem

_NO_CONNECTION = 255  # what ssh ends with where it could not run the command
_NO_PROGRAM = (126, 127)
_ABSENT = ("no such container", "no container with name or id")
_STOPPED = ("is not running", "container state improper", "can only create exec sessions on running")
_NO_DAEMON = ("cannot connect to the docker daemon", "cannot connect to podman", "error during connect", "docker.sock")


class Entered(Protocol):
    """A host by its name, and the words before a command that run it there."""

    @property
    def name(self) -> str: ...

    @property
    def enter(self) -> tuple[str, ...]: ...


def not_started(host: Entered, program: str, error: OSError) -> Problem:
    """The problem of a program that this machine could not start to enter `host`."""
    if isinstance(error, FileNotFoundError):
        fix = f"install {program}, or put it on PATH" if host.enter else ""
        return Problem(what=f"this machine has no {program}", where=host.name, fix=fix)
    return Problem(what=f"{program} does not start here", where=host.name, why=error.strerror or str(error))


def failure(host: Entered, words: Sequence[str], *, code: int, said: str) -> Problem:
    """The problem of `words` that ended with `code` and `said` so on `host`, with the last line of it."""
    program = host.enter[0] if host.enter else ""
    why, low = _last(said), said.lower()
    if program == "ssh" and code == _NO_CONNECTION:
        fix = f"try: {shlex.join([*host.enter, 'true'])}"
        return Problem(what="cannot be entered over ssh", where=host.name, why=why, fix=fix)
    if program in ("docker", "podman"):
        if any(sign in low for sign in _NO_DAEMON):
            fix = f"start it, or ask for leave to use it: {program} info"
            return Problem(what=f"{program} does not reach its daemon", where=host.name, why=why, fix=fix)
        if any(sign in low for sign in _ABSENT):
            return Problem(what="is no container", where=host.name, why=why, fix=f"{program} ps --all lists them")
        if any(sign in low for sign in _STOPPED):
            return Problem(what="is not running", where=host.name, why=why, fix=f"{program} start {host.name}")
    if code in _NO_PROGRAM:
        return Problem(what=f"has no {words[0]}, or cannot run it", where=host.name, why=why)
    return Problem(what=f"{shlex.join(words)} fails there", where=host.name, why=why)


def _last(said: str) -> str:
    """The last line that says something."""
    return next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
