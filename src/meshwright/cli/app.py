"""The application and its one error boundary: every failure becomes words and a documented exit code."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import replace
from typing import Annotated

import typer

from meshwright.cli import (
    audit,
    chaos,
    cluster,
    clusters,
    compare,
    convert,
    diagnose,
    doctor,
    dryrun,
    explain,
    export,
    generate,
    lab,
    launch,
    logs,
    models,
    plan,
    report,
    train,
    validate,
    version,
)
from meshwright.cli.manner import NoColor, Quiet, Verbose, ask, manner, speaking
from meshwright.cli.output import (
    fill_standard_error,
    is_output_failure,
    lossy_output,
    of_file,
    one_document,
    quiet_output,
    tell,
)
from meshwright.spec.errors import FULL, ExitCode, MeshwrightError, Problem

SUMMARY = "Designs the fastest distributed training of a model on your machines, shows why, runs it and compares."
INTERRUPTED = Problem(what="interrupted")
NO_MEMORY = Problem(
    what="this machine has too little memory for the question", fix="ask for fewer devices, layers or plans"
)
NO_OUTPUT = Problem(what="standard output is closed", fix="send it to a file or to /dev/null")


def build() -> typer.Typer:
    """The application with every command."""
    application = typer.Typer(
        name="meshwright",
        help=SUMMARY,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name, command in (
        ("plan", plan.plan),
        ("dryrun", dryrun.dryrun),
        ("train", train.train),
        ("launch", launch.launch),
        ("logs", logs.logs),
        ("explain", explain.explain),
        ("compare", compare.compare),
        ("report", report.report),
        ("export", export.export),
        ("audit", audit.audit),
        ("chaos", chaos.chaos),
        ("diagnose", diagnose.diagnose),
        ("convert", convert.convert),
        ("generate", generate.generate),
        ("validate", validate.validate),
        ("lab", lab.lab),
        ("models", models.models),
        ("clusters", clusters.clusters),
        ("doctor", doctor.doctor),
        ("version", version.version),
    ):
        application.command(name)(speaking(command))
    application.callback()(_options)
    application.add_typer(cluster.build(), name="cluster")
    return application


def _show_version(asked: bool) -> None:
    if asked:
        from meshwright import __version__

        print(f"meshwright {__version__}")
        raise typer.Exit


def _options(
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_color: NoColor = False,
    version: Annotated[  # noqa: ARG001 - its callback has shown it
        bool, typer.Option("--version", "-V", is_eager=True, callback=_show_version, help="Show the version alone.")
    ] = False,
) -> None:
    """The options of every command, given before its name; the version ends the line."""
    ask(quiet=quiet, verbose=verbose, no_color=no_color)


def run(arguments: Sequence[str] | None) -> int:
    """Run one command and return its exit code; no error leaves it.

    What is asked of one command, as to be quiet, does not outlive it. With --json anywhere in the line, standard
    output is one JSON document, of an error too.
    """
    return copy_context().run(_guarded, arguments)


def _guarded(arguments: Sequence[str] | None) -> int:
    fill_standard_error()
    if sys.stdout is None:
        return _tell((NO_OUTPUT,), ExitCode.ENVIRONMENT, as_json=False)
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    as_json = "--json" in words
    code = int(ExitCode.OK)
    try:
        with lossy_output(), one_document() if as_json else nullcontext():
            code = _run(words, as_json=as_json)
        sys.stdout.flush()
    except BrokenPipeError:
        quiet_output()
    except OSError as error:
        # No other error leaves a command: standard output could not take what was printed.
        quiet_output()
        problem = Problem(what=f"standard output cannot be written: {error.strerror or error}")
        return _tell((problem,), ExitCode.ENVIRONMENT, as_json=False)
    return code


def _run(words: list[str], *, as_json: bool) -> int:
    try:
        code = typer.main.get_command(build()).main(words, prog_name="meshwright", standalone_mode=False)
    except MeshwrightError as error:
        if manner().verbose:
            tell(traceback.format_exc().rstrip())
        return _tell(error.problems, error.exit_code, as_json=as_json)
    except MemoryError as error:
        return _tell((replace(NO_MEMORY, why=str(error)),), ExitCode.ENVIRONMENT, as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        return _tell((INTERRUPTED,), ExitCode.INTERRUPTED, as_json=as_json)
    except BrokenPipeError:
        raise
    except SystemExit as error:
        # The parser turns a broken pipe into an exit of its own.
        if isinstance(error.__context__, BrokenPipeError):
            raise BrokenPipeError from None
        raise
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            return _tell_usage(error, as_json=as_json)
        if is_output_failure(error):
            raise
        if isinstance(error, OSError) and error.filename is not None:
            code = ExitCode.ENVIRONMENT if error.errno in FULL else ExitCode.USAGE
            return _tell((of_file(error),), code, as_json=as_json)
        tell(traceback.format_exc().rstrip())
        problem = Problem(
            what=f"{type(error).__name__}: {error}",
            why="this is a fault of meshwright, not of what you asked",
            fix="please report it with the lines above",
        )
        return _tell((problem,), ExitCode.BUG, as_json=as_json)
    if code == ExitCode.INTERRUPTED:
        return _tell((INTERRUPTED,), ExitCode.INTERRUPTED, as_json=as_json)
    return int(code or ExitCode.OK)


def _tell(problems: Sequence[Problem], code: ExitCode, *, as_json: bool) -> int:
    for problem in problems:
        tell(str(problem) if code is ExitCode.SAVED else f"error: {problem}")
    if as_json:
        from meshwright.spec.codec import encode

        print(json.dumps({"error": {"exit_code": int(code), "problems": encode(tuple(problems))}}, indent=1))
    return int(code)


def _tell_usage(error: Exception, *, as_json: bool) -> int:
    """A wrong command or option, as the parser words it, with where to read more."""
    message = str(error.format_message()).strip()  # type: ignore[attr-defined]  # the parser's errors have it
    if not message:
        return ExitCode.USAGE
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "meshwright"
    problem = Problem(what=message.rstrip("."), fix=f"see {path} --help")
    return _tell((problem,), ExitCode.USAGE, as_json=as_json)
