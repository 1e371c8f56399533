"""One training step of a module of a user's, on one device and on the ranks of a plan."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from meshwright.parallel.foreign import Parallelized, parallelize
from meshwright.parallel.torch_compat import plain
from meshwright.spec.degrees import plan_of_degrees
from meshwright.spec.errors import ConfigError
from tests.parallel.foreign_models import VOCAB, WIDTH, Gpt2, case
from tests.parallel.reading_models import reading

MICROBATCHES = 2
CLIP = 0.05
Step = dict[str, Any]


def one_device(kind: str) -> Step:
    """By plain autograd and torch's own norm and optimizer."""
    entry = case(kind)
    loss = entry.loss(entry.module, 0, 8)
    loss.backward()
    gradients = {name: x.grad.clone() for name, x in entry.module.named_parameters() if x.grad is not None}
    norm = torch.stack([x.square().sum() for x in gradients.values()]).sum().sqrt()
    for parameter in entry.module.parameters():
        if parameter.grad is not None:
            parameter.grad *= min(1.0, CLIP / float(norm))
    torch.optim.AdamW(entry.module.parameters(), lr=1e-2).step()
    with torch.no_grad():
        after = entry.loss(entry.module, 0, 8)
    return _step(loss, norm, gradients, entry.module.state_dict(), after)


def one_rank(kind: str, degrees: dict[str, Any]) -> Step:
    """The same by `parallelize`, from weights that only the first rank has."""
    entry = case(kind)
    if dist.get_rank():
        for parameter in entry.module.parameters():
            nn.init.zeros_(parameter)
    plan = plan_of_degrees(precision="fp64", microbatches=MICROBATCHES, **degrees)
    laid = parallelize(entry.module, plan, example=tuple(x[:1] for x in entry.inputs))
    optimizer = torch.optim.AdamW(laid.module.parameters(), lr=1e-2)
    each = 8 // laid.mesh.data_size // MICROBATCHES
    start = laid.mesh.data_coordinate * each * MICROBATCHES
    total = torch.zeros((), dtype=torch.float64)
    for index in range(MICROBATCHES):
        begin = start + index * each
        loss = entry.loss(laid.module, begin, begin + each) / MICROBATCHES
        laid.backward(loss, last=index == MICROBATCHES - 1)
        total += loss.detach()
    dist.all_reduce(total)
    named = laid.module.named_parameters()
    gradients = {name: laid.whole_of(name, x.grad).clone() for name, x in named if x.grad is not None}
    norm = laid.clip_norm(CLIP)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        after = entry.loss(laid.module, 0, 8)
    state = laid.state_dict()
    _forget(laid)
    laid.load_state_dict(state)
    assert all(torch.equal(x, state[name]) for name, x in laid.state_dict().items())
    return _step(total / dist.get_world_size(), norm, gradients, state, after)


def read_on_one_device(kind: str) -> dict[str, Any]:
    """The loss, the norm of gradients and the parameters after a step of a `Reading` module."""
    module, text = reading(kind)
    loss = _predicted(module, text)
    loss.backward()
    trained = [x for x in module.parameters() if x.grad is not None]
    norm = torch.stack([x.grad.square().sum() for x in trained]).sum().sqrt()
    for x in trained:
        x.grad *= min(1.0, CLIP / float(norm))
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    return {"loss": float(loss.detach()), "norm": float(norm), **_arrays(module.state_dict())}


def read_on_one_rank(kind: str, degrees: dict[str, Any]) -> dict[str, Any]:
    """The same by `parallelize`."""
    module, text = reading(kind)
    laid = parallelize(module, plan_of_degrees(precision="fp64", **degrees), example=(text[:1, :-1],))
    optimizer = torch.optim.SGD(laid.module.parameters(), lr=1.0)
    loss = _predicted(laid.module, text.chunk(laid.mesh.data_size)[laid.mesh.data_coordinate])
    laid.backward(loss)
    norm = laid.clip_norm(CLIP)
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return {"loss": float(total / 2), "norm": float(norm), **_arrays(laid.state_dict())}


def read_unseen(kind: str) -> str:
    """What is said where nothing showed which blocks are read outside of their calls."""
    module, text = reading(kind)
    laid = parallelize(module, plan_of_degrees(precision="fp64", shard=2))
    try:
        laid.module(text[:, :-1])
    except ConfigError as error:
        return str(error)
    return ""


