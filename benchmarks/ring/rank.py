"""One rank of a ring: attention over a divided sequence, forward and backward, on a host of the lab.

    python rank.py LENGTH STEPS

prints one line of JSON: seconds of each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
import torch.distributed as dist
from tests.support import models
from tests.support.designs import Layout, design

from meshwright.nn.attention import AttentionCore
from meshwright.nn.context import Context
from meshwright.parallel import build_mesh
from meshwright.parallel.context import ContextAttention, share_of
from meshwright.spec.exchange import ExchangeKind

HEADS, HEAD_DIM = 4, 64


def main(length: int, steps: int) -> None:
    torch.set_num_threads(1)
    ranks, rank = int(os.environ["NNODES"]), int(os.environ["NODE_RANK"])
    dist.init_process_group("gloo", init_method="env://", world_size=ranks, rank=rank)
    plan = replace(design(models.model(), Layout(context=ranks, batch=1)).plan, sequence_length=length)
    share = share_of(plan, build_mesh(plan, device_type="cpu"), device=torch.device("cpu"))
    assert share is not None
    core = AttentionCore(models.attention(heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM), head_dim=HEAD_DIM)
    core.exchange = ContextAttention(share=share, kind=ExchangeKind.RING)
    torch.manual_seed(rank)
    shape = (1, length // ranks, HEADS, HEAD_DIM)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape)
    found = []
    for _ in range(steps):
        context = Context(length=length)
        context.positions = share.positions(context)
        dist.barrier()
        began = time.perf_counter()
        core(q, k, v, None, context).backward(gradient)
        found.append(time.perf_counter() - began)
    dist.barrier()
    print(json.dumps({"seconds": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
