"""The software of a published run, by words in its `framework` and what the row says of kernels and communication."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from meshwright.replay import words
from meshwright.replay.runs import Run
from meshwright.spec.cluster import DeviceKind, DeviceSpec, Precision

T = TypeVar("T")
EIGHT_BIT = {
    "fp8": Precision.FP8,
    "fp8-cs": Precision.FP8,
    "fp8-ds": Precision.FP8,
    "fp8-sc": Precision.FP8_BLOCK,
    "fp8-blockwise128": Precision.FP8_BLOCK,
}
_RECENT = (
    "megatron-core",
    "mcore",
    "megatron-bridge",
    "nemo/",
    "primus",
    "mlperf",
    "hai-llm",
    "llama 3",
    "moe folding",
)
_2022 = ("megatron-lm v3", "nemo-megatron 22", "zero bubble")
_DUAL, _BOTH = ("hai-llm",), "-deepep-overlap"  # DeepSeek's own, with DeepEP and DualPipe
_TUNED = ("nemo/", "megatron-bridge", "mlperf")  # recipes whose speed their authors publish
_XLA = (
    *("maxtext", "t5x", "pax", "levanter", "easylm", "pathways", "alpa", "jax", "xla", "axlearn", "flax", "gspmd"),
    *("mesh-tensorflow", "mesh tensorflow", "gshard", "tensorflow", "seqio"),
)
_TORCH = {
    "composer": "torch-2023",
    "foundry": "torch-2023",
    "mosaicml": "torch-2023",
    "fsdp1": "torch-2024",
    "torchtitan": "torch-2024",
    "torchtune": "torch-2024",
    "fsdp": "torch",
}
_MEGATRON = (
    *("megatron", "nemo", "internevo", "deepspeed 3d", "gpt-neox", "neox", "colossal", "primus", "nanotron", "mlperf"),
    *("hai-llm", "llama 3", "megascale", "galvatron", "moe folding"),
)
_EAGER = (
    *("trainer", "transformers", "accelerate", "hugging", "lightning", "litgpt", "ddp", "distributeddataparallel"),
    *("fairscale", "fairseq", "metaseq", "axolotl", "olmo", "nanogpt", "deepspeed", "pytorch", "torch", "unsloth"),
)


class Stack:
    """What the software of `run` is; what its source left open is added to `assumed`."""

    def __init__(self, run: Run, device: DeviceSpec, *, assumed: list[str]) -> None:
        self._run = run
        self._device = device
        self._assumed = assumed

    def name(self) -> str:
        """The software of that name in the cost model."""
        if self.has(_XLA) or (self._device.kind is DeviceKind.TPU and not self.has(_MEGATRON)):
            return "xla"
        for name, software in _TORCH.items():
            if self.has((name,)):
                return f"{software}{self._compiled()}" if self.has(("torchtitan",)) else software
        if self.has(_MEGATRON):
            return self._megatron()
        if self.has(_EAGER):
            return self._eager()
        framework = self._run.text("framework") or "software"
        if self._model_parallel():
            self._assume(f"{framework} taken to work as Megatron-LM does: no model of it is known", None)
            return self._megatron()
        self._assume(f"{framework} taken to work as plain PyTorch does: no model of it is known", None)
        return self._eager()

    @property
    def is_recent(self) -> bool:
        """Megatron on Transformer Engine, which alone multiplies in eight bits."""
        said = words.precision(self._run.text("precision"))
        eight_bit = said in EIGHT_BIT or said in ("mxfp8", "nvfp4")
        return self.has(_RECENT) or (eight_bit and self.has(_MEGATRON))

    @property
    def recomputes(self) -> bool:
        """DeepSpeed's pipelines of Megatron: --checkpoint-activations in microsoft/DeepSpeedExamples,
        Megatron-LM-v1.1.5-3D_parallelism/examples."""
        return self.has(("deepspeed 3d",))

    @property
    def is_tuned(self) -> bool:
        return self.has(_TUNED)

    @property
    def defaults_to_bf16(self) -> bool:
        return self.has((*_RECENT, *_TORCH, *_XLA)) and Precision.BF16 in self._device.peak_flops

    def gradients(self, precision: Precision) -> Precision:
        """Stacks of fp16 add and reduce gradients as they are, others in fp32; tuned recipes in bf16."""
        if precision is Precision.FP16:
            return Precision.FP16
        tuned = self.has((*_TUNED, "internevo")) or (precision.quantized and self.has(_MEGATRON))
        return self._assume("gradients in bf16", Precision.BF16) if tuned else Precision.FP32

    def has(self, names: Sequence[str]) -> bool:
        framework = self._run.text("framework").lower()
        return any(name in framework for name in names)

    def _model_parallel(self) -> bool:
        return any((self._run.whole(name) or 1) > 1 for name in ("tp", "pp"))

    def _eager(self) -> str:
        """PyTorch itself, with fused attention or, where the source says that it is not, as before there was one."""
        if self._run.is_yes("flash") is not False:
            return "torch"
        return self._assume("element-wise work and attention as in stacks before fused attention", "megatron-2021")

    def _megatron(self) -> str:
        flash = self._run.is_yes("flash")
        if flash is None:
            recent = self.is_recent
            flash = self._assume("fused attention" if recent else "attention not fused", recent)
        if kernel := re.search(r"norm kernel=(\w+)([^;]*)", self._run.text("extra")):
            return "scaling-fused-norms" if "RMS kernel" in kernel[2] else _scaling(kernel[1])
        if not flash:
            return "megatron-2022" if self.has(_2022) else "megatron-2021"
        if self.has(("internevo",)):
            return "internevo"
        return self._core() if self.is_recent else "megatron-flash"

    def _compiled(self) -> str:
        """What of torchtitan's ways to be quicker the run says that it used."""
        if "async TP" in self._run.text("extra"):
            return "-async"
        return "-compiled" if self._run.is_yes("compile") else ""

    def _core(self) -> str:
        """Megatron-Core with what the run says of its communication."""
        extra = self._run.text("extra")
        if "overlap switched off" in extra:
            return "megatron-core-serial"
        once = any(f"dispatcher={name}" in extra for name in ("deepep", "hybridep"))
        latent = self._run.text("arch").lower() == "moe-mla" and "dispatcher=" not in extra
        if latent and self.has(("megatron-bridge",)):
            once = self._assume("tokens cross to a node once, as in the stack's own recipes", True)
        if self.has(_DUAL):
            return self._assume("tokens cross to a node once, beside other work (2412.19437)", f"megatron-core{_BOTH}")
        name = "nemo" if self.is_tuned else "megatron-core"
        name = "megatron-bridge" if self.has(("megatron-bridge",)) else name
        return name + ("-deepep" if once else "") + ("-overlap" if "moe_a2a_overlap" in extra else "")

    def _assume(self, what: str, value: T) -> T:
        self._assumed.append(what)
        return value


def _scaling(kernel: str) -> str:
    """Aleph Alpha's library with norms written out and attention by `kernel`."""
    if kernel.startswith("flash_attention"):
        return "scaling-flash-1" if kernel.startswith("flash_attentionv1") else "scaling"
    return "scaling-fused-softmax" if kernel == "fused" else "scaling-plain-softmax"
