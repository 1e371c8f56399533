"""Some steps of each optimizer on one device, and what each rank of a layout gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from meshwright.nn import Decoder, initialize
from meshwright.parallel import build_optimizer, lay
from meshwright.parallel.clip import local_part
from meshwright.spec.model import ModelSpec
from meshwright.spec.optimizer import Optimizer
from meshwright.spec.plan import AxisName, Design
from tests.parallel.parity_cases import SEED, Documents, batch, whole
from tests.parallel.reference_optimizers import update
from tests.support.meshes import mesh_over

STEPS = 3


def one_device(
    model: ModelSpec,
    *,
    count: int,
    length: int,
    spec: Optimizer,
    steps: int = STEPS,
    after: Callable[[dict[str, Tensor]], None] | None = None,
) -> tuple[list[float], dict[str, numpy.ndarray]]:
    """Losses of `steps` steps and the parameters after them, by plain autograd and the updates below.

    A parameter's state goes through `after` when it has stepped.
    """
    decoder = Decoder(model).double()
    initialize(decoder, seed=SEED)
    tokens, targets, _ = batch(count, length, model.vocab, packed=Documents.ONE)
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
                state = states.setdefault(name, {})
                update(name, parameter, parameter.grad * scale, spec, state, step)
                if after is not None:
                    after(state)
    return losses, {name: parameter.detach().numpy() for name, parameter in decoder.named_parameters()}


def one_rank(design: Design) -> tuple[list[float], dict[str, numpy.ndarray], float]:
    """The same laid out: losses, this rank's parameters gathered whole, and elements of optimizer state it holds."""
    plan = design.plan
    mesh = mesh_over(design)
    laid = lay(design, mesh, device="cpu", seed=SEED)
    optimizer = build_optimizer(laid, design.job.optimizer)
    tokens, targets, _ = batch(plan.batch, plan.sequence_length, design.model.vocab, packed=Documents.ONE)
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


def copies(design: Design) -> list[numpy.ndarray]:
    """The copies of the tied table that this rank holds after some steps, each gathered whole."""
    plan, mesh = design.plan, mesh_over(design)
    laid = lay(design, mesh, device="cpu", seed=SEED)
    optimizer = build_optimizer(laid, design.job.optimizer)
    own = plan.batch // plan.data
    rows = slice(mesh.data_coordinate * own, (mesh.data_coordinate + 1) * own)
    for step in range(STEPS):
        tokens, targets, _ = batch(plan.batch, plan.sequence_length, design.model.vocab, step=step)
        laid.step(tokens[rows], targets[rows])
        optimizer.step()
    return [whole(p.detach()) for name, p in laid.named_parameters() if name == "embedding.tokens.weight"]


def with_optimizer(design: Design, spec: Optimizer) -> Design:
    return replace(design, job=replace(design.job, optimizer=spec))
