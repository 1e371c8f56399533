"""What one worker process runs: `python -m meshwright.run.worker RUN`, under our launcher or under torchrun.

RUN holds design.json. The run goes on from its newest complete checkpoint, so starting again is going on.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains as one rank; the exit code. What went wrong is in the file that the launcher reads."""
    options = _options(arguments)
    # What is imported stays to the end: to look for garbage in it again and again takes an eighth of the start.
    gc.disable()
    from meshwright.run import as_rank

    gc.freeze()
    gc.enable()
    return as_rank.run(options)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="meshwright.run.worker", description=__doc__)
    parser.add_argument("run", type=Path, help="run directory with design.json")
    parser.add_argument("--steps", type=int, default=None, help="run at most this many steps now")
    parser.add_argument("--stop-at", type=float, default=None, help="save and stop then, in seconds since the epoch")
    parser.add_argument("--member", default="", help="name of this worker in an elastic run")
    parser.add_argument("--board", default="", help="HOST@ADDRESS:PORT,... where its launcher tells of others")
    parser.add_argument("--replica", default="", help="name of the replica that this worker is of, under torchft")
    parser.add_argument("--lighthouse", default="", help="where its replicas find each other")
    parser.add_argument("--quiet", action="store_true", help="no replica writes to the launcher's terminal")
    parser.add_argument("--several-hosts", action="store_true", help="others go on when its launcher is gone")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of a failed process group may wait for peers for minutes; the sockets must close now.
    os._exit(code)
