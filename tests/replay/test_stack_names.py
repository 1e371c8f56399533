"""Stacks that are of no family: by their names, and what sets them apart."""

from __future__ import annotations

import pytest

from meshwright.cost.shard_copies import ShardCopies
from meshwright.cost.stacks import software
from meshwright.replay.express import express
from meshwright.replay.pricing import priced
from meshwright.replay.published import replay
from meshwright.spec.cluster import DeviceKind, Precision
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Sharding
from meshwright.spec.report import LineName
from tests.replay.test_validate import row

PLAIN = {"tp": "1", "pp": "1", "dp": "16", "zero": "3", "flash": "yes", "precision": "bf16", "gpu": "H100"}


@pytest.mark.parametrize(
    ("cells", "name"),
    [
        ({"framework": "Primus (Megatron-LM, FSDP2)"}, "primus-fsdp2"),
        ({"framework": "Primus (Megatron-LM)"}, "primus"),
        ({"framework": "Primus (torchtitan)"}, "torch-2024"),
        ({"framework": "torchtitan (FSDP2)"}, "torch-2024"),
        ({"framework": "Nanotron"}, "nanotron"),
        ({"framework": "GPT-NeoX (DeepSpeed)"}, "gpt-neox"),
        ({"framework": "GPT-NeoX", "flash": "no"}, "gpt-neox-unfused"),
        ({"framework": "Lit-GPT"}, "torch-plain"),
        ({"framework": "LitGPT", "flash": "no"}, "torch-2021"),
        ({"framework": "Nanotron", "flash": "flash-attn 2.5.0"}, "nanotron"),
        ({"framework": "Fast-LLM"}, "fast-llm"),
        ({"framework": "Fast-LLM", "flash": "no"}, "fast-llm-unfused"),
        ({"framework": "DeepSpeed (fused transformer kernels, 2020)", "flash": "no"}, "deepspeed-2020"),
        ({"framework": "DeepSpeed", "flash": "no"}, "torch-2021"),
        ({"framework": "MaxText", "gpu": "TPU-v6e", "extra": "scatters on SparseCore"}, "xla-sparsecore"),
        ({"framework": "NeMo 24.07", "extra": "ub_tp_comm_overlap: false"}, "nemo-whole-exchanges"),
        ({"framework": "Megatron-Core", "extra": "no tp comm overlap"}, "megatron-core"),
        ({"framework": "MaxText", "extra": "scatters on SparseCore"}, "xla-gpu"),
        ({"framework": "Pax (JAX, XLA) + Transformer Engine"}, "xla-gpu-2023"),
        ({"framework": "T5X", "flash": "no"}, "xla-gpu-2023-unfused"),
        ({"framework": "T5X", "gpu": "TPU-v4", "flash": "no"}, "xla-2022"),
    ],
)
def test_a_stack_is_known_by_its_own_name(cells: dict[str, str], name: str) -> None:
    found = express(row(**{**PLAIN, **cells}))
    assert found.design.job.software == name
    assert not any("no model of it is known" in told for told in found.assumed)


def test_primus_has_the_kernels_of_megatron_core_and_sums_gradients_apart() -> None:
    core, plain, sharded = map(software, ("megatron-core", "primus", "primus-fsdp2"))
    assert core.fused_accumulation
    assert not plain.fused_accumulation
    assert (plain.eager, plain.shard_copies) == (False, ShardCopies.NONE)
    assert (sharded.eager, sharded.shard_copies) == (False, ShardCopies.UNITS)


def test_xla_of_2023_hides_no_gather_and_no_scatter_on_gpus() -> None:
    cells = {**PLAIN, "zero": "3", "dp": "32", "n_gpus": "32", "gpus_per_node": "8", "gbs": "64", "framework": ""}
    found = (express(row(**{**cells, "framework": name})) for name in ("MaxText", "Pax"))
    hidden, told = (priced(each).report for each in found)
    sent = (LineName.PARAMETERS, LineName.GRADIENTS)
    assert told.share(*sent) > 2.0 * hidden.share(*sent)
    assert told.step_seconds > hidden.step_seconds


