"""Strikes: faults as they are done, with signals, limits and links; what they change beyond a launch is put back."""

from __future__ import annotations

import resource
import signal
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from meshwright.lab.fabric import Namespace
from meshwright.run.chaos.watch import Watch
from meshwright.run.signals import send
from meshwright.spec.faults import CheckpointPart, Fault, FaultKind
from meshwright.train.checkpoint.find import Checkpoint
from meshwright.train.checkpoint.manifest import COMMITTED, MANIFEST

_PERIOD_SECONDS = 0.05  # of which a slow rank is stopped a part: shorter than most steps, longer than looks are apart
_TURNED_BYTES = 16


class Standing:
    """Processes that stand still, each for as long as any strike holds it."""

    def __init__(self) -> None:
        self._held: defaultdict[psutil.Process, set[Strike]] = defaultdict(set)

    def hold(self, targets: Sequence[psutil.Process], *, by: Strike) -> None:
        for process in targets:
            self._held[process].add(by)
        _signal(targets, signal.SIGSTOP)

    def let_go(self, targets: Sequence[psutil.Process], *, by: Strike) -> None:
        for process in targets:
            self._held[process].discard(by)
        _signal([process for process in targets if not self._held[process]], signal.SIGCONT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a strike is done to: a launch of a run, and the network it is in where that is its own."""

    watch: Watch
    launcher: psutil.Process
    network: Namespace | None
    standing: Standing = field(default_factory=Standing)

    @property
    def everyone(self) -> list[psutil.Process]:
        return [self.launcher, *self.watch.workers()]

    def targets(self, rank: int | None) -> list[psutil.Process]:
        """The process of `rank`, or of all and their launcher; empty while there is none."""
        if rank is None:
            return self.everyone if self.watch.workers() else []
        found = self.watch.process(rank)
        return [] if found is None else [found]


class Strike(Protocol):
    """A fault that was begun."""

    def lasts(self, *, now: float, step: int) -> bool:
        """Whether it goes on, which it does no longer once this is False; asked often, with the step of rank 0."""

    def lift(self) -> None:
        """Whatever of it was left is put back."""


def strike(fault: Fault, scene: Scene, *, now: float, step: int) -> Strike | None:
    """The fault is begun; None while what it is to be done to is not there yet."""
    if fault.kind is FaultKind.CORRUPT:
        return _corrupt(fault, scene)
    if fault.kind is FaultKind.PREEMPT:
        scene.launcher.send_signal(signal.SIGTERM)
        return Done()
    targets = scene.targets(None if fault.kind in (FaultKind.DISK_FULL, FaultKind.PARTITION) else fault.rank)
    if not targets:
        return None
    until = None if fault.seconds is None else now + fault.seconds
    if fault.kind is FaultKind.KILL:
        _signal(targets, signal.SIGKILL)
        return Done()
    if fault.kind is FaultKind.HANG:
        return Hang(targets, scene.standing, until=until)
    if fault.kind is FaultKind.SLOW:
        return Slow(targets, scene.standing, began=now, factor=fault.factor, until_step=step + fault.steps)
    if fault.kind is FaultKind.DISK_FULL:
        return FullDisk(targets, until=until)
    assert scene.network is not None, "partitions are refused where no network can be made"
    return Partition(scene.network, until=until)


class Done:
    """A strike that is over when it is done."""

    def lasts(self, *, now: float, step: int) -> bool:
        return False

    def lift(self) -> None:
        """Nothing of it is left to put back."""


class Hang:
    """Processes stand still until a time; without one until they are ended."""

    def __init__(self, targets: Sequence[psutil.Process], standing: Standing, *, until: float | None) -> None:
        self._targets, self._standing, self._until = targets, standing, until
        standing.hold(targets, by=self)

    def lasts(self, *, now: float, step: int) -> bool:
        if self._until is None:
            return any(process.is_running() for process in self._targets)
        if now < self._until:
            return True
        self.lift()
        return False

    def lift(self) -> None:
        self._standing.let_go(self._targets, by=self)


class Slow:
    """Processes stand still for all but 1/`factor` of the time, until rank 0 is at a step."""

    def __init__(
        self, targets: Sequence[psutil.Process], standing: Standing, *, began: float, factor: float, until_step: int
    ) -> None:
        self._targets, self._standing = targets, standing
        self._began, self._factor, self._until = began, factor, until_step
        self._stopped = False

    def lasts(self, *, now: float, step: int) -> bool:
        if step >= self._until:
            self.lift()
            return False
        stop = (now - self._began) % _PERIOD_SECONDS > _PERIOD_SECONDS / self._factor
        if stop is not self._stopped:
            self._stopped = stop
            change = self._standing.hold if stop else self._standing.let_go
            change(self._targets, by=self)
        return True

    def lift(self) -> None:
        self._standing.let_go(self._targets, by=self)


class FullDisk:
    """No file of these processes can grow, by their own limit (RLIMIT_FSIZE, EFBIG), until a time or their end.

    Nobody else on the machine is short of room by it.
    """

    def __init__(self, targets: Sequence[psutil.Process], *, until: float | None) -> None:
        self._until = until
        self._before = {}
        for process in targets:
            with suppress(ProcessLookupError):
                before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, before[1]))
                self._before[process] = before

    def lasts(self, *, now: float, step: int) -> bool:
        if self._until is None or now < self._until:
            return True
        self.lift()
        return False

    def lift(self) -> None:
        for process, before in self._before.items():
            with suppress(ProcessLookupError):
                if process.is_running():
                    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before)
        self._before = {}


class Partition:
    """No rank reaches another or the launcher until a time: the loopback of the run's own network is down."""

    def __init__(self, network: Namespace, *, until: float | None) -> None:
        self._network, self._until = network, until
        network.run("ip", "link", "set", "lo", "down")

    def lasts(self, *, now: float, step: int) -> bool:
        if self._until is None or now < self._until:
            return True
        self.lift()
        return False

    def lift(self) -> None:
        self._network.run("ip", "link", "set", "lo", "up")


def _corrupt(fault: Fault, scene: Scene) -> Strike | None:
    """Bits of the newest checkpoint are turned where another is whole, and the rank is killed; None where none is."""
    targets = scene.targets(fault.rank)
    if not targets:
        return None
    try:
        whole = scene.watch.whole()
        if len(whole) < 2:
            return None
        _turn_bits(_file_of(whole[0], fault.part))
    except OSError:
        return None  # retention took it meanwhile
    _signal(targets, signal.SIGKILL)
    return Done()


def _file_of(checkpoint: Checkpoint, part: CheckpointPart) -> Path:
    if part is CheckpointPart.MANIFEST:
        return checkpoint.path / MANIFEST
    if part is CheckpointPart.MARKER:
        return checkpoint.path / COMMITTED
    files = checkpoint.manifest.files
    return checkpoint.path / max(files, key=lambda name: files[name].bytes)


def _turn_bits(file: Path) -> None:
    """Sixteen bytes in the middle of the file are their complements, as storage that fails returns them."""
    with file.open("r+b") as stream:
        place = max(0, file.stat().st_size // 2 - _TURNED_BYTES // 2)
        stream.seek(place)
        held = stream.read(_TURNED_BYTES)
        stream.seek(place)
        stream.write(bytes(255 - value for value in held))


def _signal(targets: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in targets:
        send(process, number)
