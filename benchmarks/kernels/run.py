"""Kernels that others measured, priced: predicted over measured seconds by device and shape class.

`measured.csv` holds shares of the data sheet's bf16 peak with the file each is from. A product of `count` is (m, k) x
(k, n) in one kernel; a weight gradient adds to fp32. Attention is causal, of `count` heads of n features over m tokens,
its FLOPs those of the keys that are seen. Run: python benchmarks/kernels/run.py
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from meshwright.catalog.devices import devices
from meshwright.cost.compute import part_seconds
from meshwright.cost.products import product_seconds
from meshwright.cost.rates import rates
from meshwright.cost.stacks import SOFTWARE
from meshwright.cost.table import PRECISIONS
from meshwright.cost.work import PartWork
from meshwright.spec.cluster import DeviceSpec, Precision

TABLE = Path(__file__).with_name("measured.csv")
BF16 = np.array([PRECISIONS.index(Precision.BF16)])
STACK = SOFTWARE["megatron-core"]


def ratios() -> Iterator[tuple[str, str, float]]:
    """Device, shape class and predicted over measured seconds of every row."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            device, kind, share = devices()[row["device"]], row["kind"], float(row["share_of_peak"])
            count, m, n = (float(row[name]) for name in ("count", "m", "n"))
            if kind.startswith("attention"):
                flops, found = _attention(device, kind, heads=count, length=int(m), width=n)
            else:
                k = float(row["k"])
                flops, found = 2.0 * count * m * n * k, _product(device, kind, count=count, m=m, n=n, k=k)
                smallest = min(m, n, k)
                kind += ", under 1024 in a dim" if smallest < 1024 and count == 1 else ""
            yield device.name, kind, found * share * device.peak_flops[Precision.BF16] / flops


def _product(device: DeviceSpec, kind: str, *, count: float, m: float, n: float, k: float) -> float:
    figures = rates(device, precision=BF16, length=4096, software=STACK).products
    if "weight gradient" in kind:
        figures = replace(figures, result=np.array([8.0]))
    together, least = STACK.experts_together(count), STACK.expert_seconds if count > 1 else 0.0
    sizes = (np.array([size]) for size in (m, n, k))
    return count * float(product_seconds(*sizes, figures, together=together, least=least)[0])


def _attention(device: DeviceSpec, kind: str, *, heads: float, length: int, width: float) -> tuple[float, float]:
    """FLOPs and seconds of causal attention; backward has 2.5 times the FLOPs."""
    flops = 4.0 * heads * length * length / 2 * width
    part = PartWork(
        name=kind,
        parameters=np.zeros(1),
        score_flops=np.array([flops]),
        scores=np.array([heads * length * length]),
        score_dim=width,
    )
    figures = rates(device, precision=BF16, length=length, software=STACK)
    found = part_seconds(part, device=device, rates=figures, software=STACK)
    if kind.endswith("forward"):
        return flops, float(found.forward[0])
    return 2.5 * flops, float(found.backward[0])


def errors() -> dict[tuple[str, str], tuple[int, float, float]]:
    """Rows, mean error and bias of every device and class, as fractions."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for device, kind, ratio in ratios():
        groups[device, kind].append(ratio)
    return {
        key: (
            len(group),
            sum(abs(r - 1) for r in group) / len(group),
            math.exp(sum(map(math.log, group)) / len(group)) - 1,
        )
        for key, group in sorted(groups.items())
    }


def main() -> None:
    """Prints a table."""
    print(f"{'device':16} {'kernels':40} {'rows':>5} {'error':>8} {'bias':>8}")
    for (device, kind), (count, error, bias) in errors().items():
        print(f"{device:16} {kind:40} {count:5d} {100 * error:6.1f} % {100 * bias:+6.1f} %")


if __name__ == "__main__":
    main()
