"""What commands print: one JSON document, or rich renderables in the width of the terminal."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from meshwright.cli.manner import manner

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.spec.errors import Problem
    from meshwright.spec.job import JobSpec

PIPE_COLUMNS = 140
LEAST_COLUMNS = 24  # in fewer a table has no room for its words
_LONGEST_NAME = 120


def print_json(document: Any) -> None:
    """The one JSON document of a command on standard output."""
    from meshwright.spec.codec import encode

    print(json.dumps(encode(document), indent=1))


def print_plain(line: str) -> None:
    """A line on standard output, whose control characters are spelt out."""
    from meshwright.spec.errors import spelt_out

    print(spelt_out(line))


def console() -> Console:
    """A console on standard output: colours on a terminal alone, and never with --no-color or NO_COLOR.

    Where there is no terminal, lines are as wide as COLUMNS says, else 140; nowhere are they narrower than 24 columns.
    """
    from meshwright.cli.spelt import SpeltConsole

    width = max(LEAST_COLUMNS, shutil.get_terminal_size(fallback=(PIPE_COLUMNS, 24)).columns)
    if not sys.stdout.isatty():
        return SpeltConsole(highlight=False, width=width, color_system=None)
    found = SpeltConsole(highlight=False, no_color=manner().no_color or None)
    found.width = max(found.width, LEAST_COLUMNS)
    return found


def print_wrapped(lines: Iterable[str]) -> None:
    """Lines on standard output, wrapped at words; those of tables, whose columns two spaces divide, as they are."""
    width = console().width
    for line in lines:
        print_plain(
            line if "  " in line else "\n".join(wrap(line, width, break_long_words=False, break_on_hyphens=False))
        )


@contextmanager
def lossy_output() -> Iterator[None]:
    """While inside, a character that standard output cannot take, as half of one, is a question mark there."""
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper):
        yield
        return
    before = stream.errors
    stream.reconfigure(errors="replace")
    try:
        yield
    finally:
        stream.reconfigure(errors=before)


@contextmanager
def one_document() -> Iterator[None]:
    """While inside, what started processes print goes to standard error; what this one prints stays where it was.

    So that standard output holds one JSON document and nothing else.
    """
    before = sys.__stdout__
    if before is None or sys.stdout is not before:
        yield
        return
    before.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as kept:
        os.dup2(2, 1)
        sys.stdout = kept
        try:
            yield
        finally:
            sys.stdout = before
            os.dup2(kept.fileno(), 1)


def quiet_output() -> None:
    """Nothing more is written to standard output: its reader has gone."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)


def is_output_failure(error: Exception) -> bool:
    """Whether `error` came of standard output, which takes no more; asked by writing one more line end to it."""
    if not isinstance(error, OSError) or error.filename is not None:
        return False
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def of_file(error: OSError) -> Problem:
    """What the system says of a file that a command names, in words."""
    from meshwright.spec.errors import Problem

    name = str(error.filename)
    where = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}... ({len(name):,} characters)"
    return Problem(what=f"cannot be read or written: {error.strerror}", where=where)


def note(text: str) -> None:
    """A line for a person, out of the way of what a program reads; none when quiet was asked for."""
    if not manner().quiet:
        tell(text)


def tell(text: str) -> None:
    """As `note`, of what is wrong: told always, and lost only where standard error has no reader."""
    from meshwright.spec.errors import printable

    if sys.stderr is None:
        return
    with suppress(OSError):
        print(printable(text), file=sys.stderr, flush=True)


def warn_of_idle(job: JobSpec, path: str | None, *, sets: Sequence[str]) -> None:
    """Warns of what a job, loaded from `path` and `sets`, says that does nothing."""
    from meshwright.catalog import job_remarks

    for problem in job_remarks(job, path, sets=sets):
        tell(f"warning: {problem}")


def fill_standard_error() -> None:
    """Where the process was started without standard error, nothing that is opened later can become it."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - it is standard error to the end of the process


def duration(text: str | None, *, where: str) -> float | None:
    """Seconds of a time as `90min`; None of none. Raises ConfigError for what is no time, or none at all."""
    from meshwright.spec.errors import ConfigError, Problem
    from meshwright.spec.units import NotRead, parse_seconds

    if text is None:
        return None
    fix = f"minutes are min: {text}in" if text.endswith("m") else "90min, 20h and 2d are times"
    try:
        seconds = parse_seconds(text)
    except NotRead as error:
        raise ConfigError(Problem(what=error.what, where=where, fix=fix)) from None
    if not 0 < seconds < math.inf:
        raise ConfigError(Problem(what=f"{text} is no time to train in", where=where, fix=fix))
    return seconds


def check_writable(*paths: Path) -> None:
    """Raises ConfigError where one of these files cannot be written, or two are one; asked before the work begins."""
    import os

    from meshwright.spec.errors import ConfigError, Problem
    from meshwright.spec.paths import expanded

    places = [expanded(path) for path in paths]
    problems = []
    for index, place in enumerate(places):
        within = next((folder for folder in place.absolute().parents if folder.exists()), place)
        if place.exists() and not place.is_file():
            fix = "name a plain file"
            problems.append(Problem(where=str(place), what="cannot be written: it is no plain file", fix=fix))
        elif not os.access(place if place.exists() else within, os.W_OK):
            problems.append(Problem(where=str(place), what="cannot be written: permission denied"))
        elif place.resolve() in (other.resolve() for other in places[:index]):
            fix = "name another file for one of them"
            problems.append(Problem(where=str(place), what="two things would be written to it", fix=fix))
    if problems:
        raise ConfigError(problems)


def write(path: Path, text: str) -> None:
    """Write `text` to `path`, whose folder is made, and told, when it is not there.

    Raises ConfigError where it cannot be written, and EnvironmentUnfit where the disk is full.
    """
    from meshwright.spec.written import unwritten, write_whole

    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            note(f"folder {path.parent} was not there and is made")
        write_whole(path, text.rstrip("\n") + "\n")
    except OSError as error:
        raise unwritten(error, where=path) from error
