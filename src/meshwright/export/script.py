"""Launch scripts: a shell script of one command with a flag to a line, written and parsed; knows no peer's names."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.spec.errors import ConfigError, Problem

MOST = 10**15
MOST_LISTED = 10_000  # of what is laid out one by one
_LISTED = ("layers", "pipeline", "stages")
Flag = tuple[str | int | float, ...]


def launch_script(
    nodes: int,
    per_node: int,
    program: str,
    flags: Iterable[Flag],
    *,
    before: Sequence[str] = (),
    launcher: Iterable[Flag] | None = None,
    runner: str = "torchrun",
) -> str:
    """A bash script that starts `program` with `flags` on `nodes` of `per_node` processes.

    Without `launcher`, those of torchrun; NODE_RANK and MASTER_ADDR come from the environment of each node.
    """
    where: Iterable[Flag] = launcher or (
        ("--nnodes", nodes),
        ("--nproc-per-node", per_node),
        ("--node-rank", "${NODE_RANK:-0}"),
        ("--master-addr", "${MASTER_ADDR:-localhost}"),
        ("--master-port", "${MASTER_PORT:-29500}"),
    )
    lines = [" ".join([runner, *(_words(flag) for flag in where)]), *([program] if program else [])]
    lines += [_words(flag) for flag in flags]
    command = " \\\n    ".join(lines)
    return "\n".join(["#!/usr/bin/env bash", "set -euo pipefail", *before, f'{command} "$@"']) + "\n"


def _words(flag: Flag) -> str:
    return " ".join(word if word.startswith("${") else shlex.quote(word) for word in map(str, flag))


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The flags of a command, by name; a flag that was not given has the default that the reader names.

    `asked` grows by the names that a reader asks for, so that it can tell what it has not read.
    """

    values: Mapping[str, tuple[str, ...]]
    where: str
    asked: set[str] = field(default_factory=set, compare=False)

    @property
    def unread(self) -> dict[str, str]:
        """The flags that were given and that nobody has asked for, with their values."""
        return {name: " ".join(words) for name, words in self.values.items() if name not in self.asked}

    def wrong(self, what: str, why: str = "") -> ConfigError:
        return ConfigError(Problem(where=self.where, what=what, why=why))

    def times(self, digits: str) -> int:
        """How often something of a list is repeated."""
        if len(digits) > len(str(MOST_LISTED)):
            raise self.wrong(f"{digits[:40]} times is more layers than there are")
        return int(digits)

    def on(self, name: str) -> bool:
        self.asked.add(name)
        return name in self.values

    def words(self, name: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        """All values of `name`."""
        self.asked.add(name)
        return self.values.get(name, default)

    def word(self, name: str, default: str | None = None) -> str:
        """The one value of `name`. Raises ConfigError where it is missing and has no default, or has several."""
        words = self.words(name) if self.on(name) else None
        if words is None and default is not None:
            return default
        if words is None or len(words) != 1:
            what = f"{name} is not given" if words is None else f"{name} has {len(words)} values, not one"
            raise ConfigError(Problem(where=self.where, what=what))
        return words[0]

    def number(self, name: str, default: int | None = None) -> int:
        """The value of `name` as a whole number that is not negative."""
        word = self.word(name, None if default is None else str(default))
        try:
            number = int(word)
        except ValueError:
            number = -1
        if number < 0:
            raise ConfigError(Problem(where=self.where, what=f"{name} {word} is not a whole number"))
        most = MOST_LISTED if any(part in name for part in _LISTED) else MOST
        if number > most:
            raise ConfigError(Problem(where=self.where, what=f"{name} {word[:40]} is more than {most:,}"))
        return number

    def degree(self, name: str, default: int | None = None) -> int:
        """The value of `name` as a number of ranks or sequences: 1 or more."""
        number = self.number(name, default)
        if number == 0:
            raise ConfigError(Problem(where=self.where, what=f"{name} 0 is not a size", fix="choose 1 or more"))
        return number

    def reals(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """All values of `name` as numbers."""
        words = self.words(name)
        try:
            return tuple(map(float, words)) if words else default
        except ValueError as error:
            raise self.wrong(f"{name} {' '.join(words)} are not numbers") from error

    def real(self, name: str, default: float | None = None) -> float:
        word = self.word(name, None if default is None else str(default))
        try:
            return float(word)
        except ValueError as error:
            raise ConfigError(Problem(where=self.where, what=f"{name} {word} is not a number")) from error


def parse_script(text: str, *, runner: str, where: str) -> Given:
    """The flags of the command in `text` that begins with `runner`: those of the launcher and of the program alike.

    The program is the word that ends in `.py`. Raises ConfigError for no such command, or a flag given twice.
    """
    lines = text.replace("\\\n", " ").splitlines()
    commands = [line for line in lines if line.split()[:1] == [runner]]
    if len(commands) != 1:
        what = f"{len(commands)} commands begin with {runner}"
        raise ConfigError(Problem(where=where, what=what, fix="give the script of one launch"))
    try:
        words = [word for word in shlex.split(commands[0]) if word != "$@"][1:]
    except ValueError as error:
        raise ConfigError(Problem(where=where, what="cannot be read as a shell command", why=str(error))) from error
    values: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            if name in values:
                raise ConfigError(Problem(where=where, what=f"{name} is given twice"))
            values[name] = (value,) if value else ()
        elif word.endswith(".py"):
            name = ""
        elif name:
            values[name] = (*values[name], word)
    return Given(values=values, where=where)
