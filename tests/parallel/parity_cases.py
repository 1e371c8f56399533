"""What one device gives, by plain autograd, and what each rank of a layout gives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from meshwright.nn import Decoder, initialize
from meshwright.nn.mixture import MixtureOfExperts
from meshwright.parallel import Mesh, build_mesh, build_optimizer, lay
from meshwright.spec.job import OptimizerSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import AxisName, Design, Plan

SEED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One training step: its loss, every gradient, their norm, the parameters after it and a loss without gradient."""

    loss: float
    evaluation: float
    norm: float
    gradients: dict[str, numpy.ndarray]
    parameters: dict[str, numpy.ndarray]


def batch(count: int, length: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and documents (count, length) of every test."""
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, vocab, (count, length + 1), generator=generator)
    cut = torch.randint(1, length, (count, 1), generator=generator)
    documents = (torch.arange(length)[None] >= cut).int()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), documents


def one_device(
    model: ModelSpec, *, count: int, length: int, z_loss: float, optimizer: OptimizerSpec, documents: bool
) -> Outcome:
    """The reference: a whole decoder, torch's own cross entropy, norm and AdamW. Nothing of the parallel room."""
    decoder = Decoder(model).double()
    initialize(decoder, seed=SEED)
    mixtures = [module for module in decoder.modules() if isinstance(module, MixtureOfExperts)]
    for mixture in mixtures:
        mixture.each = 1.0 / count
    tokens, targets, parts = batch(count, length, model.vocab)

    def forward() -> tuple[Tensor, Tensor]:
        logits = decoder(tokens, documents=parts if documents else None)
        plain = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return plain, plain + z_loss * logits.logsumexp(-1).square().mean()

    loss = forward()[1]
    loss.backward()
    named = dict(decoder.named_parameters())
    gradients = {
        name: parameter.grad.clone().numpy() for name, parameter in named.items() if parameter.grad is not None
    }
    norm = torch.stack([p.grad.square().sum() for p in named.values() if p.grad is not None]).sum().sqrt()
    for parameter in named.values():
        if optimizer.clip_norm is not None and norm > optimizer.clip_norm and parameter.grad is not None:
            parameter.grad *= optimizer.clip_norm / norm
    small = [p for name, p in named.items() if p.dim() < 2 or name.startswith("embedding.") or name.endswith("bias")]
    large = [p for p in named.values() if not any(p is other for other in small)]
    groups = [
        {"params": large, "weight_decay": optimizer.weight_decay},
        {"params": small, "weight_decay": 0.0},
    ]
    betas = (optimizer.beta1, optimizer.beta2)
    torch.optim.AdamW(groups, lr=optimizer.learning_rate, betas=betas, eps=optimizer.epsilon).step()
    for mixture in mixtures:
        if mixture.balance is not None and mixture.chosen is not None:
            seldom = mixture.chosen.double().mean() - mixture.chosen
            rate = mixture.spec.routing.bias_rate
            mixture.balance += rate * (seldom > 0) - rate * (seldom < 0)
    with torch.no_grad():
        after = float(forward()[0])
    kept = {**named, **dict(decoder.named_buffers())}
    parameters = {name: value.detach().numpy() for name, value in kept.items()}
    return Outcome(
        loss=float(loss.detach()), evaluation=after, norm=float(norm), gradients=gradients, parameters=parameters
    )


_MESHES: dict[object, Mesh] = {}


def mesh_over(plan: Plan) -> Mesh:
    """One mesh for all plans of the same ranks: a worker forms each process group once."""
    ranks = (plan.axes, plan.placement, plan.experts)
    if ranks not in _MESHES:
        _MESHES[ranks] = build_mesh(plan, device_type="cpu")
    return _MESHES[ranks]


def one_rank(design: Design, documents: bool) -> Outcome:
    """The same step laid out. Gradients and parameters are those of this rank's stages, gathered whole."""
    plan = design.plan
    mesh = mesh_over(plan)
    laid = lay(design, mesh, device="cpu", seed=SEED)
    optimizer = build_optimizer(laid, design.job.optimizer)
    tokens, targets, parts = batch(plan.batch, plan.sequence_length, design.model.vocab)
    own = plan.batch // plan.data
    rows = slice(mesh.data_coordinate * own, (mesh.data_coordinate + 1) * own)
    mine = (tokens[rows], targets[rows], parts[rows] if documents else None)
    loss = laid.step(*mine)
    gradients = {name: whole(p.grad) for name, p in laid.named_parameters() if p.grad is not None}
    norm = laid.clip(design.job.optimizer.clip_norm)
    optimizer.step()
    evaluation = laid.evaluate(*mine)
    parameters = {name: whole(p.detach()) for name, p in laid.named_parameters()}
    parameters |= {name: whole(buffer) for part in laid.parts for name, buffer in part.named_buffers()}
    first = all(mesh.coordinate(axis) == 0 for axis in (AxisName.REPLICATE, AxisName.SHARD, AxisName.TENSOR))
    return Outcome(
        loss=float(loss),
        evaluation=float(evaluation),
        norm=float(norm),
        gradients=gradients if first else {},
        parameters=parameters if first else {},
    )


def whole(x: Tensor) -> numpy.ndarray:
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone().numpy()