def _predicted(module: nn.Module, text: Tensor) -> Tensor:
    return functional.cross_entropy(module(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def _arrays(state: dict[str, Tensor]) -> dict[str, Any]:
    return {name: x.detach().numpy() for name, x in state.items()}


def _forget(laid: Parallelized) -> None:
    for parameter in laid.module.parameters():
        held = parameter.detach()
        getattr(held, "to_local", lambda held=held: held)().fill_(7.0)


def _step(loss: Tensor, norm: Tensor, gradients: dict[str, Tensor], state: dict[str, Tensor], after: Tensor) -> Step:
    arrays = {
        "gradients": {name: x.numpy() for name, x in gradients.items()},
        "parameters": {name: x.detach().numpy() for name, x in state.items()},
    }
    return {"loss": float(loss.detach()), "norm": float(norm), "after": float(after), **arrays}


class Dropping(nn.Module):
    """What is dropped inside and outside of divided features."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Sequential(
            nn.Linear(WIDTH, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, WIDTH), nn.Dropout(0.5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.steps(x)


def dropped() -> tuple[float, Any]:
    """The sum of what comes out, which ranks share, and where this rank's half of the features is dropped."""
    torch.manual_seed(dist.get_rank())
    laid = parallelize(Dropping(), plan_of_degrees(tensor=2, precision="fp32"), example=(torch.zeros(2, WIDTH),))
    half: list[Tensor] = []
    laid.module.steps[1].register_forward_hook(lambda _module, _args, x: half.append(plain(x).detach()))
    total = float(laid.module(torch.ones(64, WIDTH)).sum())
    return total, (half[0] == 0).numpy()


class Again(nn.Module):
    """One module at several places of a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.layers = nn.ModuleList([block, block, block])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def again() -> float:
    """How far what `Again` gives on two tensor ranks is from what it gives on one."""
    x = torch.ones(3, WIDTH)
    laid = parallelize(Again(), plan_of_degrees(tensor=2, precision="fp32"), example=(x,))
    assert laid.rules.divided
    return float((laid.module(x) - Again()(x)).abs().max())


class Summed(nn.Module):
    """A matrix that a product divides, and all of which is used beside it."""

    def __init__(self, used: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.one, self.other = used, nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.other(self.one(x).relu())
        return made * attrgetter(self.used)(self).sum()


def summed(used: str) -> float:
    x = torch.ones(3, WIDTH)
    steps = nn.Sequential(Summed(used), nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
    expected = steps(x)
    laid = parallelize(steps, plan_of_degrees(tensor=2, precision="fp32"), example=(x,))
    return float((laid.module(x) - expected).abs().max())


def without_memory() -> tuple[bool, float]:
    """A module on the meta device, in bf16, given weights later."""
    torch.manual_seed(3)
    weights = Gpt2().state_dict()
    with torch.device("meta"):
        module = Gpt2()
        module.lm_head.weight = module.wte.weight
    tokens = torch.arange(8)[None] % VOCAB
    plan = plan_of_degrees(tensor=2, precision="bf16", recompute="full")
    laid = parallelize(module, plan, example=(tokens,), device="cpu")
    laid.load_state_dict(weights)
    logits = laid.module(tokens)
    laid.backward(logits.float().logsumexp(-1).mean())
    held = all(x.dtype is torch.float32 and x.grad is not None for x in laid.module.parameters())
    whole = Gpt2()
    whole.load_state_dict(weights)
    return held and logits.dtype is torch.bfloat16, float((logits.float() - whole(tokens)).abs().max())


def _penalty(module: nn.Module, x: Tensor) -> Tensor:
    """The sum of squares of gradients by inputs and by weights."""
    x = x.clone().requires_grad_()
    held = [x, *module.parameters()]
    gradients = torch.autograd.grad(module(x).square().mean(), held, create_graph=True)
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    return torch.stack([g.square().sum() for g in whole]).sum()


def _smooth() -> tuple[nn.Module, Tensor]:
    """Matrices divided by columns and rows between ones that are whole."""
    torch.manual_seed(2)
    steps = (nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12))
    return nn.Sequential(*steps).double(), torch.randn(4, WIDTH, dtype=torch.float64)


def penalised(degrees: dict[str, Any]) -> dict[str, float] | str:
    """How far gradients of a penalty on gradients are from those of one device; what is said where there are none."""
    (expected, x), (module, _) = _smooth(), _smooth()
    _penalty(expected, x).backward()
    laid = parallelize(module, plan_of_degrees(precision="fp64", **degrees), example=(x[:1],))
    try:
        laid.backward(_penalty(laid.module, x))
    except ConfigError as error:
        return str(error)
    apart = {}
    for (name, one), other in zip(expected.named_parameters(), module.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        apart[name] = float((laid.whole_of(name, other.grad) - one.grad).abs().max())
    return apart
