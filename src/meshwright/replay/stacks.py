"""The software of a published run, by words in its `framework` and what the row says of kernels and communication."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from meshwright.cost.stacks import software
from meshwright.cost.variants import BLOCKING, WHOLE_EXCHANGES
from meshwright.replay import words
from meshwright.replay.kernels import Kernels, all_narrow
from meshwright.replay.runs import Run
from meshwright.spec.cluster import DeviceKind, DeviceSpec, Precision
from meshwright.spec.optimizer import Master, Moments, OptimizerSpec
from meshwright.spec.plan import Recompute

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
_XLA_2022 = (  # before XLA had fused attention
    *("t5x", "pathways", "alpa", "gspmd", "mesh-tensorflow", "mesh tensorflow", "gshard", "tensorflow", "seqio"),
)
_XLA_IN_TURN = ("t5x", "pax", "alpa", "gspmd", "gshard", "seqio")  # on other devices than TPUs
_XLA = (*_XLA_2022, "maxtext", "pax", "levanter", "easylm", "jax", "xla", "axlearn", "flax")
_AMP = ("deepspeed 3d (modified)",)  # DachengLi1/AMP, DeepSpeed/DeepSpeedExamples/Megatron-LM-v1.1.5-3D_parallelism
# configs/base.yml: remat_policy; models/llama.py: gradient_checkpointing; disable_gradient_checkpointing of
# hparams/model_args.py
_REMATERIALIZES = ("maxtext", "levanter", "llama-factory", "llamafactory")
_NEMO = re.compile(r"\bnemo\b(?:.*\b(?:2[3-9]\.\d|2\.\d)|/| framework)")
_SUMS_WIDE = re.compile(r"grad_reduce_in_fp32(?!\s*[=:]\s*false)|grad_reduce_in_bf16\s*[=:]\s*false", re.IGNORECASE)
_NO_PIECES = re.compile(r"no tp[ _]comm[ _]overlap|tp_comm_overlap\s*[=:]\s*false", re.IGNORECASE)
_BEFORE_NEMO = ("nemo-megatron 22", "nemo megatron 22")
_TORCH = {
    "composer": "torch-2023",
    "foundry": "torch-2023",
    "mosaicml": "torch-2023",
    "fsdp1": "torch-2024",
    "torchtitan": "torch-2024",
    "torchtune": "torch-2024",
    "automodel": "automodel",
    "fsdp": "torch",
}
_MEGATRON = (
    *("megatron", "nemo", "internevo", "deepspeed 3d", "gpt-neox", "neox", "colossal", "primus", "nanotron", "mlperf"),
    *("hai-llm", "llama 3", "megascale", "galvatron", "moe folding", "metaseq", "mindspeed", "vescale"),
)
_EAGER = (
    *("trainer", "transformers", "accelerate", "hugging", "lightning", "litgpt", "lit-gpt", "lit gpt", "ddp"),
    *("distributeddataparallel", "fairscale", "fairseq", "axolotl", "olmo", "nanogpt", "deepspeed", "pytorch"),
    *("torch", "unsloth"),
)


class Stack:
    """What the software of `run` is; what its source left open is added to `assumed`."""

    def __init__(self, run: Run, device: DeviceSpec, *, assumed: list[str]) -> None:
        self._run = run
        self._device = device
        self._assumed = assumed

    def name(self) -> str:
        """The software of that name in the cost model, with the kernels that the run says, and waiting for every kernel
        where it says so."""
        plain, colon, modules = self._named().partition(":")
        blocks = "CUDA_LAUNCH_BLOCKING=1" in self._run.text("extra")
        kernels = Kernels(run=self._run, device=self._device, has=self.has, assumed=self._assumed)
        said = f"{kernels.attention(plain, dated=self.is_recent and self._is_young)}{kernels.loss(plain)}"
        said += "-narrow-step" if self.is_narrow and not software(plain).steps_narrow else ""
        said += WHOLE_EXCHANGES if _NO_PIECES.search(self._run.text("extra")) and software(plain).pieces else ""
        return f"{plain}{said}{BLOCKING if blocks else ''}{colon}{modules}"

    def compiles(self) -> bool:
        """Whether the run says so, and not by its software's name."""
        return bool(self._run.is_yes("compile")) and not self.has(("torchtitan",))

    def _named(self) -> str:
        if self._is_xla:
            fused = self._fuses(unless=self.has(_XLA_2022))
            offloads = "sparsecore" in self._run.text("extra").lower().replace(" ", "")
            on_tpus = "xla-sparsecore" if offloads else "xla"
            if self._device.kind is not DeviceKind.TPU and self.has(_XLA_IN_TURN):
                return "xla-gpu-2023" if fused else "xla-gpu-2023-unfused"
            young = on_tpus if self._device.kind is DeviceKind.TPU else "xla-gpu"
            return f"{young}{self._kept_by_policy()}" if fused else self._xla_2022()
        if self.has(("nanotron",)) and self._fuses(unless=False):
            return "nanotron"
        if self.has(("fast-llm", "fast_llm", "fastllm")):
            return "fast-llm" if self._fuses(unless=False) else "fast-llm-unfused"
        if self.has(("deepspeed",)) and self.has(("transformer kernel", "bert kernel")):
            return "deepspeed-2020"
        of_megatron = self.has(("primus",)) and not self.has(("torchtitan",))
        for name, stack in _TORCH.items():
            if self.has((name,)) and not of_megatron:
                return self._titan() if self.has(("torchtitan",)) else self._eager() if name == "fsdp" else stack
        if self.has(("llm.c", "llmq")):
            return "llm.c"
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
        """Megatron on Transformer Engine, which alone multiplies in eight bits, and all there is of Megatron-LM and
        NeMo for devices that can."""
        said = words.precision(self._run.text("precision"))
        eight_bit = said in EIGHT_BIT or said in ("mxfp8", "nvfp4")
        older = ("deepspeed", "megatron-lm v1", "megatron-lm v2", *_2022)
        young = self._is_young and self.has(("megatron-lm", "nemo")) and not self.has(older)
        return self.has(_RECENT) or self._is_nemo or young or (eight_bit and self.has(_MEGATRON))

    @property
    def recomputes(self) -> bool:
        """DeepSpeed's pipelines of Megatron: --checkpoint-activations in microsoft/DeepSpeedExamples,
        Megatron-LM-v1.1.5-3D_parallelism/examples, but not in AMP's copy of that script. MaxText, Levanter and
        LLaMA-Factory unless they are told otherwise."""
        return self.has(("deepspeed 3d", *_REMATERIALIZES)) and not self.has(_AMP)

    @property
    def keeps_checkpoints_away(self) -> bool:
        """Megatron with ZeRO-3 of microsoft/DeepSpeedExamples, whether or not its optimizer is: --checkpoint-in-cpu in
        Megatron-LM-v1.1.5-ZeRO3/examples, and in the scripts of its users (bigscience's gpt2-meg-ds-zero)."""
        return self.has(("v1.1.5 zero-3", "v1.1.5-zero3"))

    def optimizer(self) -> OptimizerSpec:
        """AdamW; DeepSeek's with moments in bf16. Of NeMo AutoModel all in bf16, which its models are made in unless
        told otherwise (from_config in _transformers/auto_model.py), and torch's Adam keeps moments like parameters."""
        if self.has(_DUAL) and words.model_kind(self._run.text("arch")) == "moe-mla":
            return self._assume("moments in bf16 (2412.19437, 3.3.3)", OptimizerSpec(state=Moments.BF16))
        if not self.is_narrow:
            return OptimizerSpec()
        narrow = OptimizerSpec(state=Moments.BF16, master=Master.BF16_STOCHASTIC)
        if all_narrow(self._run):
            return narrow
        return self._assume("parameters, gradients and moments in bf16, the stack's default", narrow)

    @property
    def is_narrow(self) -> bool:
        """Whether parameters, gradients and moments are in bf16 alone: as the run says, and in NeMo AutoModel,
        torchtune (`dtype: bf16` in recipes/configs) and LLMQ (--model-dtype and --opt-m-dtype in its benchmarks)."""
        fp32 = words.precision(self._run.text("precision")) in (Precision.FP32, Precision.FP16)
        return all_narrow(self._run) or (self.has(("automodel", "torchtune", "llmq")) and not fp32)

    @property
    def divides_sequences(self) -> bool:
        """Whether features between tensor ranks' parts are theirs by token unless a run says otherwise.

        torchtitan has no other way (models/llama3/infra/parallelize.py), XLA divides them as it is told the features
        lie (`activation_embed` of MaxText's rules).
        """
        return self.is_recent or self._is_xla or self.has(("torchtitan", "megascale"))

    @property
    def usual_schedule(self) -> str:
        """What its pipelines do where a run does not say: Llama 3's stages were interleaved (2407.21783, 3.3.2)."""
        return "interleaved-1f1b" if self.has(("llama 3",)) else ""

    @property
    def counts_again(self) -> bool:
        """Whether it computes so many layers of a stage again as it is told (recompute_method block and
        recompute_num_layers of Megatron-Core's transformer_config.py)."""
        return self.is_recent

    @property
    def interleaves(self) -> bool:
        """Whether stages on a rank may have been chosen where neither schedule nor microbatch is told: Megatron-Core
        hides what goes between stages with several on a rank alone (overlap_p2p_comm in model_parallel_config.py)."""
        return self.is_recent and not self.has(_DUAL)

    @property
    def copies_slices(self) -> bool:
        """MaxText divides parameters in a slice of TPUs and copies them to every other unless told to divide them over
        all (configs/base.yml: dcn_data_parallelism is -1, dcn_fsdp_parallelism 1)."""
        tpu = self._device.kind is DeviceKind.TPU
        return tpu and self.has(("maxtext",)) and "dcn_fsdp" not in self._run.text("extra")

    @property
    def modules(self) -> str:
        """Of Megatron-Core's layers those that the run says are computed again, with a plus between; else nothing.

        DeepSeek computes norms, what latent attention makes of its latents and activations again unless it says
        otherwise (2412.19437, 3.2.3).
        """
        said = re.search(r"recompute_modules=\[?([\w+,]+)", self._run.text("extra"))
        if said is None and self._keeps_latents:
            return "mla_up_proj+layernorm+moe_act"
        if said is None or words.recompute(self._run.text("recompute")) not in ("", Recompute.SELECTIVE):
            return ""
        return "+".join(filter(None, re.split(r"[+,]", said[1])))

    @property
    def _keeps_latents(self) -> bool:
        latent, again = (
            words.model_kind(self._run.text("arch")) == "moe-mla",
            words.recompute(self._run.text("recompute")),
        )
        return latent and self.has(_DUAL) and again in ("", Recompute.SELECTIVE)

    @property
    def vocabulary_rows(self) -> int:
        """Megatron fills a tensor rank's vocabulary up to multiples of 128 rows (--make-vocab-size-divisible-by)."""
        return 128 if self.has(_MEGATRON) else 1

    @property
    def is_tuned(self) -> bool:
        return self.has(_TUNED) or self._is_nemo

    @property
    def defaults_to_bf16(self) -> bool:
        return self.has((*_RECENT, *_TORCH, *_XLA)) and Precision.BF16 in self._device.peak_flops

    @property
    def _is_xla(self) -> bool:
        return self.has(_XLA) or (self._device.kind is DeviceKind.TPU and not self.has(_MEGATRON))

    @property
    def _is_nemo(self) -> bool:
        """NeMo since it stands on Megatron-Core."""
        framework = self._run.text("framework").lower()
        return bool(_NEMO.search(framework)) and not self.has(_BEFORE_NEMO)

    @property
    def _is_young(self) -> bool:
        """A device that came after fused attention: it multiplies in eight bits."""
        return Precision.FP8 in self._device.peak_flops

    def _fuses(self, *, unless: bool) -> bool:
        """Whether attention is fused: as the run says, else where there is a kernel for the device and stack.

        FlashAttention starts with Ampere (2307.08691), whose products alone take bf16.
        """
        said = self._run.is_yes("flash")
        if said is not None:
            return said
        if not unless and Precision.BF16 in self._device.peak_flops:
            return True
        if reason := self._has_no_scores():
            return self._assume(reason, True)
        return self._assume("attention not fused", False)

    def _has_no_scores(self) -> str:
        """Why attention must have been fused, in whatever stack; nothing where it need not."""
        if (self._run.whole("cp") or 1) > 1:
            return "fused attention, whose pieces context ranks put together"
        heads = (self._run.whole("heads") or 1) / (self._run.whole("tp") or 1)
        scores = 2.0 * (self._run.whole("mbs") or 1) * heads * float(self._run.lengths.encoder) ** 2
        too_many = scores > self._device.memory_bytes
        return "fused attention: the scores of one layer are more than the device has room for" if too_many else ""

    def gradients(self, precision: Precision) -> Precision:
        """As the run says; else stacks of fp16 add and reduce them as they are, others in fp32, tuned recipes in bf16.

        AMP's reduces those of fp16 in fp32 (fp32_allreduce in its examples/ds_config.json).
        """
        if _SUMS_WIDE.search(self._run.text("extra")):
            return Precision.FP32
        if precision is Precision.FP16 and self.has(_AMP):
            return self._assume("gradients travel in fp32, as in the stack's own scripts", Precision.FP32)
        if precision is Precision.FP16:
            return Precision.FP16
        if self.is_narrow and not self.has(("automodel",)):
            return Precision.BF16
        tuned = self.is_tuned or self.has(("internevo",)) or (precision.quantized and self.has(_MEGATRON))
        return self._assume("gradients in bf16", Precision.BF16) if tuned else Precision.FP32

    def has(self, names: Sequence[str]) -> bool:
        framework = self._run.text("framework").lower().replace("nemo automodel", "automodel")  # torch, no Megatron
        framework = re.sub(r"^deepseek\b(?!.*(?:hai-llm|megatron))", "hai-llm", framework)
        return any(name in framework for name in names)

    def _model_parallel(self) -> bool:
        return any((self._run.whole(name) or 1) > 1 for name in ("tp", "pp"))

    def _eager(self) -> str:
        """PyTorch itself, with fused attention or as before there was one; DeepSpeed's has an optimizer of its own."""
        if not self._fuses(unless=False):
            return "torch-2021"
        return "deepspeed" if self.has(("deepspeed",)) else "torch-plain"

    def _xla_2022(self) -> str:
        """XLA before it had fused attention; TensorFlow on other devices than TPUs, where it need not be compiled."""
        named = self.has(("tensorflow",)) and not self.has(("mesh",)) and self._device.kind is not DeviceKind.TPU
        return f"tensorflow-2020{'-xla' if self.has(('xla',)) else ''}" if named else "xla-2022"

    def _kept_by_policy(self) -> str:
        """What MaxText's policy keeps instead of what all products give: attention and its products, without those that
        a feed-forward begins with (`..._except_mlp`, and `..._except_logits_ffn1` of MLPerf v4.0's copy of it)."""
        policy = self._run.text("recompute").lower()
        return "-keeps-attention" if "except_mlp" in policy or "_ffn1" in policy else ""

    def _megatron(self) -> str:
        flash = self._run.is_yes("flash")
        if flash is None:
            known = "fused attention" if self.is_recent or self._is_young else self._has_no_scores()
            flash = self._assume(known or "attention not fused", bool(known))
        if kernel := re.search(r"norm kernel=(\w+)([^;]*)", self._run.text("extra")):
            return "scaling-fused-norms" if "RMS kernel" in kernel[2] else _scaling(kernel[1])
        if self.has(("neox",)):
            return "gpt-neox" if flash else "gpt-neox-unfused"
        if not flash:
            return self._unfused()
        if self.has(("internevo",)):
            return "internevo"
        return self._core() if self.is_recent else "megatron-flash"

    def _unfused(self) -> str:
        """Megatron before it had fused attention."""
        if self.has(("deepspeed 3d",)):
            return "deepspeed-3d"
        if self.has(("megatron-deepspeed",)) and not self.has(("v1.1.5",)):
            return "megatron-deepspeed"
        return "megatron-2022" if self.has(_2022) else "megatron-2021"

    def _titan(self) -> str:
        """torchtitan with what of its ways to be quicker the run says that it used.

        On Blackwell cuDNN's attention comes first (torchtitan's models/attention.py), as in all of its later versions.
        """
        year = "torch-2025" if Precision.NVFP4 in self._device.peak_flops else "torch-2024"
        if "async TP" in self._run.text("extra"):
            return f"{year}-async"
        return f"{year}-compiled" if self._run.is_yes("compile") else year

    def _core(self) -> str:
        """Megatron-Core with what the run says of its communication."""
        extra = self._run.text("extra")
        if "overlap switched off" in extra:
            return "megatron-core-serial"
        once = any(f"dispatcher={name}" in extra for name in ("deepep", "hybridep"))
        latent = words.model_kind(self._run.text("arch")) == "moe-mla" and "dispatcher=" not in extra
        if latent and self.has(("megatron-bridge",)):
            once = self._assume("tokens cross to a node once, as in the stack's own recipes", True)
        if self.has(_DUAL):
            self._assume("tokens cross to a node once, beside other work (2412.19437)", None)
            return f"megatron-core{_BOTH}" + (f":{self.modules}" if self.modules else "")
        if self.has(("primus",)) and self.has(("fsdp2",)):
            return "primus-fsdp2"
        name = "nemo" if self.is_tuned else "primus" if self.has(("primus",)) else "megatron-core"
        name = "megatron-bridge" if self.has(("megatron-bridge",)) else name
        name += ("-deepep" if once else "") + ("-overlap" if "moe_a2a_overlap" in extra else "")
        name += self._graphs() if self.has(("megatron-bridge",)) else ""
        return f"{name}:{self.modules}" if self.modules else name

    def _graphs(self) -> str:
        """What of a step is captured, by the scopes of `cuda_graph=implementation:scope+scope`."""
        said = re.search(r"cuda_graph=([^;]*)", self._run.text("extra"))
        scopes = re.split(r"[:+]", said[1].strip()) if said else []
        if "full_iteration" in scopes:
            return "-step-graph"
        if "moe_router" not in scopes:
            return ""
        return "-layer-graphs" if "attn" in scopes else "-router-graphs"

    def _assume(self, what: str, value: T) -> T:
        self._assumed.append(what)
        return value


def _scaling(kernel: str) -> str:
    """Aleph Alpha's library with norms written out and attention by `kernel`."""
    if kernel.startswith("flash_attention"):
        return "scaling-flash-1" if kernel.startswith("flash_attentionv1") else "scaling"
    return "scaling-fused-softmax" if kernel == "fused" else "scaling-plain-softmax"
