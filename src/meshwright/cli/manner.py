"""How commands speak: the options that every command takes, before its name or after it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any

import typer

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress lines; results, warnings and errors stay.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="With an error, where it was raised; in train, the launcher's log.")
]
NoColor = Annotated[bool, typer.Option("--no-color", help="No colours, as when NO_COLOR is set.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """What was asked of the command that runs."""

    quiet: bool = False
    verbose: bool = False
    no_color: bool = False


_ASKED: ContextVar[Manner | None] = ContextVar("manner", default=None)


def manner() -> Manner:
    """What was asked of the command that runs in this context."""
    return _ASKED.get() or Manner()


def ask(*, quiet: bool = False, verbose: bool = False, no_color: bool = False) -> None:
    """What is asked adds to what was asked before. Raises ConfigError for a command both quiet and verbose."""
    before = manner()
    asked = Manner(quiet=before.quiet or quiet, verbose=before.verbose or verbose, no_color=before.no_color or no_color)
    if asked.quiet and asked.verbose:
        from meshwright.spec.errors import ConfigError, Problem

        raise ConfigError(Problem(what="quiet and verbose at once", where="--quiet", fix="leave one of them out"))
    _ASKED.set(asked)


def options(quiet: Quiet = False, verbose: Verbose = False, no_color: NoColor = False) -> None:
    """The options of every command, given before its name."""
    ask(quiet=quiet, verbose=verbose, no_color=no_color)


def speaking(command: Callable[..., Any]) -> Callable[..., Any]:
    """`command` with the options of every command after its own."""
    own = inspect.signature(command, eval_str=True)
    ours = inspect.signature(options, eval_str=True).parameters

    @functools.wraps(command)
    def run(*arguments: Any, **given: Any) -> Any:
        ask(**{name: given.pop(name) for name in ours if name in given})
        return command(*arguments, **given)

    run.__signature__ = own.replace(parameters=[*own.parameters.values(), *ours.values()])  # type: ignore[attr-defined]  # read by the parser
    run.__annotations__ = {name: entry.annotation for name, entry in {**own.parameters, **ours}.items()}
    return run