def test_nanotron_is_slower_than_fused_megatron_and_fast_llm_quicker_than_torch() -> None:
    ddp = {**PLAIN, "zero": "1", "arch": "llama", "ffn": "5632", "framework": ""}
    seconds = {}
    for name in ("Nanotron", "Colossal-AI", "Fast-LLM", "Accelerate"):
        point = replay(row(**{**ddp, "framework": name})).point
        assert point is not None
        seconds[name] = point.predicted_seconds
    assert seconds["Nanotron"] > seconds["Colossal-AI"]
    assert seconds["Fast-LLM"] < seconds["Accelerate"]


def test_deepspeeds_bert_gathers_the_tokens_to_be_guessed() -> None:
    def head(framework: str) -> float:
        model: ModelSpec = express(row(**{**PLAIN, "arch": "bert", "flash": "no", "framework": framework})).design.model
        return model.head.tokens

    assert head("DeepSpeed (fused transformer kernels, 2020)") == 0.15
    assert head("DeepSpeed") == 1.0


@pytest.mark.parametrize(
    ("extra", "precision"),
    [
        ("grad_reduce_in_fp32=true", Precision.FP32),
        ("grad_reduce_in_bf16=False", Precision.FP32),
        ("grad_reduce_in_fp32=false", Precision.BF16),
        ("", Precision.BF16),
    ],
)
def test_what_gradients_add_up_in_is_read(extra: str, precision: Precision) -> None:
    found = express(row(framework="NeMo/Megatron-Bridge 26.04", **{**PLAIN, "extra": extra}))
    assert found.design.plan.gradients.precision is precision


@pytest.mark.parametrize(
    ("framework", "zero", "sharding", "assumed"),
    [
        ("PyTorch FSDP", "", Sharding.PARAMETERS, "zero 3, as zero is blank and the framework is called PyTorch FSDP"),
        ("PyTorch HSDP", "", Sharding.PARAMETERS, "zero hsdp, as zero is blank"),
        ("DeepSpeed ZeRO-2", "", Sharding.GRADIENTS, "zero 2, as zero is blank"),
        ("PyTorch FSDP", "0", Sharding.NONE, ""),
        ("PyTorch FSDP", "1", Sharding.OPTIMIZER, ""),
        ("PyTorch DDP", "", Sharding.NONE, ""),
    ],
)
def test_what_a_framework_is_called_says_what_is_sharded_where_zero_is_blank(
    framework: str, zero: str, sharding: Sharding, assumed: str
) -> None:
    found = express(row(**{**PLAIN, "framework": framework, "zero": zero}))
    assert found.design.plan.first_group.sharding is sharding
    told = [each for each in found.assumed if "zero is blank" in each]
    assert all(assumed in each for each in told)
    assert len(told) == bool(assumed)


def test_heads_narrower_than_a_tpus_lanes_take_as_long_as_whole_ones() -> None:
    """Twice as many heads of 64 features as of 128: as many FLOPs, and twice the seconds of scores; not so on H100."""
    seconds = {}
    for gpu in ("TPU-v6e", "H100-80GB-SXM"):
        for heads, width in (("16", "128"), ("32", "64")):
            cells = {**PLAIN, "gpu": gpu, "framework": "MaxText", "heads": heads, "kv_heads": heads, "head_dim": width}
            report = priced(express(row(**{**cells, "hidden": "2048"}))).report
            forward = report.step.find(LineName.FORWARD)
            assert forward is not None
            attention = forward.find("attention")
            assert attention is not None
            seconds[gpu, width] = attention.seconds
    assert seconds["TPU-v6e", "64"] > 1.2 * seconds["TPU-v6e", "128"]
    assert (
        seconds["TPU-v6e", "64"] / seconds["TPU-v6e", "128"]
        > seconds["H100-80GB-SXM", "64"] / seconds["H100-80GB-SXM", "128"]
    )


@pytest.mark.parametrize("framework", ["fairseq", "PyTorch DDP"])
def test_eager_pytorch_of_before_2022_has_the_host_time_of_megatrons_layers(framework: str) -> None:
    cells = {**PLAIN, "framework": framework, "flash": "no", "gpu": "V100-32GB-SXM2", "precision": "fp16", "zero": "0"}
    name = express(row(**cells)).design.job.software
    assert name == "torch-2021"
    assert software(name).host_seconds(DeviceKind.CUDA, mixed=False) == 1e-3
    assert software("torch-plain").host_seconds(DeviceKind.CUDA, mixed=False) == 0.0
