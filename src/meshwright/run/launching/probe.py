"""What a host says of itself before anything is started on it: `python -m meshwright.run.launching.probe RUN`."""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshwright.run.launching import token
from meshwright.run.machine import installed


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line of JSON: versions, the word that it sees in RUN, its address, and a port that is free on it."""
    parser = argparse.ArgumentParser(prog="meshwright.run.launching.probe", description=__doc__)
    parser.add_argument("run", type=Path)
    run = parser.parse_args(arguments).run
    told = {
        "meshwright": installed("meshwright"),
        "torch": installed("torch"),
        "token": token.read(run),
        "address": address(os.environ),
        "port": _free_port(),
    }
    print(json.dumps(told))
    return 0


def address(environment: Mapping[str, str]) -> str:
    """The address by which whoever entered over ssh has reached this host; "" where nobody did."""
    words = environment.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else ""


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    raise SystemExit(main())
