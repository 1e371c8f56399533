"""What leaving out stages (SkipPipe, 2502.19913) gains and costs: `python benchmarks/skip/run.py [gain] [quality]`.

`gain`: seconds of a step of 16 microbatches through four stages, beside 1F1B: played by the event simulation, and run
by the real executor on four processes whose stages sleep for known times. `quality`: validation loss, at full depth, of
a small byte model on the pages of docs/, trained with every layer and with a quarter of its stages left out. Either
alone is kept under a name of its own.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import record
from meshwright.cost.simulate import StageSeconds, makespan, simulate
from meshwright.nn import Decoder, fill
from meshwright.nn.context import Context
from meshwright.parallel.buckets import BucketedGradients
from meshwright.parallel.pipeline import PipelineExecutor
from meshwright.schedule import planned, program
from meshwright.schedule.paths import Path as StagePath
from meshwright.schedule.paths import Paths
from meshwright.schedule.skip import Line, dealt, skipping
from meshwright.spec.model import Attention, Embedding, FeedForward, Head, Layer, ModelSpec, Norm, Rotary
from meshwright.spec.plan import Axis, AxisName, BlockGroup, Plan, Schedule, ScheduleKind, Stage
from meshwright.spec.span import Silent

STAGES, MICROBATCHES, TICK = 4, 16, 0.04
LINES = {
    "stages alike": Line(forward=(1.0,) * 4, backward=(2.0,) * 4, transfer=(0.0,) * 4),
    "the second three times as slow": Line(
        forward=(1.0, 3.0, 1.0, 1.0), backward=(2.0, 6.0, 2.0, 2.0), transfer=(0.0,) * 4
    ),
    "inner stages twice as large": Line(
        forward=(1.0, 2.0, 2.0, 1.0), backward=(2.0, 4.0, 4.0, 2.0), transfer=(0.0,) * 4
    ),
    "a link of four between the two inner": Line(
        forward=(1.0,) * 4, backward=(2.0,) * 4, transfer=(0.0, 4.0, 0.0, 0.0)
    ),
}
MEASURED = 5  # steps, after one
DOCS = Path(__file__).resolve().parents[2] / "docs"
LAYERS, WIDTH, LENGTH, ROWS, STEPS, SEEDS = 8, 64, 64, 16, 400, 3


def one_f_one_b(line: Line) -> float:
    each = zip(line.forward, line.backward, line.transfer, strict=True)
    stages = [StageSeconds(forward=f, backward=b, transfer=t) for f, b, t in each]
    whole = program(ScheduleKind.ONE_F_ONE_B, pipeline=STAGES, chunks=1, microbatches=MICROBATCHES)
    return makespan(simulate(whole, stages=stages))


class Sleep(torch.autograd.Function):
    """x, after so many seconds forward and backward."""

    @staticmethod
    def forward(context: object, x: Tensor, forward: float, backward: float) -> Tensor:
        context.seconds = backward  # type: ignore[attr-defined]  # torch's context takes any
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(context: object, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(context.seconds)  # type: ignore[attr-defined]  # see forward
        return gradients[0], None, None


class Sleeper(nn.Module):
    """A stage that takes the seconds of `line`, and has one parameter."""

    def __init__(self, line: Line, rank: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.seconds = line.forward[rank] * TICK, line.backward[rank] * TICK

    def forward(self, x: Tensor, *, documents: Tensor | None = None, ahead: Tensor | None = None) -> Tensor:
        x = x if x.is_floating_point() else x[..., None].float()
        result: Tensor = Sleep.apply(x * self.scale, *self.seconds)
        return result


def plan_of(schedule: Schedule) -> Plan:
    return Plan(
        model="sleepers",
        cluster="here",
        axes=(Axis(name=AxisName.PIPELINE, size=STAGES),),
        stages=tuple(Stage(rank=rank, groups=(BlockGroup(start=rank, stop=rank + 1),)) for rank in range(STAGES)),
        schedule=schedule,
        sequence_length=1,
        microbatch=1,
    )


def sleep_through(rank: int, store: str, line: Line, schedules: list[Schedule], found: list[float]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=STAGES)
    group = dist.group.WORLD
    assert group is not None
    for schedule in schedules:
        part = Sleeper(line, rank)
        executor = PipelineExecutor(
            parts=[part],
            synchronizers=[BucketedGradients(part.parameters(), groups=())],
            weights=[None],
            plan=plan_of(schedule),
            group=group,
            device=torch.device("cpu"),
            hidden=torch.empty(1, 1, 1, device="meta"),
            loss_function=lambda logits, _targets: logits.sum(),
            recorder=Silent(),
        )
        tokens = torch.zeros(MICROBATCHES, 1, dtype=torch.int64)
        seconds = []
        for _ in range(MEASURED + 1):
            dist.barrier()
            start = time.perf_counter()
            executor.step(tokens, tokens)
            dist.barrier()
            seconds.append(time.perf_counter() - start)
        if rank == 0:
            found.append(statistics.median(seconds[1:]))
    dist.destroy_process_group()


def measured(line: Line, schedules: list[Schedule]) -> list[float]:
    with mp.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        found = manager.list()
        mp.spawn(sleep_through, args=(f"{folder}/store", line, schedules, found), nprocs=STAGES)
        return list(found)


def gain() -> tuple[list[record.Row], dict[str, Any]]:
    """Steps with a quarter left out over whole ones, as run and as simulated."""
    rows, raw = [], dict[str, Any]()
    print(f"{'':40}{'1f1b':>16}{'a quarter left out':>26}{'ratio':>16}{'two ahead':>11}{'bound':>8}")
    for name, line in LINES.items():
        whole, left_out = one_f_one_b(line), skipping(line, microbatches=MICROBATCHES, skipped=1)
        ahead = skipping(line, microbatches=MICROBATCHES, skipped=1, ahead=2).seconds / whole
        simulated = left_out.seconds / whole
        raw[name] = {"whole": whole * TICK, "left_out": left_out.seconds * TICK, "two_ahead": ahead}
        text = f"{name:40}{whole * TICK:8.2f}"
        if any(line.transfer):
            print(
                f"{text}{'':8}{left_out.seconds * TICK:18.2f}{'':8}{simulated:8.2f}{ahead:19.2f}",
                flush=True,
            )
            continue
        schedules = [Schedule(microbatches=MICROBATCHES), planned.of(left_out.program, chunks=1)]
        slow, fast = measured(line, schedules)
        text += f" ({slow:5.2f}) {left_out.seconds * TICK:17.2f} ({fast:5.2f}) {simulated:8.2f}"
        print(f"{text} ({fast / slow:4.2f}) {ahead:10.2f}{left_out.bound * TICK:8.2f}", flush=True)
        raw[name] |= {"measured_whole": slow, "measured_left_out": fast}
        rows.append(
            record.Row(
                name=f"{name}: a step with a quarter left out over a whole one",
                target=f"{simulated:.2f} simulated, 5 %",
                measured=f"{fast / slow:.2f}",
                holds=abs(fast / slow / simulated - 1.0) <= 0.05,
            )
        )
    print(
        "seconds as simulated, and in brackets as measured; two ahead: with two more microbatches under way, simulated"
    )
    return rows, raw


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Bytes to learn from, and others to be asked of."""

    train: Tensor
    held_out: Tensor

    @classmethod
    def of_docs(cls) -> Text:
        pages = sorted(DOCS.glob("*.md"))
        texts = [list("".join(page.read_text() for page in some).encode()) for some in (pages[:-3], pages[-3:])]
        return cls(train=torch.tensor(texts[0]), held_out=torch.tensor(texts[1]))

    def rows(self, text: Tensor, draw: torch.Generator, count: int) -> Tensor:
        places = torch.randint(0, len(text) - LENGTH - 1, (count,), generator=draw)
        return torch.stack([text[place : place + LENGTH + 1] for place in places.tolist()])


