"""Signals: what this process does for a while when one comes, and one sent to another process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # which ask a run to save and stop


@contextmanager
def heeding(numbers: Sequence[signal.Signals], handle: Callable[[int], None]) -> Iterator[None]:
    """Inside, each of these signals calls `handle` with its number, but for those that this process ignores; on other
    threads than the main one nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, _frame: FrameType | None) -> None:
        handle(number)

    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """What asks this process to end, as SIGTERM does, ends what is inside as Ctrl-C does: nothing it started goes on
    alone."""

    def handle(number: int) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    with heeding((signal.SIGTERM, signal.SIGHUP), handle):
        yield


def send(process: psutil.Process, number: signal.Signals) -> None:
    """The process has the signal, where it still runs; another one that has been given its number since does not."""
    with suppress(psutil.Error):
        process.send_signal(number)
