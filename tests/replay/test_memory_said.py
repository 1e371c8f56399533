"""What a row, or the stack that it names, says of what is kept: modules, policies, hosts' memory and narrow state."""

from __future__ import annotations

from meshwright.replay.express import express
from meshwright.spec.cluster import Precision
from meshwright.spec.optimizer import Master, Moments
from meshwright.spec.plan import Offload, Recompute, Sharding
from tests.replay.test_unsaid import DENSE, row


def test_modules_that_are_computed_again_are_told_to_the_software():
    said = {"framework": "Megatron-Core (NeMo/Megatron-Bridge)", "recompute": "selective", "vpp": "1", "mbs": "1"}
    design = express(row(**said, extra="recompute_modules=layernorm+moe_act; moe_a2a_overlap")).design
    assert design.job.software == "megatron-bridge-overlap:layernorm+moe_act"
    assert design.plan.first_group.recompute is Recompute.SELECTIVE
    full = express(row(**{**said, "recompute": "full"}, extra="recompute_modules=layernorm")).design
    assert full.job.software == "megatron-bridge"
    assert full.plan.first_group.recompute is Recompute.FULL


MAXTEXT = {**DENSE, "framework": "MaxText", "tp": "1", "pp": "1", "dp": "128", "gbs": "256", "zero": "3"}


def test_policies_of_maxtext_say_what_xla_keeps():
    some = {"recompute": "save_dot_with_context_except_mlp"}
    assert express(row(**MAXTEXT, **some)).design.job.software == "xla-gpu-keeps-attention"
    assert express(row(**MAXTEXT, recompute="minimal")).design.job.software == "xla-gpu"


def test_ranks_of_a_shard_that_the_extra_column_names():
    plan = express(row(**{**MAXTEXT, "zero": ""}, extra="FSDP=32")).design.plan
    assert plan.first_group.sharding is Sharding.PARAMETERS
    assert (plan.shard, plan.replicate) == (32, 4)
    assert express(row(**MAXTEXT, extra="FSDP=64")).design.plan.shard == 64
    assert express(row(**MAXTEXT, extra="dcn_fsdp=2")).design.plan.shard == 128


def test_megatron_with_zero_3_keeps_what_enters_layers_in_the_hosts_memory():
    said = {**DENSE, "gpu": "V100-32GB-SXM2", "tp": "1", "pp": "1", "dp": "128", "zero": "3", "offload": "no"}
    said |= {"framework": "Megatron-DeepSpeed v1.1.5 ZeRO-3", "precision": "fp16", "flash": "no", "recompute": "full"}
    found = express(row(**said))
    assert found.design.plan.first_group.offload is Offload.ACTIVATIONS
    assert any("as in the stack's own scripts" in told for told in found.assumed)
    plain = express(row(**{**said, "framework": "Hugging Face + DeepSpeed ZeRO-3"})).design
    assert plain.plan.first_group.offload is Offload.NONE


def test_automodel_trains_in_bf16_alone():
    found = express(row(**{**DENSE, "framework": "NeMo AutoModel (PyTorch FSDP2)", "pp": "1", "dp": "64", "zero": "3"}))
    optimizer = found.design.job.optimizer
    assert (optimizer.state, optimizer.master) == (Moments.BF16, Master.BF16_STOCHASTIC)
    assert express(row(**DENSE)).design.job.optimizer.master is Master.FP32


PIPES = {**DENSE, "precision": "fp16", "flash": "no", "gpu": "V100-32GB-SXM2", "recompute": ""}


def test_pipelines_of_deepspeed_are_stacks_of_their_own():
    def found(framework, **said):
        return express(row(**{**PIPES, "framework": framework}, **said)).design

    assert found("Megatron-DeepSpeed").job.software == "megatron-deepspeed"
    assert found("DeepSpeed 3D").job.software == "deepspeed-3d"
    assert found("DeepSpeed 3D").plan.gradients.precision is Precision.FP16


def test_amp_runs_them_without_recompute_and_reduces_gradients_in_fp32():
    """examples/ds_pretrain_gpt2_pipe.sh and ds_config.json of DachengLi1/AMP."""
    design = express(row(**{**PIPES, "framework": "DeepSpeed 3D (modified)"})).design
    assert design.plan.first_group.recompute is Recompute.NONE
    assert design.plan.gradients.precision is Precision.FP32