def model_of(seed: int) -> Decoder:
    norm = Norm(width=WIDTH)
    layer = Layer(
        mixer=Attention(width=WIDTH, heads=4, kv_heads=4, head_dim=16, norm=norm, rotary=Rotary(dims=16)),
        transform=FeedForward(width=WIDTH, hidden=160, norm=norm),
    )
    spec = ModelSpec(
        name="bytes",
        embedding=Embedding(vocab=256, width=WIDTH),
        layers=(layer,) * LAYERS,
        head=Head(vocab=256, width=WIDTH, norm=norm),
        max_positions=LENGTH,
    )
    model = Decoder(spec)
    fill(model, prefix="", model=spec, seed=seed)
    return model


def on_path(model: Decoder, tokens: Tensor, path: StagePath) -> Tensor:
    """Logits after the layers of the stages on `path`, as many of them in each stage."""
    context, each = Context(known_angles={}), LAYERS // STAGES
    assert model.embedding is not None
    assert model.head is not None
    x = model.embedding(tokens, context)
    for layer in (stage * each + more for stage in path for more in range(each)):
        x = model.layers[str(layer)](x, context)
    result: Tensor = model.head(x, None)
    return result


def losses(paths: Paths, *, seed: int, text: Text, at: tuple[int, ...]) -> list[float]:
    """Validation loss of the whole model after so many steps, in nats, learning rate constant after a warm-up."""
    model, draw = model_of(seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    held_out = text.rows(text.held_out, torch.Generator().manual_seed(0), 128)
    found = []
    for step in range(1, max(at) + 1):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 40)
        rows = text.rows(text.train, draw, ROWS).split(ROWS // len(paths))
        optimizer.zero_grad()
        for some, path in zip(rows, paths, strict=True):
            logits = on_path(model, some[:, :-1], path)
            share = nn.functional.cross_entropy(logits.flatten(0, 1), some[:, 1:].flatten()) / len(paths)
            share.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step in at:
            with torch.no_grad():
                logits = on_path(model, held_out[:, :-1], tuple(range(STAGES)))
                found.append(float(nn.functional.cross_entropy(logits.flatten(0, 1), held_out[:, 1:].flatten())))
    return found


def quality() -> tuple[list[record.Row], dict[str, Any]]:
    """Losses with a quarter left out above those of every layer, of each seed."""
    torch.set_num_threads(1)
    text, at = Text.of_docs(), (STEPS * 3 // 4, STEPS)
    every: Paths = (tuple(range(STAGES)),) * 4
    left_out = dealt(STAGES, microbatches=4, skipped=1)
    print(
        f"{LAYERS} layers in {STAGES} stages, {STEPS} steps of {ROWS * LENGTH} tokens, nats on text that was held out"
    )
    print(f"{'seed':6}{'every layer':>13}{'a quarter left out':>20}{'at equal tokens':>17}{'at equal work':>15}")
    gaps, raw = [], dict[str, Any]()
    for seed in range(SEEDS):
        early, whole = losses(every, seed=seed, text=text, at=at)
        skipped = losses(left_out, seed=seed, text=text, at=at[-1:])[0]
        gaps.append((skipped - whole, skipped - early))
        raw[f"seed {seed}"] = {"every layer": whole, "at three quarters": early, "a quarter left out": skipped}
        print(f"{seed:<6}{whole:13.3f}{skipped:20.3f}{gaps[-1][0]:+17.3f}{gaps[-1][1]:+15.3f}", flush=True)
    tokens, work = (statistics.mean(column) for column in zip(*gaps, strict=True))
    print(f"{'mean':39}{tokens:+17.3f}{work:+15.3f}")
    return [
        record.Row(
            name=f"loss with a quarter left out above that of every layer at equal {what}, {SEEDS} seeds",
            target="told",
            measured=f"{mean:+.3f} nats",
            holds=True,
        )
        for what, mean in (("tokens", tokens), ("work", work))
    ], raw


def main() -> None:
    works = {"gain": gain, "quality": quality}
    asked = [name for name in works if name in sys.argv[1:]] or list(works)
    rows, raw = [], dict[str, Any]()
    for name in asked:
        found, raw[name] = works[name]()
        rows += found
    record.finish("skip" if len(asked) == len(works) else f"skip-{asked[0]}", rows, raw)


if __name__ == "__main__":
    main()
