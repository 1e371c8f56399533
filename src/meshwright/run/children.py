"""Functions run in fresh processes, with their result or their error brought back; measurements need a clean one."""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

from meshwright.spec.errors import MeshwrightError, Problem, WorkerFailed

LONGEST_LINE = 300


class _Told(Enum):
    """What a child sends: a line to be said, and then its result or its error."""

    LINE = "line"
    RESULT = "result"
    ERROR = "error"


class RaisedThere(Exception):
    """The traceback of what a child raised, as text."""


def in_child(
    function: Callable[..., Any], arguments: Mapping[str, Any], *, seconds: float, preload: Sequence[str] = ()
) -> Any:
    """The result of function(**arguments), run in a fresh process; WorkerFailed after `seconds` or on an error.

    Modules to `preload` are imported once, by a server that stays as long as this process and forks every child.
    """
    return in_children(function, [arguments], seconds=seconds, preload=preload)[0]


def in_children(
    function: Callable[..., Any],
    arguments: Sequence[Mapping[str, Any]],
    *,
    seconds: float,
    preload: Sequence[str] = (),
    say: Callable[[str], None] | None = None,
) -> tuple[Any, ...]:
    """As in_child, one process for each of `arguments`, all at once; the first failure ends them all.

    Where there is a `say`, the function is given one too, and a line that it says there is said here.
    What a child raised is told by its first line; the WorkerFailed comes from a RaisedThere, which has the rest.
    """
    context = _context(preload)
    pipes = [context.Pipe(duplex=False) for _ in arguments]
    workers = [
        context.Process(target=_run, args=(function, dict(given), sender, say is not None), daemon=True)
        for given, (_, sender) in zip(arguments, pipes, strict=True)
    ]
    try:
        for worker, (_, sender) in zip(workers, pipes, strict=True):
            worker.start()
            sender.close()
        return _collect(function, [receiver for receiver, _ in pipes], seconds=seconds, say=say)
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.terminate()
                worker.join(timeout=10)
        for receiver, _ in pipes:
            receiver.close()


def prepare(preload: Sequence[str]) -> None:
    """Has the server of children with that preload begin while there is other work; it ends with this process."""
    if isinstance(_context(preload), ForkServerContext):
        forkserver.ensure_running()


def _context(preload: Sequence[str]) -> ForkServerContext | SpawnContext:
    """Where a server of processes that has one thread cannot be had, each child imports for itself."""
    if not preload or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


def _collect(
    function: Callable[..., Any],
    receivers: Sequence[Connection],
    *,
    seconds: float,
    say: Callable[[str], None] | None,
) -> tuple[Any, ...]:
    deadline = time.monotonic() + seconds
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        waiting = {receiver: index for index, receiver in enumerate(receivers) if index not in results}
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            raise _failed(function, f"no answer within {seconds:.0f} s", "the machine may be too busy; try again")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            index = waiting[receiver]
            try:
                kind, value = receiver.recv()
            except EOFError:
                raise _failed(function, "the process died", "it may have been killed for memory") from None
            if kind is _Told.ERROR:
                raise _failed(function, value[0]) from RaisedThere(value[1])
            if kind is _Told.RESULT:
                results[index] = value
            elif say is not None:
                say(value)
    return tuple(results[index] for index in range(len(receivers)))


def _failed(function: Callable[..., Any], what: str, why: str = "") -> MeshwrightError:
    return WorkerFailed(Problem(what=what, where=f"worker of {function.__name__}", why=why))


def _run(function: Callable[..., Any], arguments: dict[str, Any], sender: Connection, says: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its children
    if says:
        arguments["say"] = lambda line: sender.send((_Told.LINE, line))
    try:
        sender.send((_Told.RESULT, function(**arguments)))
    except Exception as error:
        sender.send((_Told.ERROR, (_first_line(error), traceback.format_exc())))
    finally:
        sender.close()


def _first_line(error: Exception) -> str:
    """The kind of error and the first line of what it says: torch's go on with tables of its kernels."""
    words = str(error).strip().partition("\n")[0]
    line = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..."
