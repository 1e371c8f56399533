"""Readers follow the peers' rules on files that people wrote: defaults, arithmetic, and what the peers refuse."""

from __future__ import annotations

import pytest

from meshwright.export import Peer, read
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError
from meshwright.spec.plan import Recompute, ScheduleKind, Sharding

MEGATRON = """
torchrun --nproc-per-node=8 --nnodes=16 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \\
  --vocab-size 50257 --seq-length 2048 --max-position-embeddings 2048 --lr 1e-4 --train-iters 100 \\
  --tensor-model-parallel-size 4 --micro-batch-size 2 --global-batch-size 512
"""
TITAN = """
# torchrun --nnodes 16 --nproc_per_node 8 -m torchtitan.train
[model]
name = "llama3"
flavor = "405B"
[training]
local_batch_size = 2
[activation_checkpoint]
mode = "full"
[parallelism]
tensor_parallel_degree = 8
"""
CONFIG = '{"train_batch_size": 64, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}'
DEEPSPEED = f"""
cat > ds_config.json <<'JSON'
{CONFIG}
JSON
deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py --deepspeed --deepspeed_config ds_config.json --zero-stage 2 \\
  --no-pipeline-parallel --micro-batch-size 2 \\
  --global-batch-size 64 --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --vocab-size 50257 \\
  --seq-length 1024 --max-position-embeddings 1024 --lr 1e-4 --train-iters 100
"""


def test_megatron_counts_what_is_left_as_data_ranks() -> None:
    found = read(MEGATRON, to="megatron-lm")
    assert (found.devices, found.tensor, found.replicate, found.shard) == (128, 4, 32, 1)
    assert (found.microbatches, found.batch, found.sharding) == (8, 512, Sharding.NONE)
    assert (found.model.feed_forward, found.model.head_dim, found.model.vocab) == (16384, 128, 50688)
    assert found.precision is Precision.FP32
    assert not found.sequence_parallel


def test_megatron_distributed_optimizer_spans_data_ranks() -> None:
    found = read(MEGATRON.rstrip() + " --use-distributed-optimizer --bf16", to="megatron-lm")
    assert (found.replicate, found.shard, found.sharding) == (1, 32, Sharding.OPTIMIZER)
    assert (found.precision, found.gradients) == (Precision.BF16, Precision.FP32)


@pytest.mark.parametrize(
    ("flags", "stages"),
    [
        ("", ((0, 0, 9), (1, 9, 17), (2, 17, 25), (3, 25, 34))),
        ("--decoder-first-pipeline-num-layers 5", ((0, 0, 6), (1, 6, 15), (2, 15, 24), (3, 24, 34))),
        ("--pipeline-model-parallel-layout Et*6|(t*10|)*2t*6L", ((0, 0, 7), (1, 7, 17), (2, 17, 27), (3, 27, 34))),
        ("--num-layers-per-virtual-pipeline-stage 4", None),
    ],
)
def test_megatron_stages(flags: str, stages: tuple[tuple[int, int, int], ...] | None) -> None:
    quoted = " ".join(f"'{word}'" for word in flags.split())
    text = MEGATRON.replace("--tensor-model", f"{quoted} --pipeline-model-parallel-size 4 --tensor-model")
    found = read(text, to="megatron-lm")
    if stages is None:
        assert (found.chunks, found.schedule) == (2, ScheduleKind.INTERLEAVED)
        assert [stop - start for _, start, stop in found.stages] == [5, 4, 4, 4, 4, 4, 4, 5]
    else:
        assert found.stages == stages


def test_torchtitan_takes_the_ranks_left_to_shard_over() -> None:
    found = read(TITAN, to="torchtitan")
    assert (found.shard, found.replicate, found.tensor, found.sharding) == (16, 1, 8, Sharding.PARAMETERS)
    assert (found.microbatch, found.microbatches, found.batch, found.sequence_length) == (2, 1, 32, 2048)
    assert found.model.feed_forward == 53248
    assert set(found.recompute) == {Recompute.FULL}


