"""Optimizers as their papers write them, on whole tensors of one device; and what each rank of a layout gives."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from meshwright.nn import Decoder, initialize
from meshwright.parallel import build_optimizer, lay
from meshwright.parallel.clip import local_part
from meshwright.spec.model import ModelSpec
from meshwright.spec.optimizer import Adafactor, Muon, Optimizer, OptimizerSpec, Sgd
from meshwright.spec.plan import AxisName, Design
from tests.parallel.parity_cases import SEED, batch, mesh_over, whole

STEPS = 3


def is_small(name: str, parameter: Tensor) -> bool:
    """No matrix: norms, biases, sinks, and what embeds."""
    return parameter.dim() < 2 or name.startswith("embedding.") or name.endswith("bias")


def one_device(
    model: ModelSpec, *, count: int, length: int, spec: Optimizer, steps: int = STEPS
) -> tuple[list[float], dict[str, numpy.ndarray]]:
    """Losses of `steps` steps and the parameters after them, by plain autograd and the updates below."""
    decoder = Decoder(model).double()
    initialize(decoder, seed=SEED)
    tokens, targets, _ = batch(count, length, model.vocab)
    states: dict[str, dict[str, Tensor]] = {}
    losses = []
    for step in range(1, steps + 1):
        loss = functional.cross_entropy(decoder(tokens).flatten(0, 1), targets.flatten())
        decoder.zero_grad()
        loss.backward()
        losses.append(float(loss.detach()))
        named = {name: p for name, p in decoder.named_parameters() if p.grad is not None}
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in named.values() if p.grad is not None))
        scale = 1.0 if spec.clip_norm is None else min(1.0, spec.clip_norm / norm)
        with torch.no_grad():
            for name, parameter in named.items():
                assert parameter.grad is not None
                update(name, parameter, parameter.grad * scale, spec, states.setdefault(name, {}), step)
    return losses, {name: parameter.detach().numpy() for name, parameter in decoder.named_parameters()}


def update(
    name: str, parameter: Tensor, gradient: Tensor, spec: Optimizer, state: dict[str, Tensor], step: int
) -> None:
    """One step of `spec` on one parameter, a stack of matrices one by one."""
    small = is_small(name, parameter)
    decay, rate = (0.0 if small else spec.weight_decay), spec.learning_rate
    if isinstance(spec, Muon) and not small and not name.startswith("head."):
        momentum = state.setdefault("momentum", torch.zeros_like(parameter))
        momentum.copy_(spec.momentum * momentum + gradient)
        ahead = gradient + spec.momentum * momentum
        matrices = [orthogonal(x, spec.steps) for x in (ahead if ahead.dim() > 2 else [ahead])]
        change = 0.2 * math.sqrt(max(parameter.shape[-2:])) * torch.stack(matrices).view_as(parameter)
        parameter.copy_(parameter * (1.0 - rate * decay) - rate * change)
    elif isinstance(spec, (OptimizerSpec, Muon)):
        first = state.setdefault("first", torch.zeros_like(parameter))
        second = state.setdefault("second", torch.zeros_like(parameter))
        first.copy_(spec.beta1 * first + (1.0 - spec.beta1) * gradient)
        second.copy_(spec.beta2 * second + (1.0 - spec.beta2) * gradient.square())
        fair_first, fair_second = first / (1.0 - spec.beta1**step), second / (1.0 - spec.beta2**step)
        parameter.copy_(parameter * (1.0 - rate * decay) - rate * fair_first / (fair_second.sqrt() + spec.epsilon))
    elif isinstance(spec, Sgd):
        momentum = state.setdefault("momentum", torch.zeros_like(parameter))
        momentum.copy_(spec.momentum * momentum + gradient + decay * parameter)
        parameter.copy_(parameter - rate * momentum)
    else:
        parameter.copy_(parameter * (1.0 - rate * decay))
        parts = range(len(parameter)) if parameter.dim() > 2 else [...]
        for part in parts:
            own = state.setdefault(str(part), {})  # type: ignore[arg-type]  # one state a matrix
            parameter[part] -= rate * factored(gradient[part], spec, own, step)  # type: ignore[index, arg-type]


def orthogonal(x: Tensor, steps: int) -> Tensor:
    """Muon's iteration, always on the wide side."""
    wide = x.T if x.shape[0] > x.shape[1] else x
    y = wide / (wide.norm() + 1e-7)
    for _ in range(steps):
        y = 3.4445 * y - 4.7750 * (y @ y.T) @ y + 2.0315 * (y @ y.T) @ (y @ y.T) @ y
    return y.T if x.shape[0] > x.shape[1] else y


def factored(gradient: Tensor, spec: Adafactor, state: dict[str, Tensor], step: int) -> Tensor:
    """Adafactor's update of a vector or a matrix: algorithms 4 and 5 of the paper, without scaling by the parameter."""
    kept = 1.0 - step**-spec.decay_exponent
    squares = gradient.square() + spec.epsilon_squared
    if gradient.dim() == 1:
        state["square"] = kept * state.get("square", 0.0) + (1.0 - kept) * squares
        second = state["square"]
    else:
        state["row"] = kept * state.get("row", 0.0) + (1.0 - kept) * squares.mean(1)
        state["column"] = kept * state.get("column", 0.0) + (1.0 - kept) * squares.mean(0)
        second = torch.outer(state["row"], state["column"]) / state["row"].mean()
    change = gradient / second.sqrt()
    return change / max(1.0, float(change.square().mean().sqrt()) / spec.clip_update)


def one_rank(design: Design) -> tuple[list[float], dict[str, numpy.ndarray], float]:
    """The same laid out: losses, this rank's parameters gathered whole, and elements of optimizer state it holds."""
    plan = design.plan
    mesh = mesh_over(plan.axes, plan)
    laid = lay(design, mesh, device="cpu", seed=SEED)
    optimizer = build_optimizer(laid, design.job.optimizer)
    tokens, targets, _ = batch(plan.batch, plan.sequence_length, design.model.vocab)
    own = plan.batch // plan.data
    rows = slice(mesh.data_coordinate * own, (mesh.data_coordinate + 1) * own)
    losses = []
    for _ in range(STEPS):
        losses.append(float(laid.step(tokens[rows], targets[rows])))
        laid.clip(design.job.optimizer.clip_norm)
        optimizer.step()
    laid.evaluate(tokens[rows], targets[rows])
    parameters = {name: whole(p.detach()) for name, p in laid.named_parameters()}
    held = sum(
        local_part(x).numel() for state in optimizer.state.values() for name, x in state.items() if name != "step"
    )
    first = all(mesh.coordinate(axis) == 0 for axis in (AxisName.REPLICATE, AxisName.SHARD, AxisName.TENSOR))
    return losses, parameters if first else {}, held


def with_optimizer(design: Design, spec: Optimizer) -> Design:
    return replace(design, job=replace(design.job, optimizer=spec))
