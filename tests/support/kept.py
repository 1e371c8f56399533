"""One process that counts, which stays up between tests: what torch and recipes learn once they know from then on.

    kept.run(function, **given) -> function(**given)

Where a function raises, or its process dies or outlives the time, the call fails with what was told, and the next one
has a fresh process.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from meshwright.run.dry.worker import PRELOADED as COUNTS
from meshwright.run.dry.worker import settle
from tests.support import pool

TIMEOUT_SECONDS = 280.0
_kept: list[tuple[Any, Connection]] = []


class KeptError(AssertionError):
    """What the process raised, with its traceback."""


def run(function: Callable[..., Any], /, **given: Any) -> Any:
    """What `function`, of a module, gives back in the process that stays."""
    process, pipe = _kept.pop() if _kept else _started()
    answered = False
    try:
        pipe.send((function, given))
        if not pipe.poll(TIMEOUT_SECONDS):
            raise KeptError(f"no answer after {TIMEOUT_SECONDS:.0f} s")
        failure, result = pipe.recv()
        if failure:
            raise KeptError(failure)
        answered = True
    except EOFError:
        raise KeptError("the process died") from None
    finally:
        if answered:
            _kept.append((process, pipe))
        else:
            pipe.close()
            process.kill()
            process.join()
    return result


def _started() -> tuple[Any, Connection]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*pool.PRELOADED, *COUNTS])
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _serve(pipe: Connection) -> None:
    settle()
    while True:
        try:
            function, given = pipe.recv()
        except EOFError:
            return
        try:
            answer = ("", function(**given))
        except BaseException:  # the parent tells it; this process has no one else to tell
            answer = (traceback.format_exc(), None)
        pipe.send(answer)
