"""What goes wrong, said so that a person can mend it: what, where, why, and the nearest fix."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TypeVar
from unicodedata import category

T = TypeVar("T")

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what the system says of a disk or a person's share that is full


_CONTROLS = ("Cc", "Cf", "Cs")  # controls, formats and half characters by their Unicode categories
LONGEST_WORD = 1000  # characters of a word that a message shows


def printable(text: str, *, longest: int = LONGEST_WORD) -> str:
    """`text` as a terminal shows it and obeys nothing of it: control characters are spelt out, but for ends of lines
    and tabs, and words of more than `longest` characters are cut."""
    cut = text
    if len(text) > longest:
        cut = re.sub(rf"\S{{{longest + 1},}}", lambda word: f"{word[0][:longest]}...", text)
    return spelt_out(cut)


def spelt_out(text: str) -> str:
    """`text` whose control characters are written as escapes, but for ends of lines and tabs."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in "\n\t" else _spelt(each) for each in text)


def controls_spelt(text: str) -> str:
    """As `spelt_out`, for pages: blanks that do not break and their like stay, and what turns the direction of writing
    is spelt out as other controls are."""
    if text.isprintable():
        return text
    return "".join(_spelt(each) if each not in "\n\t" and category(each) in _CONTROLS else each for each in text)


def _spelt(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class ExitCode(IntEnum):
    """Exit codes of every command; documented in docs/commands.md."""

    OK = 0
    BUG = 1
    USAGE = 2
    NO_PLAN = 3
    ENVIRONMENT = 4
    WORKER = 5
    SAVED = 75
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong.

    `where` is a place a person can go to: `job.toml:3 optimizer.kind`, `plan.stages[1].groups[0].tensor`.
    """

    what: str
    where: str = ""
    why: str = ""
    fix: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        why, fix = f" ({self.why})" if self.why else "", f"; {self.fix}" if self.fix else ""
        return printable(f"{head}{why}{fix}")


def name_rule(problem: Problem, name: str) -> Problem:
    """The problem with the rule's name in its reason."""
    reason = f"{problem.why}; rule {name}" if problem.why else f"rule {name}"
    return replace(problem, why=reason)


class MeshwrightError(Exception):
    """A failure that is told in words and never as a traceback; carries every problem found at once."""

    exit_code = ExitCode.USAGE

    def __init__(self, problems: Iterable[Problem] | Problem | str) -> None:
        if isinstance(problems, str):
            problems = Problem(what=problems)
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class ConfigError(MeshwrightError):
    """A specification, an option or a file is wrong."""


class Gathering:
    """What is wrong with several things that are read one after another, so that all of it is told at once."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def attempt(self, read: Callable[[], T]) -> T | None:
        """What `read` returns; None where it raises ConfigError, whose problems are kept, each once."""
        try:
            return read()
        except ConfigError as error:
            self.problems += [problem for problem in error.problems if problem not in self.problems]
            return None

    def tell(self) -> None:
        """Raises ConfigError with all that was wrong; nothing where nothing was."""
        if self.problems:
            raise ConfigError(self.problems)


class NoPlanFits(MeshwrightError):
    """No legal plan fits; the problems name the closest miss."""

    exit_code = ExitCode.NO_PLAN


class EnvironmentUnfit(MeshwrightError):
    """The machine lacks something the command needs."""

    exit_code = ExitCode.ENVIRONMENT


class WorkerFailed(MeshwrightError):
    """A worker process failed or the loss diverged."""

    exit_code = ExitCode.WORKER


class Fault(MeshwrightError):
    """A fault of meshwright itself, in one line; what it was raised from tells the rest to whoever asks."""

    exit_code = ExitCode.BUG
