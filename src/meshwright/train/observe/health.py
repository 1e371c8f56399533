"""How the machine under this process does, by what Linux says of it: why a rank may be slow, in words."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.spec.units import format_percent

_PROC = Path("/proc")
_CPUS = Path("/sys/devices/system/cpu")
_GROUPS = Path("/sys/fs/cgroup")
_WORTH_SAYING = 0.05  # of the time
_STEAL = 8  # the place of stolen time among those of /proc/stat
_LOW_CLOCK = 0.8  # of the highest


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What only grows: seconds on a core, waiting for one, held back by a quota, stolen from all cores and of all
    cores; pages swapped in, and read because they were not in memory. None where nothing says it."""

    at: float
    ran: float | None = None
    queued: float | None = None
    throttled: float | None = None
    stolen: float | None = None
    cores: float | None = None
    swapped: float | None = None


@dataclass(slots=True)
class Health:
    """Since it was last `refresh`ed, or made, of the main thread of this process and of its machine."""

    before: Counters = field(default_factory=lambda: read_counters())

    def refresh(self) -> None:
        """What is told later is of the time from now on."""
        self.before = read_counters()

    def words(self) -> str:
        """`its thread waited for a core 38 % of the time; load 6.1 on 2 cores`: the likely causes first."""
        now = read_counters()
        told = [*_shares(self.before, now), *_clock(), _load()]
        return "; ".join(each for each in told if each)


def read_counters() -> Counters:
    """As they are now; on a system without /proc none of them is known."""
    queue, stat, swap = _numbers(_PROC / "self" / "schedstat"), _stat(), _vm("pswpin")
    ticks = float(os.sysconf("SC_CLK_TCK"))
    return Counters(
        at=time.monotonic(),
        ran=queue[0] * 1e-9 if queue else None,
        queued=queue[1] * 1e-9 if len(queue) > 1 else None,
        throttled=_throttled(),
        stolen=stat[_STEAL - 1] / ticks if len(stat) >= _STEAL else None,
        cores=sum(stat) / ticks if stat else None,
        swapped=swap,
    )


def _shares(before: Counters, now: Counters) -> list[str]:
    wall = max(now.at - before.at, 1e-9)

    def gone(name: str) -> float:
        first, last = getattr(before, name), getattr(now, name)
        return 0.0 if first is None or last is None else max(last - first, 0.0)

    told = []
    if (share := gone("throttled") / wall) > _WORTH_SAYING:
        told.append(f"a quota held its processes back {format_percent(share)} of the time")
    if (share := gone("queued") / wall) > _WORTH_SAYING:
        told.append(f"its thread waited for a core {format_percent(share)} of the time")
    if now.stolen is not None and (share := gone("stolen") / max(gone("cores"), 1e-9)) > _WORTH_SAYING:
        told.append(f"{format_percent(share)} of its cores' time was stolen by other virtual machines")
    if pages := gone("swapped"):
        told.append(f"its machine read {pages:,.0f} pages from swap")
    return told


def _clock() -> list[str]:
    """Where cores run well below their highest frequency."""
    shares = []
    for folder in _CPUS.glob("cpu[0-9]*/cpufreq"):
        now, most = _numbers(folder / "scaling_cur_freq"), _numbers(folder / "cpuinfo_max_freq")
        if now and most and most[0]:
            shares.append(now[0] / most[0])
    if not shares or (mean := sum(shares) / len(shares)) > _LOW_CLOCK:
        return []
    return [f"its cores run at {format_percent(mean)} of their highest frequency"]


def _load() -> str:
    cores = os.cpu_count() or 1
    with suppress(OSError):
        return f"load {os.getloadavg()[0]:.1f} on {cores} core{'' if cores == 1 else 's'}"
    return ""


def _throttled() -> float | None:
    """Seconds that the control group of this process, of either version, was held back by its quota."""
    folders = []
    for line in _text(_PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folders.append(_GROUPS / path.lstrip("/"))
        elif "cpu" in controllers.split(","):
            folders.append(_GROUPS / "cpu" / path.lstrip("/"))
    for folder in folders:
        for line in _text(folder / "cpu.stat").splitlines():
            name, _, value = line.partition(" ")
            if name in ("throttled_usec", "throttled_time"):
                return float(value) * (1e-6 if name == "throttled_usec" else 1e-9)
    return None


def _stat() -> list[float]:
    first = _text(_PROC / "stat").partition("\n")[0].split()
    return [float(each) for each in first[1 : _STEAL + 1]]


def _vm(name: str) -> float | None:
    for line in _text(_PROC / "vmstat").splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    return None


def _numbers(path: Path) -> list[float]:
    with suppress(ValueError):
        return [float(each) for each in _text(path).split()]
    return []


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""
