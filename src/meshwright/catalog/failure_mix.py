"""Failure mixes: what interrupted published runs, how often, and which fault stands for it."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.codec import nearest
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.faults import FaultKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """`count` interruptions by `name`, which look like `fault`: of one rank, or of the whole host. Where it
    `takes_node` the run needs another node to go on."""

    name: str
    count: int
    fault: FaultKind
    whole_host: bool = False
    takes_node: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Causes with their counts, and where they were counted."""

    name: str
    source: str
    causes: tuple[Cause, ...]

    @property
    def total(self) -> int:
        return sum(cause.count for cause in self.causes)

    def share(self, cause: Cause) -> float:
        return cause.count / self.total


def _broken(name: str, count: int, *, whole_host: bool = False) -> Cause:
    return Cause(name=name, count=count, fault=FaultKind.KILL, whole_host=whole_host, takes_node=True)


# Which fault each cause looks like from inside a run is our reading; the counts are the paper's.
LLAMA3 = Mix(
    name="llama3",
    source="2407.21783, table 5: 419 unexpected interruptions in 54 days on 16,384 H100",
    causes=(
        _broken("GPU", 148),
        _broken("GPU memory", 72),
        Cause(name="software", count=54, fault=FaultKind.KILL),
        Cause(name="network switch or cable", count=35, fault=FaultKind.PARTITION),
        Cause(name="host maintenance", count=32, fault=FaultKind.PREEMPT, takes_node=True),
        _broken("GPU SRAM", 19),
        _broken("GPU system processor", 17),
        _broken("network card", 7),
        Cause(name="NCCL watchdog", count=7, fault=FaultKind.HANG),
        Cause(name="silent data corruption", count=6, fault=FaultKind.CORRUPT, takes_node=True),
        Cause(name="thermal interface and sensor", count=6, fault=FaultKind.SLOW, takes_node=True),
        _broken("SSD", 3, whole_host=True),
        _broken("power supply", 3, whole_host=True),
        _broken("chassis", 2, whole_host=True),
        _broken("IO board", 2, whole_host=True),
        Cause(name="dependency", count=2, fault=FaultKind.KILL),
        _broken("processor", 2, whole_host=True),
        _broken("memory", 2, whole_host=True),
    ),
)
EVEN = Mix(
    name="even",
    source="every kind as often as every other",
    causes=tuple(Cause(name=kind.value, count=1, fault=kind) for kind in FaultKind),
)
MIXES = {mix.name: mix for mix in (LLAMA3, EVEN)}


def load_mix(name: str) -> Mix:
    """The mix of that name. Raises ConfigError with the nearest name."""
    if name not in MIXES:
        raise ConfigError(Problem(what=f"there is no mix {name!r}", where="--mix", fix=nearest(name, MIXES)))
    return MIXES[name]
