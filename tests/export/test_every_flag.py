"""Every flag that is written is compared: changed or missing it is told, and so are flags that are added."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest

from meshwright.export import Peer, Verdict, check, export
from meshwright.export.idle_flags import IDLE_FLAGS
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError
from meshwright.spec.exchange import Exchange, ExchangeKind
from meshwright.spec.job import CheckpointSpec, Decay
from meshwright.spec.plan import Design, ExpertGrid, Offload, Recompute, ScheduleKind, Sharding
from tests.export.plans import design

MEGATRON, TITAN, DEEPSPEED = Peer.MEGATRON_LM, Peer.TORCHTITAN, Peer.DEEPSPEED
ZERO3 = {"sharding": Sharding.PARAMETERS}
PIPE: dict[str, Any] = {"pipeline": 2, "shard": 4}
CHOICES: list[tuple[Peer, dict[str, Any]]] = [
    (MEGATRON, {"tensor": 2, **PIPE, "shard": 2, "recompute": Recompute.FULL, "decay": Decay.WSD}),
    (MEGATRON, {**PIPE, "bounds": (0, 20, 34), "precision": Precision.FP8}),
    (MEGATRON, {**PIPE, "kind": ScheduleKind.INTERLEAVED, "chunks": 4, "bounds": (0, 5, 9, 13, 17, 21, 25, 29, 34)}),
    (MEGATRON, {**ZERO3, "replicate": 2, "shard": 4, "gradients": Precision.BF16}),
    (MEGATRON, {"model": "gpt-39b", "offload": Offload.OPTIMIZER, "precision": Precision.FP16}),
    (MEGATRON, {"model": "deepseek-v3", "experts": ExpertGrid(expert=8)}),
    (MEGATRON, {"model": "qwen3-30b-a3b", "precision": Precision.NVFP4}),
    (MEGATRON, {"context": 4, "shard": 2, "exchange": Exchange(inner=2), "recompute": Recompute.SELECTIVE}),
    (TITAN, {**ZERO3, "tensor": 2, "shard": 4, "decay": Decay.WSD, "precision": Precision.FP8}),
    (TITAN, {**PIPE, "kind": ScheduleKind.DUAL_PIPE_V, "chunks": 2, "recompute": Recompute.FULL}),
    (TITAN, {**ZERO3, "model": "qwen3-30b-a3b", "tensor": 2, "shard": 4, "experts": ExpertGrid(expert=8, tensor=1)}),
    (TITAN, {**ZERO3, "context": 2, "shard": 4, "exchange": Exchange(kind=ExchangeKind.GATHER)}),
    (DEEPSPEED, {**ZERO3, "offload": Offload.OPTIMIZER}),
    (DEEPSPEED, {"tensor": 2, **PIPE, "shard": 2, "bounds": (0, 17, 34), "recompute": Recompute.FULL}),
    (DEEPSPEED, {"recompute": Recompute.FULL, "offload": Offload.ACTIVATIONS, "precision": Precision.FP16}),
    (DEEPSPEED, {"model": "mixtral-8x7b", "tensor": 2, "shard": 4, "experts": ExpertGrid(expert=4, tensor=2)}),
    (DEEPSPEED, {"model": "gpt-39b", "context": 4, "shard": 2, "exchange": Exchange(inner=4)}),
]  # fmt: skip
# What changes nothing that is trained, and why; of flags of pretrain_gpt.py those of the reader stand beside it.
IDLE = {
    "checkpoint.*": "when a state is saved",
    **IDLE_FLAGS,
}
# Read, and of no effect in some plans.
SAME = {
    "--max-position-embeddings": "rotary positions have no table, so that more of them change nothing",
    "--make-vocab-size-divisible-by": "a vocabulary of whole multiples is not padded",
    "--no-pipeline-parallel": "a pipeline of one stage is none; refused where ZeRO has no pipeline",
    "--ffn-hidden-size": "no layer is dense; and its default may be what is written",
    "--use-distributed-optimizer": "Megatron-FSDP shares states without it",
}
FLAG = re.compile(r"(--[\w-]+)(?: ([^\n]*?))?(?= \\\n| \"\$@\")")
KEY = re.compile(r"^(\w+) = (.*(?:\n    .*)*(?:\n\])?)$", re.MULTILINE)
DERIVED = ""  # a default that comes of others
# Of those written, what a trainer takes where nothing is said: leaving it out says the same.
DEFAULTS = {
    "--tensor-model-parallel-size": "1", "--pipeline-model-parallel-size": "1", "--context-parallel-size": "1",
    "--ds-sequence-parallel-size": "1", "--expert-model-parallel-size": "1", "--expert-tensor-parallel-size": DERIVED,
    "--data-parallel-sharding-strategy": "optim_grads_params", "--fp4-recipe": "nvfp4", "--zero-stage": "1",
    "--adam-beta1": "0.9", "--adam-eps": "1e-08", "--clip-grad": "1.0", "--optimizer": "adam",
    "--norm-epsilon": "1e-05", "--layernorm-epsilon": "1e-05", "--position-embedding-type": "learned_absolute",
    "--rope-scaling-factor": "8.0", "--rotary-base": "10000", "--mscale": "1.0", "--recompute-num-layers": "1",
    "--qk-head-dim": "128", "--qk-pos-emb-head-dim": "64", "--v-head-dim": "128", "--kv-channels": DERIVED,
    "--num-key-value-heads": DERIVED, "--moe-ffn-hidden-size": DERIVED, "--normalization": DERIVED,
    "--init-method-std": "0.02", "--moe-router-bias-update-rate": "0.001", "--moe-router-load-balancing-type": "none",
    "model.name": '"llama3"', "model.converters": "[]", "optimizer.name": '"AdamW"', "optimizer.beta1": "0.9",
    "optimizer.beta2": "0.95", "optimizer.eps": "1e-08", "optimizer.weight_decay": "0.1", "training.max_norm": "1.0",
    "lr_scheduler.decay_type": '"linear"', "training.seq_len": "2048", "training.local_batch_size": "8",
    "training.global_batch_size": DERIVED, "training.mixed_precision_param": '"bfloat16"',
    "training.mixed_precision_reduce": '"float32"', "parallelism.data_parallel_replicate_degree": "1",
    "parallelism.data_parallel_shard_degree": DERIVED, "parallelism.tensor_parallel_degree": "1",
    "parallelism.context_parallel_degree": "1", "parallelism.pipeline_parallel_degree": "1",
    "parallelism.expert_tensor_parallel_degree": "1", "parallelism.fsdp_reshard_after_forward": DERIVED,
    "parallelism.pipeline_parallel_microbatch_size": "1",
}  # fmt: skip


def made(choices: dict[str, Any]) -> Design:
    found = design(**choices)
    return replace(found, job=replace(found.job, checkpoint=CheckpointSpec(every_steps=50)))


def told(entry: Design, text: str, peer: Peer) -> bool:
    """Whether the check says that `text` is not the plan, or refuses to read it."""
    try:
        lines = check(entry, text, to=peer)
    except ConfigError:
        return True
    return any(line.verdict is Verdict.DIFFERS for line in lines)


def other(value: str) -> str:
    """Another value of the same sort."""
    if value in ("true", "false"):
        return "false" if value == "true" else "true"
    try:
        return str(int(value) + 1)
    except ValueError:
        pass
    try:
        return str(float(value) * 2 + 0.25)
    except ValueError:
        if value[:1] == "[":
            return '["other"]' if value == "[]" else "[]"
        return '"other"' if value[:1] == '"' else "other"


def written(text: str, peer: Peer) -> Iterator[tuple[str, str, str, str, str]]:
    """Of every setting its name, its value, the text around it, that text without it and with another value."""
    if peer is TITAN:
        section = ""
        for part in re.split(r"(?m)^(?=\[)", text):
            section = part[1 : part.find("]")] if part.startswith("[") else section
            for match in KEY.finditer(part):
                changed = part.replace(match.group(0), f"{match.group(1)} = {other(match.group(2))}")
                yield f"{section}.{match.group(1)}", match.group(2), part, part.replace(match.group(0), ""), changed
        return
    body = text[text.rindex("JSON\n") :] if "JSON\n" in text else text
    for match in FLAG.finditer(body):
        name, value = match.group(1), match.group(2) or ""
        changed = body.replace(match.group(0), f"{name} {other(value.split()[0])}" if value else f"{name}-not")
        yield name, value, body, body.replace(match.group(0), ""), changed
    if "JSON\n" in text:
        config = re.search(r"\{.*\n\}", text, re.DOTALL)
        assert config is not None
        for match in re.finditer(r'"(\w+)": ([^{\n]+?)(?=,?\n)', config.group(0)):
            before, after = config.group(0)[: match.start()], config.group(0)[match.end() :]
            changed = f'{before}"{match.group(1)}": {other(match.group(2))}{after}'
            yield (
                match.group(1),
                match.group(2),
                config.group(0),
                json.dumps(without(config.group(0), match.start())),
                changed,
            )


def without(config: str, start: int) -> dict[str, Any]:
    """The configuration less the setting that begins at `start`."""
    name = re.match(r'"(\w+)": [^,\n]+', config[start:])
    assert name is not None
    found: dict[str, Any] = json.loads(f'{config[:start]}"left out": 0{config[start + name.end() :]}')
    return found


@pytest.mark.parametrize(("peer", "choices"), CHOICES)
def test_every_flag_that_is_changed_or_missing_is_told(peer: Peer, choices: dict[str, Any]) -> None:
    entry = made(choices)
    text = export(entry, to=peer).text
    assert not told(entry, text, peer)
    unseen, unmissed, count = [], [], 0
    for name, value, part, missing, changed in written(text, peer):
        count += 1
        if name in SAME or any(fnmatchcase(name, pattern) for pattern in IDLE):
            continue
        if not told(entry, text.replace(part, changed), peer):
            unseen.append(name)
        if not told(entry, text.replace(part, missing), peer) and DEFAULTS.get(name) not in (value, DERIVED):
            unmissed.append((name, value))
    assert count > 20
    assert (unseen, unmissed) == ([], [])


ADDED = [
    (MEGATRON, "--rotary-percent 0.5"),
    (MEGATRON, "--hybrid-attention-ratio 0.5"),
    (MEGATRON, "--window-size 1024 0"),
    (MEGATRON, "--lr-decay-iters 10"),
    (MEGATRON, "--start-weight-decay 0.0 --end-weight-decay 0.1 --weight-decay-incr-style linear"),
    (MEGATRON, "--reset-attention-mask"),
    (MEGATRON, "--finetune"),
    (MEGATRON, "--apply-layernorm-1p"),
    (MEGATRON, "--add-qkv-bias"),
    (DEEPSPEED, "--rotary-percent 0.5"),
    (DEEPSPEED, "--universal-checkpoint"),
    (DEEPSPEED, "--embed-layernorm"),
    (TITAN, "training.dtype = 'bfloat16'"),
    (TITAN, "optimizer.implementation = 'foreach'"),
    (TITAN, "checkpoint.initial_load_path = '/weights'"),
    (TITAN, "debug.moe_force_load_balance = true"),
    (TITAN, "experimental.custom_import = 'mine'"),
]


@pytest.mark.parametrize(("peer", "flag"), ADDED)
def test_flags_that_are_added_and_change_what_is_trained_are_told(peer: Peer, flag: str) -> None:
    entry = design(**ZERO3)
    text = export(entry, to=peer).text
    if peer is TITAN:
        section, _, setting = flag.partition(".")
        head = f"[{section}]\n"
        more = text.replace(head, f"{head}{setting}\n") if head in text else f"{text}\n{head}{setting}\n"
    else:
        more = text.replace(' "$@"', f' {flag} "$@"')
    lines = check(entry, more, to=peer)
    name = flag.partition(" ")[0]
    assert name in {line.name for line in lines if line.verdict is Verdict.DIFFERS} or "bias" in name


@pytest.mark.parametrize(
    ("peer", "flag"), [(MEGATRON, "--tokenizer-type GPT2BPETokenizer --data-path x"), (DEEPSPEED, "--log-interval 5")]
)
def test_flags_that_name_text_or_what_is_recorded_are_the_users(peer: Peer, flag: str) -> None:
    entry = design(**ZERO3)
    text = export(entry, to=peer).text.replace(' "$@"', f' {flag} "$@"')
    assert not told(entry, text, peer)


def test_a_number_may_be_written_otherwise() -> None:
    entry = design(**ZERO3)
    text = export(entry, to=MEGATRON).text
    assert not told(entry, text.replace("--norm-epsilon 1e-05", "--norm-epsilon 0.00001"), MEGATRON)


def test_a_plan_that_cannot_be_written_is_held_to_what_it_means() -> None:
    """The ways of a trainer are then anyone's; what it trains is not."""
    text = export(design(**PIPE), to=MEGATRON).text
    entry = design(**PIPE, kind=ScheduleKind.GPIPE)
    lines = {line.name for line in check(entry, text, to=MEGATRON) if line.verdict is Verdict.DIFFERS}
    assert lines == {"schedule"}
    lines = {
        line.name
        for line in check(entry, text.replace(' "$@"', ' --window-size 1 1 "$@"'), to=MEGATRON)
        if line.verdict is Verdict.DIFFERS
    }
    assert lines == {"schedule", "--window-size"}


@pytest.mark.parametrize(
    ("peer", "model", "flag"),
    [
        (MEGATRON, "llama-3.1-8b", "--ffn-hidden-size"),
        (MEGATRON, "gpt-39b", "--max-position-embeddings"),
        (DEEPSPEED, "gpt-39b", "--max-position-embeddings"),
        (MEGATRON, "gpt-39b", "--use-distributed-optimizer"),
    ],
)
def test_flags_of_no_effect_in_some_plans_are_told_in_others(peer: Peer, model: str, flag: str) -> None:
    entry = design(model)
    text = export(entry, to=peer).text
    (changed,) = (changed for name, _, part, _, changed in written(text, peer) if name == flag)
    (part,) = (part for name, _, part, _, _ in written(text, peer) if name == flag)
    assert told(entry, text.replace(part, changed), peer)
