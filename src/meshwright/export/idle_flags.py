"""Flags of pretrain_gpt.py, in Megatron-LM and Megatron-DeepSpeed, that change nothing of what is trained, and why."""

from __future__ import annotations

_TEXT = "text and its tokenizer, which no export names"
_MEETING = "where processes meet"
_RECORDS = "what is recorded of a run"
_SAVES = "when and where a state is saved, and taken up again"
_CHECKS = "held-out loss, from which nothing is learned"
_KERNELS = "another kernel for the same products"
_HOST = "what the host does beside the step"

# By pattern; the reason stands beside it.
IDLE_FLAGS = {
    "--node-rank": _MEETING,
    "--master-addr": _MEETING,
    "--master-port": _MEETING,
    "--master_addr": _MEETING,
    "--master_port": _MEETING,
    "--hostfile": _MEETING,
    "--rdzv*": _MEETING,
    "--distributed-timeout-minutes": _MEETING,
    "--distributed-backend": _MEETING,
    "--data-path": _TEXT,
    "--train-data-path": _TEXT,
    "--valid-data-path": _TEXT,
    "--test-data-path": _TEXT,
    "--data-cache-path": _TEXT,
    "--data-impl": _TEXT,
    "--mock-data": _TEXT,
    "--split": _TEXT,
    "--tokenizer-*": _TEXT,
    "--vocab-file": _TEXT,
    "--merge-file": _TEXT,
    "--num-workers": _HOST,
    "--manual-gc*": _HOST,
    "--log-*": _RECORDS,
    "--tensorboard-*": _RECORDS,
    "--wandb-*": _RECORDS,
    "--timing-log-*": _RECORDS,
    "--profile*": _RECORDS,
    "--save": _SAVES,
    "--save-interval": _SAVES,
    "--save-retain-interval": _SAVES,
    "--load": _SAVES,
    "--async-save": _SAVES,
    "--exit-*": _SAVES,
    "--eval-interval": _CHECKS,
    "--eval-iters": _CHECKS,
    "--attention-backend": _KERNELS,
    "--use-flash-attn*": _KERNELS,
    "--transformer-impl": _KERNELS,
    "--no-rope-fusion": _KERNELS,
    "--no-masked-softmax-fusion": _KERNELS,
    "--no-bias-swiglu-fusion": _KERNELS,
    "--no-bias-dropout-fusion": _KERNELS,
    "--cross-entropy-loss-fusion": _KERNELS,
    "--cross-entropy-fusion-impl": _KERNELS,
}
