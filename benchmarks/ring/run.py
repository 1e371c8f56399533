"""Ring attention over links of a known rate: how much of its communication a step waits for.

Hosts of a lab with one core each pass keys and values on while they use those they have. What a step takes beyond
the same step over links that cost nothing is exposed; no overlap can hide more of a hop than the passes over one block
last, which is what the least that must show is worked out from. Root is needed, as for every lab.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
from meshwright.lab import Lab, Topology, Uplink
from meshwright.spec.units import format_rate

LENGTH, STEPS, WARM = 8192, 8, 2
HEADS, HEAD_DIM, ELEMENT_BYTES = 4, 64, 4
FREE = 5e9
RATES = (250e6, 125e6, 62.5e6, 31.25e6)
HOSTS = (2, 4)
SLACK = 0.05  # of a step
RANK = str(Path(__file__).resolve().parent / "rank.py")


def steps(hosts: int, rate: float) -> tuple[list[float], int]:
    """Seconds of each step of the slowest rank, and the bytes that one host sent in one step."""
    names = tuple(f"host{index}" for index in range(hosts))
    uplinks = tuple(Uplink(below=name, above="core", bandwidth=rate) for name in names)
    with Lab.of(Topology(hosts=names, shares=(1.0 / hosts,) * hosts, uplinks=uplinks)) as lab:
        found = lab.run([sys.executable, RANK, str(LENGTH), str(STEPS)], timeout_seconds=500.0)
    for each in found:
        if each.exit_code:
            raise SystemExit(f"{each.host} ended with {each.exit_code}:\n{each.output}")
    ranks = [json.loads(each.output.strip().rpartition("\n")[2])["seconds"] for each in found]
    return [max(step) for step in zip(*ranks, strict=True)][WARM:], found[0].traffic.sent_bytes // STEPS


def least_exposed(hosts: int, rate: float, free: float) -> float:
    """Seconds that no overlap hides: forward a block is on its way while one is used, backward its gradient as well,
    which follows from the second block on.

    Passes over one block take an equal share of the free step, forward 2 of its 7 products. The last gradients go home
    with nothing beside them.
    """
    block = 2 * (LENGTH // hosts) * HEADS * HEAD_DIM * ELEMENT_BYTES / rate
    forward, backward = 2 / 7 * free / hosts, 5 / 7 * free / hosts
    hops = hosts - 1
    shown = hops * max(0.0, block - forward) + max(0.0, block - backward)
    return shown + (hops - 1) * max(0.0, 2 * block - backward) + block


def main() -> None:
    rows: list[record.Row] = []
    raw: dict[str, Any] = {}
    for hosts in HOSTS:
        free = min(steps(hosts, FREE)[0])
        for rate in RATES:
            found, sent = steps(hosts, rate)
            step, least = min(found), least_exposed(hosts, rate, free)
            communication = sent / rate
            exposed = max(0.0, step - free)
            row = record.Row(
                name=f"{hosts} hosts at {format_rate(rate)}: {communication / free:.2f} of a step is communication",
                target=f"at least {least / step:.0%} shows, + {SLACK:.0%}",
                measured=f"{exposed / step:.1%} of the step shows, {1.0 - exposed / communication:.0%} is hidden",
                holds=exposed <= least + SLACK * step,
            )
            print(row.name, row.measured, flush=True)
            rows.append(row)
            raw[f"{hosts} hosts, {rate:.0f} bytes/s"] = {
                "free_seconds": free,
                "seconds": found,
                "sent_bytes": sent,
                "least_exposed_seconds": least,
            }
    record.finish("ring", rows, raw)


if __name__ == "__main__":
    main()
