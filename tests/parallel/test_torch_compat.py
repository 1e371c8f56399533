"""Each private part of torch that the room uses is there and does what is asked of it."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.optim.adamw import adamw

from meshwright.nn import Decoder, initialize
from meshwright.parallel import build_mesh
from meshwright.parallel.compile import compile_layers, uncompile_layers
from meshwright.parallel.reduce_scatter import ExchangeReduceScatter
from meshwright.parallel.torch_compat import (
    all_gather_single,
    gather_ahead,
    gather_back,
    reduce_scatter_single,
)
from meshwright.spec.plan import AxisName, Plan, Sharding
from tests.support import models
from tests.support.designs import Layout, plan
from tests.support.pool import Pool


def gathers_ahead(of: Plan) -> tuple[bool, list[list[str]], list[list[str]]]:
    """Whether every FSDP2 group gathers without waiting, and what each one gathers ahead, forward and backward."""
    mesh = build_mesh(of, device_type="cpu").along(AxisName.SHARD)
    layers = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(3)])
    inner = layers[1][0]
    for module in (inner, *layers, layers):
        fully_shard(module, mesh=mesh)
    modules = [module for module in layers.modules() if isinstance(module, FSDPModule) and module is not layers]
    gather_ahead(modules, root=layers)
    gather_back(modules, root=layers)
    names = {layers._get_fsdp_state(): "root", inner._get_fsdp_state(): "inner"}
    names |= {layer._get_fsdp_state(): str(place) for place, layer in enumerate(layers)}
    states = [module._get_fsdp_state() for module in (layers, *modules)]
    asynchronous = all(state._fsdp_param_group.unshard_async_op for state in states if state._fsdp_param_group)
    forward, back = (
        [[names[entry] for entry in getattr(state, name)] for state in states]
        for name in ("_states_to_forward_prefetch", "_states_to_backward_prefetch")
    )
    return asynchronous, forward, back


def collectives(of: Plan) -> tuple[list[float], list[float], list[float]]:
    """A gather, a reduce-scatter and the exchange that replaces it, over two ranks."""
    group = build_mesh(of, device_type="cpu").group(AxisName.SHARD)
    assert group is not None
    mine = torch.tensor([1.0, 2.0]) * (group.rank() + 1)
    gathered, scattered, exchanged = torch.empty(4), torch.empty(1), torch.empty(1)
    all_gather_single(gathered, mine, group=group)
    reduce_scatter_single(scattered, mine.clone(), group=group)
    ExchangeReduceScatter()(exchanged, mine.clone(), group, torch.distributed.ReduceOp.SUM)
    return gathered.tolist(), scattered.tolist(), exchanged.tolist()


def test_processors_gather_the_next_group_while_one_computes(pool: Pool) -> None:
    of = plan(models.model(), Layout(shard=2, sharding=Sharding.PARAMETERS))
    for asynchronous, forward, back in pool.run(gathers_ahead, of, ranks=2):
        assert asynchronous
        # Of the root, of layer 0, of layer 1, of the module inside it, of layer 2.
        assert forward == [["0"], ["1"], ["inner", "2"], [], []]
        assert back == [["2"], ["0"], ["inner"], ["0"], ["1"]]


def test_collectives_by_their_two_names_and_the_exchange_agree(pool: Pool) -> None:
    of = plan(models.model(), Layout(shard=2, sharding=Sharding.PARAMETERS))
    for rank, (gathered, scattered, exchanged) in enumerate(pool.run(collectives, of, ranks=2)):
        assert gathered == [1.0, 2.0, 2.0, 4.0]
        assert scattered == exchanged == [3.0 * (rank + 1)]


def test_the_pipeline_runtime_reads_actions_and_has_the_hooks_that_are_overridden() -> None:
    assert str(_Action.from_str("2F7")) == "2F7"
    assert callable(_PipelineScheduleRuntime._prepare_schedule_with_comms)
    for name in (
        "get_fwd_recv_ops",
        "get_bwd_recv_ops",
        "perform_reduce_grad",
        "_retrieve_recv_activations",
        "_retrieve_recv_grads",
        "_prepare_forward_infra",
        "_prepare_backward_infra",
    ):
        assert callable(getattr(PipelineStage, name)), name


def test_the_fused_step_is_torchs_own() -> None:
    ours = torch.ones(3, dtype=torch.float64)
    theirs = torch.nn.Parameter(ours.clone())
    theirs.grad = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64)
    torch.optim.AdamW([theirs], lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2).step()
    adamw(
        [ours],
        [theirs.grad],
        [torch.zeros(3, dtype=torch.float64)],
        [torch.zeros(3, dtype=torch.float64)],
        [],
        [torch.zeros(())],
        fused=True,
        amsgrad=False,
        beta1=0.8,
        beta2=0.9,
        lr=0.1,
        weight_decay=0.2,
        eps=1e-6,
        maximize=False,
    )
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-14, atol=1e-14)


def test_layers_that_compiled_run_again_as_written() -> None:
    decoder = Decoder(models.model(layers=1))
    initialize(decoder, seed=0)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    expected = decoder(tokens)
    compile_layers([decoder])
    layer = decoder.layers["0"]
    assert layer._compiled_call_impl is not None
    uncompile_layers([decoder])
    assert layer._compiled_call_impl is None
    assert torch.equal(decoder(tokens), expected)
