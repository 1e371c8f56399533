"""What a step of narrow AdamW takes this processor, beside what it is priced at: `make bench-narrow`.

Nanoseconds of processor time an element of a parameter of 2^20, and microseconds for one of 64 elements, on one thread.
"""

from __future__ import annotations

import time

import torch

from meshwright.cost.optimizers import step_kernels
from meshwright.parallel.narrow_adamw import NarrowAdamWRule
from meshwright.parallel.optimizer import AdamWRule
from meshwright.spec.optimizer import Master, Moments, OptimizerSpec

LARGE, SMALL = 2**20, 64


def seconds(spec: OptimizerSpec, size: int, *, times: int) -> float:
    """Processor seconds of one step of one parameter of `size`, the least of five means."""
    kind = torch.bfloat16 if spec.master is Master.BF16_STOCHASTIC else torch.float32
    parameter = torch.nn.Parameter(torch.randn(size, dtype=kind))
    parameter.grad = torch.randn_like(parameter)
    rule = NarrowAdamWRule(spec, keys={parameter: 7}) if spec.is_narrow else AdamWRule(spec)
    state, found = rule.state(parameter), []
    for _ in range(5):
        start = time.process_time()
        for _ in range(times):
            rule.step([parameter], [state], rate=1e-3, weight_decay=0.1)
        found.append((time.process_time() - start) / times)
    return min(found)


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'moments':10}{'parameters':18}{'ns an element':>14}{'us a small one':>16}{'kernels':>9}")
    for master in Master:
        for state in Moments:
            spec = OptimizerSpec(state=state, master=master)
            large, small = seconds(spec, LARGE, times=4) / LARGE * 1e9, seconds(spec, SMALL, times=100) * 1e6
            print(f"{state.value:10}{master.value:18}{large:14.1f}{small:16.0f}{step_kernels(spec):9}")


if __name__ == "__main__":
    main()
