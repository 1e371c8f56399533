"""A worker that meets its peer once and then goes astray: rank 1 reads for ever, or calls another collective, or both
read from what does not answer.

python -m tests.run.hang_worker RUN hang|apart|read
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.run.last_words import LastWords
from meshwright.train.observe.collective_log import CollectiveLog
from meshwright.train.observe.listening import listening
from meshwright.train.observe.whereabouts import Marker, Section

PATIENCE = 2.0


def main(run_dir: Path, manner: str) -> None:
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGTERM, end_soon)
    marker, words, log = Marker(run_dir, rank=rank), LastWords(run_dir, rank=rank), CollectiveLog(run_dir, rank=rank)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    try:
        with listening(log):
            log.begin_step(1)
            dist.all_reduce(torch.ones(64))
            log.begin_step(2)
            if manner == "read":
                marker.mark(step=2, section=Section.INPUT)
                read_what_does_not_answer(run_dir / "data")
            go_astray(manner) if rank == 1 else dist.all_reduce(torch.ones(1024))
    except RuntimeError as error:
        words.of(error)
        os._exit(1)


def end_soon(_number: int, _frame: object) -> None:
    """As a launcher would, which is not to be waited for."""
    time.sleep(0.5)
    os._exit(128 + signal.SIGTERM)


def go_astray(manner: str) -> None:
    if manner == "hang":
        read_for_ever()
    dist.broadcast(torch.ones(16), src=0)
    dist.broadcast(torch.ones(16), src=0)


def read_what_does_not_answer(path: Path) -> None:
    """A pipe that nobody writes to holds who opens it as a dead file system does."""
    path.read_bytes()


def read_for_ever() -> None:
    while True:
        time.sleep(3600.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
