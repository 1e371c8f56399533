"""What rows say of kernels and of precision without masters, and what stacks took by their date."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cost import predict
from meshwright.replay import published
from meshwright.replay.express import express
from meshwright.replay.runs import Run
from meshwright.spec.cluster import Precision
from meshwright.spec.job import Switch
from meshwright.spec.optimizer import Master, Moments, OptimizerSpec
from meshwright.spec.report import MemoryPart
from tests.replay.test_validate import row

HOPPER = {"gpu": "H100-80GB-SXM", "framework": "Megatron-Core", "flash": "yes", "precision": "bf16"}
ALONE = {"tp": "1", "pp": "1", "dp": "16", "flash": "yes", "precision": "bf16", "mbs": "1", "gbs": "16", "sp": ""}
TITAN = {**ALONE, "framework": "torchtitan", "gpu": "H100", "zero": "3"}


def software_of(found: Run) -> str:
    return express(found).design.job.software


@pytest.mark.parametrize(
    ("cells", "software"),
    [
        *(({"flash": text}, "megatron-core-flash-2") for text in ("FA2", "FlashAttention-2", "flash attention 2.5.8")),
        *(({"flash": text}, "megatron-core-flash-1") for text in ("FA1", "flash-attn 1.0.5", "FlashAttention v1")),
        *(({"flash": text}, "megatron-core") for text in ("cuDNN", "FA3", "TE fused", "yes")),
        ({"extra": "flash_attention_2"}, "megatron-core-flash-2"),
        ({"extra": "without FlashAttention-2"}, "megatron-core"),
        ({"flash": "FA2", "extra": "recompute_modules=mlp"}, "megatron-core-flash-2:mlp"),
        ({"flash": "FA2", "framework": "Megatron-LM v3", "gpu": "A100"}, "megatron-flash"),
        ({"flash": "no", "extra": "FA2 off", "framework": "Megatron-LM v3", "gpu": "A100"}, "megatron-2022"),
        ({"flash": "cuDNN", **TITAN}, "torch-2024"),
    ],
)
def test_the_generation_of_attention_is_read_where_it_is_named(cells: dict[str, str], software: str) -> None:
    assert software_of(row(**{**HOPPER, **cells})) == software


@pytest.mark.parametrize("framework", ["Megatron-Core 0.4", "NeMo 23.09", "MLPerf v3.1 NeMo", "Megatron-LM (2023)"])
def test_stacks_before_cudnn_attended_with_flash_attention_2(framework: str) -> None:
    old, new = express(row(**{**HOPPER, "framework": framework})), express(row(**HOPPER))
    assert old.design.job.software.endswith("-flash-2")
    assert "FlashAttention-2, as Transformer Engine took it until the end of 2023" in old.assumed
    assert not any("FlashAttention-2" in each for each in new.assumed)
    later = {"Megatron-Core 0.4": "Megatron-Core 0.14", "NeMo 23.09": "NeMo 24.09", "MLPerf v3.1 NeMo": "MLPerf v4.0"}
    assert "flash" not in software_of(row(**{**HOPPER, "framework": later.get(framework, "Megatron-LM (2024)")}))


@pytest.mark.parametrize(
    ("cells", "software"),
    [
        ({"framework": "HF Trainer", "extra": "Liger kernels"}, "torch-plain-liger"),
        ({"framework": "HF Trainer", "extra": "fused linear cross entropy"}, "torch-plain-linear-loss"),
        ({"framework": "HF Trainer", "extra": "chunked cross-entropy"}, "torch-plain-chunked"),
        ({"framework": "HF Trainer", "notes": "fused cross-entropy"}, "torch-plain-loss-kernel"),
        ({"framework": "HF Trainer", "extra": "no Liger"}, "torch-plain"),
        ({"framework": "torchtune", "extra": "chunked CE", "compile": "yes"}, "torch-2024-fused-loss-narrow-step"),
        ({"framework": "Primus", "gpu": "MI300X", "extra": "fused linear cross entropy"}, "primus-linear-loss"),
        ({"framework": "Primus", "gpu": "MI300X", "extra": "fused cross-entropy"}, "primus"),
        ({"framework": "LLMQ"}, "llm.c-chunked-narrow-step"),
        ({"framework": "llm.c"}, "llm.c"),
    ],
)
def test_a_loss_that_is_named_is_what_works_it_out(cells: dict[str, str], software: str) -> None:
    assert software_of(row(**{**ALONE, **cells})) == software


def test_the_loss_of_plain_pytorch_holds_wide_logits_that_this_runtime_does_not() -> None:
    entry = express(row(**{**ALONE, "framework": "HF Trainer"})).design
    held, step = {}, {}
    for name in ("torch", "torch-plain"):
        report = predict(replace(entry, job=replace(entry.job, software=name)))
        held[name], step[name] = report.memory[0].parts[MemoryPart.LOGITS], report.step_seconds
    assert held["torch-plain"] > 1.5 * held["torch"]
    assert step["torch-plain"] > step["torch"]


@pytest.mark.parametrize(
    ("cells", "software"),
    [
        ({"compile": "yes"}, "torch-2024-compiled"),
        ({"compile": "yes", "source_ref": "benchmarks/llama3_h100_202412_torchtitan.md"}, "torch-2024-compiled"),
        ({"compile": "yes", "source_ref": "llama3_h200_202506.md"}, "torch-2024-compiled-fused-loss"),
        ({"compile": "yes", "gpu": "B200"}, "torch-2025-compiled-fused-loss"),
        ({"compile": "no", "gpu": "B200"}, "torch-2025"),
        ({"compile": "no", "extra": "chunked loss"}, "torch-2024-chunked"),
        ({"compile": "yes", "framework": "torchtitan 2026-05"}, "torch-2024-compiled-fused-loss-chunked"),
        ({"compile": "yes", "gpu": "B200", "precision": "nvfp4"}, "torch-2025-compiled-fused-loss-chunked"),
    ],
)
def test_torchtitan_has_the_loss_of_its_time(cells: dict[str, str], software: str) -> None:
    assert software_of(row(**{**TITAN, **cells})) == software


@pytest.mark.parametrize(
    ("cells", "narrow"),
    [
        ({"framework": "Lightning", "precision": "bf16-true"}, True),
        ({"framework": "Lightning", "precision": "bf16-mixed"}, False),
        ({"framework": "HF Trainer", "extra": "pure_bf16"}, True),
        ({"framework": "HF Trainer", "notes": "whole model in bf16"}, True),
        ({"framework": "torchtune"}, True),
        ({"framework": "torchtune", "precision": "fp32"}, False),
        ({"framework": "torchtitan"}, False),
    ],
)
def test_a_model_wholly_in_bf16_has_no_masters(cells: dict[str, str], narrow: bool) -> None:
    found = express(row(**{**ALONE, **cells}))
    optimizer, plan = found.design.job.optimizer, found.design.plan
    assert isinstance(optimizer, OptimizerSpec)
    kept = (Moments.BF16, Master.BF16_STOCHASTIC) if narrow else (Moments.FP32, Master.FP32)
    assert (optimizer.state, optimizer.master) == kept
    assert plan.gradients.precision is (Precision.BF16 if narrow else Precision.FP32)
    assert found.design.job.software.endswith("-narrow-step") == narrow


def test_compiled_element_wise_work_is_quicker_in_every_eager_stack() -> None:
    for framework in ("torchtune", "PyTorch FSDP", "Lightning"):
        cells = {**ALONE, "framework": framework, "gpu": "H100"}
        off, on = (row(**cells, compile=said) for said in ("no", "yes"))
        assert [express(each).design.job.compile for each in (off, on)] == [Switch.OFF, Switch.ON]
        slow, quick = (published.replay(each).point for each in (off, on))
        assert slow is not None
        assert quick is not None
        assert quick.predicted_seconds < 0.97 * slow.predicted_seconds


TPU = {"framework": "MaxText", "gpu": "TPU v5p", "flash": "yes", "sp": "", "pp": "1", "dp": "8"}


def test_int8_is_multiplied_at_the_peak_of_int8() -> None:
    found = express(row(**TPU, precision="int8"))
    device = found.design.cluster.groups[0].device
    assert device.peak_flops[Precision.FP8_ROW] == 2.0 * device.peak_flops[Precision.BF16]
    assert "int8 taken as fp8-row at the device's peak of int8" in found.assumed
    assert (
        "no peak of int8 is known for TPU-v4"
        in published.replay(row(**{**TPU, "gpu": "TPU v4"}, precision="int8")).reason
    )


@pytest.mark.parametrize(
    ("policy", "software"),
    [
        ("save_dot_except_logits", "xla"),
        ("save_dot_except_mlpwi", "xla-keeps-attention"),
        ("save_dot_except_logits_ffn1", "xla-keeps-attention"),
        ("minimal_with_context", "xla"),
    ],
)
def test_policies_of_maxtext_keep_what_products_give(policy: str, software: str) -> None:
    design = express(row(**{**TPU, "recompute": policy}, precision="bf16")).design
    assert (design.job.software, design.plan.first_group.recompute) == (software, "selective")


@pytest.mark.parametrize(
    ("cells", "tokens"),
    [
        ({"framework": "TensorFlow XLA (Horovod)"}, 0.15),
        ({"framework": "PyTorch DDP (apex)"}, 0.15),
        ({"framework": "Megatron-LM v2"}, 1.0),
        ({"framework": "Megatron-LM v2", "extra": "max_predictions=512"}, 0.25),
        ({"framework": "TensorFlow", "model": "electra-base"}, 1.0),
        ({"framework": "TensorFlow", "arch": "vit"}, 1.0),
    ],
)
def test_a_masked_model_guesses_few_of_its_tokens(cells: dict[str, str], tokens: float) -> None:
    found = express(row(**{"arch": "bert", "tp": "1", "pp": "1", "dp": "16", "mbs": "1", "sp": "", **cells}))
    assert found.design.model.head.tokens == tokens
    assert any("those to be guessed" in each for each in found.assumed) == (tokens == 0.15)


def test_tensorflow_drops_out_and_need_not_be_compiled() -> None:
    cells = {"arch": "bert", "tp": "1", "pp": "1", "dp": "16", "flash": "", "sp": ""}
    names = [software_of(row(**cells, framework=f"TensorFlow{more}")) for more in (" XLA", "")]
    assert names == ["tensorflow-2020-xla", "tensorflow-2020"]
    assert software_of(row(**{**cells, "gpu": "TPU-v3"}, framework="TensorFlow")) == "xla-2022"
