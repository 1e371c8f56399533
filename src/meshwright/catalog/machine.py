"""This machine without measuring it: cores this process may use, memory it may take, and a fingerprint of both."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CPU_INFO = Path("/proc/cpuinfo")
_UNLIMITED = 2**60

# How fast products in bf16 are beside those in fp32, by the first of the words among the processor's flags: torch 2.13,
# squares of 256 and 1,024 on one core of a cloud EPYC that has all, and with later ones hidden from the libraries.
_BF16_SPEEDS = (("avx512_bf16", 2.2), ("avx512bw", 0.44), ("avx2", 0.02), ("sse4_2", 0.02))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One node's processor and memory as this process may use them; `sources` says what bounds each. `bf16_speed` is
    about how fast products in bf16 are beside those in fp32, by what the processor has units for; 1 where it tells
    nothing."""

    processor: str
    cores: int
    memory_bytes: int
    torch_version: str
    sources: Mapping[str, str]
    bf16_speed: float = 1.0

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits: equal when a calibration of one machine holds for the other."""
        gib = round(self.memory_bytes / 2**30)
        text = f"{self.processor}|{self.cores}|{gib}|{self.torch_version}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def this_machine(*, cgroup: Path = _CGROUP, cpu_info: Path = _CPU_INFO) -> Machine:
    """The machine this process runs on; the least of what the hardware, the affinity and the cgroup allow."""
    import psutil

    free = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, total, limit = cpu_quota(cgroup), psutil.virtual_memory().total, memory_limit(cgroup)
    return Machine(
        processor=processor_name(cpu_info),
        cores=free if quota is None else max(1, min(free, int(quota))),
        memory_bytes=total if limit is None else min(limit, total),
        torch_version=installed("torch"),
        bf16_speed=bf16_speed(cpu_info),
        sources={
            "cores": "cgroup quota" if quota is not None and quota < free else "affinity of this process",
            "memory": "cgroup limit" if limit is not None and limit < total else "physical memory",
        },
    )


def cpu_quota(cgroup: Path) -> float | None:
    """Cores' worth of time that the cgroup may use, by version 2 or 1 files; None when it may use all."""
    words = _text(cgroup / "cpu.max").split()
    if not words:
        words = _text(cgroup / "cpu/cpu.cfs_quota_us").split() + _text(cgroup / "cpu/cpu.cfs_period_us").split()
    return float(words[0]) / float(words[1]) if len(words) == 2 and all(word.isdigit() for word in words) else None


def memory_limit(cgroup: Path) -> int | None:
    """Bytes that the cgroup may hold, by version 2 or 1 files; None when there is no limit."""
    words = (_text(cgroup / "memory.max") or _text(cgroup / "memory/memory.limit_in_bytes")).split()
    return int(words[0]) if words and words[0].isdigit() and int(words[0]) < _UNLIMITED else None


def processor_name(cpu_info: Path) -> str:
    """The processor's name with its family and model where the kernel tells them, as clouds hide the name."""
    found = _described(cpu_info)
    name = found.get("model name") or platform.processor() or platform.machine()
    detail = [f"{word} {found[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if key in found]
    return f"{name} ({', '.join(detail)})" if detail else name


def bf16_speed(cpu_info: Path) -> float:
    """About how fast products in bf16 are beside those in fp32, by the processor's flags; 1 where there are none."""
    flags = _described(cpu_info).get("flags", "").split()
    return next((speed for word, speed in _BF16_SPEEDS if word in flags), 1.0)


def _described(cpu_info: Path) -> dict[str, str]:
    """What the kernel tells of the first processor."""
    found: dict[str, str] = {}
    for line in _text(cpu_info).splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return found


def installed(package: str) -> str:
    """The version of an installed package, which is not imported; `not installed` when it is not there."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