def test_torchtitan_splits_a_pipeline_itself() -> None:
    text = TITAN.replace("tensor_parallel_degree = 8", "pipeline_parallel_degree = 8")
    found = read(text, to="torchtitan")
    assert [stop - start for _, start, stop in found.stages] == [16] * 8
    assert (found.sharding, found.schedule) == (Sharding.OPTIMIZER, ScheduleKind.ONE_F_ONE_B)
    looped = read(text + 'pipeline_parallel_schedule = "Interleaved1F1B"\n', to="torchtitan")
    assert (looped.chunks, looped.schedule) == (2, ScheduleKind.INTERLEAVED)


def test_deepspeed_finds_the_third_size_of_a_batch() -> None:
    found = read(DEEPSPEED, to="deepspeed")
    assert (found.microbatch, found.microbatches, found.batch) == (2, 2, 64)
    assert (found.shard, found.replicate, found.sharding) == (16, 1, Sharding.GRADIENTS)
    assert found.model.positions == 1024


@pytest.mark.parametrize(
    ("peer", "text", "what"),
    [
        (Peer.MEGATRON_LM, "echo nothing", "0 commands begin with torchrun"),
        (Peer.MEGATRON_LM, MEGATRON.replace("size 4", "size 5"), "not divisible by 5"),
        (Peer.MEGATRON_LM, MEGATRON.replace("size 512", "size 500"), "not whole microbatches"),
        (Peer.MEGATRON_LM, MEGATRON.replace("size 512", "size many"), "many is not a whole number"),
        (Peer.MEGATRON_LM, MEGATRON.replace("--lr 1e-4", "--lr fast"), "--lr fast is not a number"),
        (Peer.MEGATRON_LM, MEGATRON.replace("--lr 1e-4", "--lr 1e-4 --lr 1"), "--lr is given twice"),
        (Peer.MEGATRON_LM, MEGATRON.replace("--lr 1e-4", "--lr 1e-4 --use-torch-fsdp2"), "is not read here"),
        (Peer.MEGATRON_LM, MEGATRON.replace("--num-layers 32", ""), "--num-layers is not given"),
        (Peer.MEGATRON_LM, MEGATRON.replace("--num-layers 32", "--num-layers 0"), "0 is not a size"),
        (Peer.MEGATRON_LM, MEGATRON.replace("--lr 1e-4", "--lr '1e-4"), "cannot be read as a shell command"),
        (Peer.TORCHTITAN, "[model", "cannot be read as TOML"),
        (Peer.TORCHTITAN, TITAN.replace("# torchrun", "#"), "takes the ranks left"),
        (Peer.TORCHTITAN, TITAN + "data_parallel_shard_degree = 8\n", "WORLD_SIZE is 128"),
        (Peer.TORCHTITAN, TITAN.replace("405B", "9B"), "flavor 9B of llama3 is not known"),
        (Peer.TORCHTITAN, TITAN.replace('"full"', '"selective"'), "selective is no recompute"),
        (Peer.TORCHTITAN, TITAN.replace("= 8", "= 0"), "0 is not a size"),
        (Peer.TORCHTITAN, TITAN.replace("= 2", "= 2\nglobal_batch_size = 33"), "must be a multiple"),
        (Peer.TORCHTITAN, TITAN.replace("[training]", "[training]\nenable_cpu_offload = true"), "enable_cpu_offload"),
        (Peer.DEEPSPEED, "deepspeed --num_gpus 8 pretrain_gpt.py", "there is no"),
        (Peer.DEEPSPEED, DEEPSPEED.replace(CONFIG, "{"), "not JSON"),
        (Peer.DEEPSPEED, DEEPSPEED.replace('"stage": 2', '"stage": 3'), "is not --zero-stage 2"),
        (Peer.DEEPSPEED, DEEPSPEED.replace(": 64", ": 63"), "63 is not micro_batch"),
        (Peer.DEEPSPEED, DEEPSPEED.replace("--no-pipeline-parallel", ""), "incompatible with pipeline"),
        (Peer.DEEPSPEED, DEEPSPEED.replace("--lr", "--bf16 --lr"), "are not those of the flags"),
    ],
)
def test_what_a_peer_would_refuse_is_refused_in_words(peer: Peer, text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as error:
        read(text, to=peer, where="launch.sh")
    assert all(problem.where == "launch.sh" for problem in error.value.problems)


def test_a_trainer_that_is_not_known() -> None:
    with pytest.raises(ConfigError, match="did you mean megatron-lm"):
        read("", to="megatrom")
