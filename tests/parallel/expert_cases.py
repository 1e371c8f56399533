"""What workers do in the tests of experts on a grid: choices set by hand, and what travels for them."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.nn import Decoder, initialize
from meshwright.nn.mixture import MixtureOfExperts, mix
from meshwright.nn.routing import Routed
from meshwright.parallel import lay
from meshwright.parallel.experts import mixture_of
from meshwright.spec.plan import Design
from meshwright.train.observe.collectives import CollectiveTimer
from tests.parallel.parity_cases import SEED, whole
from tests.support.meshes import mesh_over


def routed(chosen: Tensor, *, experts: int) -> Routed:
    weights = torch.linspace(0.5, 1.5, chosen.numel(), dtype=torch.float64).view(chosen.shape).requires_grad_()
    return Routed(chosen=chosen, weights=weights, counts=torch.bincount(chosen.flatten(), minlength=experts))


def first_mixture(part: torch.nn.Module) -> MixtureOfExperts:
    found = mixture_of(part.get_submodule("layers.0"))
    assert found is not None
    return found


def crowded(design: Design) -> dict[str, float]:
    """Largest differences from one device of outputs and gradients, all tokens of all ranks choosing two experts."""
    mesh = mesh_over(design)
    laid = lay(design, mesh, device="cpu", seed=SEED)
    decoder = Decoder(design.model).double()
    initialize(decoder, seed=SEED)
    here, alone = first_mixture(laid.parts[0]), first_mixture(decoder)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(4, 6, design.model.width, dtype=torch.float64, generator=generator)
    chosen = torch.tensor([[0, 1]]).expand(24, 2).view(4, 6, 2).contiguous()
    kept = torch.ones(4, 6, 2, dtype=torch.bool)
    kept[2:] = False  # ranks 2 and 3 send nothing
    every = routed(chosen.flatten(0, 1), experts=here.spec.experts)
    every.kept = kept.flatten(0, 1)
    wanted_in = tokens.flatten(0, 1).requires_grad_()
    wanted = mix(alone.experts, wanted_in, every)
    wanted.square().sum().backward()
    own_in = tokens[mesh.rank].clone().requires_grad_()
    own = routed(chosen[mesh.rank], experts=here.spec.experts)
    own.kept = kept[mesh.rank]
    own.weights = every.weights.detach().view(4, 6, 2)[mesh.rank].clone().requires_grad_()
    found = here.mixing(here.experts, own_in, own)
    found.square().sum().backward()
    rows = slice(6 * mesh.rank, 6 * mesh.rank + 6)
    assert wanted_in.grad is not None
    assert own_in.grad is not None
    assert every.weights.grad is not None
    assert own.weights.grad is not None
    differences = {
        "output": found - wanted[rows],
        "input": own_in.grad - wanted_in.grad[rows],
        "weights": own.weights.grad - every.weights.grad[rows],
    }
    for name, parameter in here.experts.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        expected = alone.experts.get_parameter(name).grad
        assert expected is not None
        differences[name] = torch.from_numpy(whole(parameter.grad)) - expected
    return {name: float(value.detach().abs().max()) for name, value in differences.items()}


def balanced_calls(design: Design) -> list[tuple[str, str, int]]:
    """(line, operation, bytes) of a forward of one mixture in which every rank sends as many tokens to every other."""
    mesh = mesh_over(design)
    laid = lay(design, mesh, device="cpu", seed=SEED)
    here = first_mixture(laid.parts[0])
    experts, top_k = here.spec.experts, here.spec.top_k
    tokens = torch.ones(16, design.model.width, dtype=torch.float64)
    chosen = torch.stack([(torch.arange(16) + index * experts // top_k) % experts for index in range(top_k)], dim=1)
    timer = CollectiveTimer(design.plan)
    with timer.watching(), torch.no_grad():
        here.mixing(here.experts, tokens, routed(chosen, experts=experts))
    return [(call.line, call.operation, call.bytes) for call in timer.calls]
