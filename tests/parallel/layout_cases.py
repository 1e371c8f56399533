"""What workers do in the tests of single parts of the room."""

from __future__ import annotations

from dataclasses import replace

import numpy

from meshwright.parallel import build_mesh, build_optimizer, lay
from meshwright.spec.plan import Design
from tests.parallel.parity_cases import SEED, batch, whole


class Spans:
    """A recorder that keeps (name, stage, microbatch)."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, int, int]] = []

    def record(self, name: str, start: float, seconds: float, *, stage: int = -1, microbatch: int = -1) -> None:
        assert seconds >= 0.0
        self.kept.append((name, stage, microbatch))


def first_weights(design: Design) -> dict[str, numpy.ndarray]:
    """Every parameter of this rank's stages as they were initialised, whole."""
    laid = lay(
        design, build_mesh(design.plan, device_type="cpu", kv_heads=design.model.kv_heads), device="cpu", seed=SEED
    )
    return {name: whole(parameter.detach()) for name, parameter in laid.named_parameters()}


def losses(design: Design, steps: int) -> list[float]:
    """The loss of each of `steps` training steps on one batch."""
    plan = design.plan
    mesh = build_mesh(plan, device_type="cpu")
    laid = lay(design, mesh, device="cpu", seed=SEED)
    optimizer = build_optimizer(laid, design.job.optimizer)
    tokens, targets, _ = batch(plan.batch, plan.sequence_length, design.model.vocab)
    own = plan.batch // plan.data
    rows = slice(mesh.data_coordinate * own, (mesh.data_coordinate + 1) * own)
    found = []
    for _ in range(steps):
        found.append(float(laid.step(tokens[rows], targets[rows])))
        laid.clip(1.0)
        optimizer.step()
    return found


def evaluations_between_steps(design: Design) -> tuple[list[float], list[float]]:
    """Losses of three steps with an evaluation before each, and without."""
    plan = design.plan
    mesh = build_mesh(plan, device_type="cpu")
    tokens, targets, _ = batch(plan.batch, plan.sequence_length, design.model.vocab)
    own = plan.batch // plan.data
    rows = slice(mesh.data_coordinate * own, (mesh.data_coordinate + 1) * own)
    found: tuple[list[float], list[float]] = ([], [])
    for evaluates, kept in zip((True, False), found, strict=True):
        laid = lay(design, mesh, device="cpu", seed=SEED)
        optimizer = build_optimizer(laid, replace(design.job.optimizer, learning_rate=1e-2))
        for _ in range(3):
            if evaluates:
                laid.evaluate(tokens[rows], targets[rows])
            kept.append(float(laid.step(tokens[rows], targets[rows])))
            optimizer.step()
    return found


def spans(design: Design) -> list[tuple[str, int, int]]:
    """What one step records on this rank."""
    plan, kept = design.plan, Spans()
    mesh = build_mesh(plan, device_type="cpu")
    laid = lay(design, mesh, device="cpu", seed=SEED, recorder=kept)
    tokens, targets, _ = batch(plan.batch, plan.sequence_length, design.model.vocab)
    own = plan.batch // plan.data
    rows = slice(mesh.data_coordinate * own, (mesh.data_coordinate + 1) * own)
    laid.step(tokens[rows], targets[rows])
    return kept.kept


def clipped(design: Design, max_norm: float) -> tuple[float, float, float]:
    """The norm before clipping, after it, and after clipping to something larger."""
    plan = design.plan
    mesh = build_mesh(plan, device_type="cpu")
    laid = lay(design, mesh, device="cpu", seed=SEED)
    tokens, targets, _ = batch(plan.batch, plan.sequence_length, design.model.vocab)
    own = plan.batch // plan.data
    rows = slice(mesh.data_coordinate * own, (mesh.data_coordinate + 1) * own)
    laid.step(tokens[rows], targets[rows])
    return float(laid.clip(max_norm)), float(laid.clip(None)), float(laid.clip(10 * max_norm))
