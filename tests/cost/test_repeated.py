"""What selective recompute drops and runs again, by the modules of Megatron-Core and by XLA's policies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cost import PlanTable, evaluate
from meshwright.cost.repeated import MODULES
from meshwright.cost.stacks import SOFTWARE, software
from meshwright.cost.table import PRECISIONS, RECOMPUTES, SHARDINGS
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import DataSpec, JobSpec
from meshwright.spec.model import LatentAttention
from meshwright.spec.optimizer import Master, Moments, OptimizerSpec
from meshwright.spec.plan import Recompute, Sharding
from meshwright.spec.report import LineName, MemoryPart
from tests.cost.cost_examples import even_layout, gpt, llama, selene

LAYERS, TOKENS = 8, 4 * 2048
DENSE = llama(width=1024, hidden=4096, layers=LAYERS, vocab=1024, heads=8)
WIDTHS = {"nope_dim": 128, "rope_dim": 64, "value_dim": 128, "kv_rank": 512, "query_rank": 256}


def of_latents():
    latent = LatentAttention(width=1024, heads=8, norm=DENSE.layers[0].mixer.norm, **WIDTHS)
    layers = tuple(replace(layer, mixer=latent) for layer in DENSE.layers)
    return replace(DENSE, layers=layers)


def costs(model, name, recompute, *, optimizer=OptimizerSpec(), **columns):
    columns = {"microbatch": 4, "precision": PRECISIONS.index(Precision.BF16), **columns}
    columns["recompute"] = RECOMPUTES.index(recompute)
    table = PlanTable.build(columns, layouts=[even_layout(layers=LAYERS, pipeline=1)])
    job = JobSpec(sequence_length=2048, software=name, data=DataSpec(document_mask=False), optimizer=optimizer)
    return evaluate(table, model=model, cluster=selene(nodes=1), job=job)


def kept(model, name, recompute):
    """Bytes of activations of a token and layer, where the loss has most."""
    return float(costs(model, name, recompute).memory[MemoryPart.ACTIVATIONS][0, 0]) / TOKENS / LAYERS


def dropped(model, name):
    return kept(model, name, Recompute.NONE) - kept(model, name, Recompute.SELECTIVE)


def test_up_projections_of_latents_drop_queries_keys_values_and_the_latents_normed():
    """8 heads of 192 features twice and of 128 once, and latents of 512 and 256, two bytes each."""
    assert dropped(of_latents(), "megatron-core:mla_up_proj") == pytest.approx(2 * (8 * (2 * 192 + 128) + 512 + 256))


def test_modules_together_drop_what_each_does():
    assert dropped(DENSE, "megatron-core:mlp") == pytest.approx(2 * 3 * 4096)
    each = [dropped(of_latents(), f"megatron-core:{name}") for name in ("mla_up_proj", "mlp", "mla_up_proj+mlp")]
    assert each[2] == pytest.approx(each[0] + each[1])


def test_norms_inside_the_kernel_of_a_product_are_out_of_reach_of_megatron():
    assert dropped(DENSE, "megatron-core:layernorm") == pytest.approx(0.0)
    assert dropped(of_latents(), "megatron-core:layernorm") == pytest.approx(2 * 1024)


def test_xla_keeps_what_products_give_and_what_enters_a_layer():
    """Of MaxText's 32B layers, not gated: the input, queries, keys, values, both branches but the last product's; a
    layer norm's two numbers, which are told beside them, are two in a thousand."""
    model = gpt(width=1024, layers=LAYERS, heads=8, vocab=1024)
    expected = 2 * (2 * 1024 + 3 * 1024 + 4096)
    assert kept(model, "xla", Recompute.SELECTIVE) == pytest.approx(expected, rel=0.01)


def test_xla_that_keeps_attention_alone_drops_the_feed_forward():
    """Keys and values are of half as many heads."""
    expected = 2 * (2 * 1024 + 2 * 1024 + 2 * 512)
    assert kept(DENSE, "xla-gpu-keeps-attention", Recompute.SELECTIVE) == pytest.approx(expected, rel=0.01)


def test_what_is_dropped_is_run_again_in_time():
    """Both first products of a gated feed-forward under XLA, which stops before the last; all three under Megatron."""
    names = ("xla-gpu", "xla-gpu-keeps-attention", "megatron-core:mlp", "megatron-core:layernorm")
    seconds = {}
    for name in names:
        found = costs(DENSE, name, Recompute.SELECTIVE)
        seconds[name] = float(found.parts[LineName.RECOMPUTE][0])
    assert seconds["megatron-core:layernorm"] == 0.0
    assert seconds["xla-gpu-keeps-attention"] > seconds["xla-gpu"] > 0.0
    assert 1.2 < seconds["megatron-core:mlp"] / seconds["xla-gpu-keeps-attention"] < 1.6


def test_modules_are_those_of_megatron_and_of_megatron_alone():
    for name in (
        "megatron-core:attention",
        "torch:mlp",
        "megatron-core:mlp,moe",
        "xla:mlp",
        "megatron-core:",
        "torch:",
    ):
        with pytest.raises(ConfigError, match="modules"):
            software(name)
    assert software("megatron-core:core_attn").repeats == SOFTWARE["megatron-core"].repeats
    assert set(MODULES) >= {"mla_up_proj", "moe_act", "moe", "shared_experts"}


def test_a_compiled_loss_on_tpus_has_one_array_of_logits():
    """As XLA compiles it for v6e; on other devices the fp32 form is beside the gradient in bf16."""
    model = llama(width=256, hidden=512, layers=LAYERS, vocab=131072, heads=4)
    logits = [costs(model, name, Recompute.FULL).memory[MemoryPart.LOGITS][0, 0] for name in ("xla", "xla-gpu")]
    assert [each / TOKENS / 131072 for each in logits] == pytest.approx([2.0, 6.0])


def test_automodel_steps_bf16_at_once_and_leaves_its_loss_narrow():
    narrow = OptimizerSpec(state=Moments.BF16, master=Master.BF16_STOCHASTIC)
    columns = {"optimizer": narrow, "shard": 8, "sharding": list(SHARDINGS).index(Sharding.PARAMETERS)}
    found, ours = (costs(DENSE, name, Recompute.FULL, **columns) for name in ("automodel", "torch-2024"))
    assert found.memory[MemoryPart.OPTIMIZER][0, 0] == pytest.approx(4.0 * DENSE.parameters / 8)
    assert found.parts[LineName.OPTIMIZER][0] < 0.5 * ours.parts[LineName.OPTIMIZER][0]
    model = llama(width=256, hidden=512, layers=LAYERS, vocab=131072, heads=4)
    logits = [
        costs(model, name, Recompute.FULL).memory[MemoryPart.LOGITS][0, 0] for name in ("automodel", "torch-2024")
    ]
    assert logits[0] == pytest.approx(0.5 * logits[1])
