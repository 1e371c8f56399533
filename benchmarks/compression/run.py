"""What compressing gradients takes this processor, and how far training lags: `python benchmarks/compression/run.py`.

Nanoseconds of processor time an element on one thread, of a bucket of three matrices that one rank sends to itself; and
the mean loss of the last steps of a small byte model on the pages of docs/, trained by AdamW on what came back.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.nn import Decoder, fill
from meshwright.parallel.buckets import BucketedGradients
from meshwright.parallel.reduction import Travel
from meshwright.parallel.wire import Wire
from meshwright.run.allocator import keep_freed_memory
from meshwright.spec.compression import AcpSgd, DeMo, OneBit, PowerSgd, TopK
from meshwright.spec.model import Attention, Embedding, FeedForward, Head, Layer, ModelSpec, Norm, Rotary

SHAPES = [torch.Size(shape) for shape in ((1024, 1024), (4096, 512), (512, 4096))]
WAYS = (
    Travel(),
    Travel(wire=Wire.INT8),
    Travel(wire=Wire.E4M3),
    Travel(wire=Wire.INT4),
    *(Travel(compression=PowerSgd(rank=rank)) for rank in (1, 4, 16)),
    Travel(compression=PowerSgd(rank=4, start_step=100)),
    *(Travel(compression=AcpSgd(rank=rank)) for rank in (1, 4, 16)),
    *(Travel(compression=TopK(share=share)) for share in (0.01, 0.1)),
    *(Travel(compression=DeMo(largest=largest)) for largest in (1, 2, 8)),
    Travel(compression=OneBit()),
)
STEPS, LAST, LENGTH, ROWS = 300, 50, 32, 8
DOCS = Path(__file__).resolve().parents[2] / "docs"


def words(way: Travel) -> str:
    if way.compression is not None:
        late = f" from step {way.compression.start_step}" if way.compression.start_step else ""
        return way.compression.words + late
    return "fp32" if way.wire is None else way.wire.value


def nanoseconds(way: Travel, group: dist.ProcessGroup) -> float:
    """Processor time an element, the least of five."""
    x = torch.randn(sum(shape.numel() for shape in SHAPES))
    reduction, found = way.reduction(x, SHAPES, [group]), []
    for step in range(6):
        start = time.process_time()
        reduction.start(x, step=200 + step)
        reduction.turn()
        reduction.finish(x)
        found.append(time.process_time() - start)
    return min(found[1:]) / x.numel() * 1e9


def loss(way: Travel, group: dist.ProcessGroup, *, seed: int) -> float:
    """Mean loss of the LAST of STEPS steps, in nats."""
    width, norm = 64, Norm(width=64)
    layer = Layer(
        mixer=Attention(width=width, heads=4, kv_heads=4, head_dim=16, norm=norm, rotary=Rotary(dims=16)),
        transform=FeedForward(width=width, hidden=160, norm=norm),
    )
    spec = ModelSpec(
        name="bytes",
        embedding=Embedding(vocab=256, width=width),
        layers=(layer,) * 2,
        head=Head(vocab=256, width=width, norm=norm),
        max_positions=LENGTH,
    )
    model = Decoder(spec, start=0, stop=len(spec.blocks))
    fill(model, prefix="", model=spec, seed=seed)
    buckets = BucketedGradients(model.parameters(), groups=[group], travel=way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    text = torch.tensor(list("".join(page.read_text() for page in sorted(DOCS.glob("*.md"))).encode()))
    draw, found = torch.Generator().manual_seed(seed), []
    for step in range(1, STEPS + 1):
        places = torch.randint(0, len(text) - LENGTH - 1, (ROWS,), generator=draw)
        rows = torch.stack([text[place : place + LENGTH + 1] for place in places.tolist()])
        buckets.begin(step=step)
        buckets.before_backward(last=True)
        value = torch.nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        value.backward()
        buckets.after_backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(float(value.detach()))
    return sum(found[-LAST:]) / LAST


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    print(f"{'gradients':32}{'ns an element':>14}{'loss':>10}")
    for way in WAYS:
        lag = loss(way, group, seed=0)
        print(f"{words(way):32}{nanoseconds(way, group):14.1f}{lag:10.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
