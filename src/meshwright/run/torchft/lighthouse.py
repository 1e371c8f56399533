"""Lighthouse: where torchft's replicas find each other, as a process that lives as long as the one that started it.

`python -m meshwright.run.torchft.lighthouse --fewest N --patience SECONDS` writes its port and ends with its input.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from meshwright.run.rendezvous import LOOPBACK_ADDRESS
from meshwright.spec.errors import EnvironmentUnfit, Problem

HEARTBEAT_SECONDS = 0.1
SILENT_SECONDS = 1.0  # ten heartbeats missed: a replica is gone
_TICK_MS = 20
READY = "elastic/ready"  # of a run: which of the replicas that are started together are ready
_MODULE = "meshwright.run.torchft.lighthouse"


@contextmanager
def lighthouse(*, fewest: int, patience_seconds: float) -> Iterator[str]:
    """One of this host, for replicas of this host alone: its address, until this ends. It waits `patience_seconds` for
    a replica that is there and does not come. Raises EnvironmentUnfit where it does not start."""
    words = [sys.executable, "-m", _MODULE, "--fewest", str(fewest), "--patience", str(patience_seconds)]
    # What it writes of every look at its replicas is for nobody; signals of the terminal are for workers.
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = process.stdout.readline().decode().strip()
        if not port.isdigit():
            what = "torchft's lighthouse did not start"
            raise EnvironmentUnfit(Problem(what=what, where="job.elastic.backend", fix=f"see python -m {_MODULE} -h"))
        yield f"http://{LOOPBACK_ADDRESS}:{port}"
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


def main() -> None:
    """Until nobody holds the other end of what this reads."""
    from torchft.coordination import LighthouseServer

    parser = argparse.ArgumentParser(prog=_MODULE, description=__doc__)
    parser.add_argument("--fewest", type=int, required=True, help="replicas that may train")
    parser.add_argument("--patience", type=float, required=True, help="seconds that a silent one is waited for")
    options = parser.parse_args()
    server = LighthouseServer(
        bind=f"{LOOPBACK_ADDRESS}:0",
        min_replicas=options.fewest,
        join_timeout_ms=round(1000 * options.patience),
        quorum_tick_ms=_TICK_MS,
        heartbeat_timeout_ms=round(1000 * SILENT_SECONDS),
    )
    print(urlsplit(server.address()).port, flush=True)
    sys.stdin.read()
    os._exit(0)  # its own way to shut down waits for connections to end, some of which do not


if __name__ == "__main__":
    main()
