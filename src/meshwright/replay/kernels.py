"""What a row says of its kernels: the generation of attention, the loss, whether all is in 16 bits; and its date."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.cost.stacks import software
from meshwright.replay.runs import Run
from meshwright.replay.words import precision
from meshwright.spec.cluster import AttentionKernel, DeviceSpec, Precision

_FLASH = r"(?:\bfa|\bflash[ _-]?att(?:entio)?n|\bflash)[ _-]*v?"
_GENERATIONS = {
    AttentionKernel.NATIVE: re.compile(rf"\bcudnn|\bte[ _-]fused|{_FLASH}[34](?:\.\d+)*\b"),
    AttentionKernel.FLASH_2: re.compile(rf"{_FLASH}2(?:\.\d+)*\b"),
    AttentionKernel.FLASH_1: re.compile(rf"{_FLASH}[01](?:\.\d+)*\b"),
}
# Transformer Engine takes cuDNN's attention on Hopper since 1.2 (7 December 2023, "Select FusedAttention on sm90" in
# pytorch/attention.py), and took FlashAttention-2 before; so did MLPerf v3.1 (flash-attention 2.0.8 in its Dockerfile).
_BEFORE_CUDNN = re.compile(
    r"\b(?:megatron-core|mcore)[ /v_-]*0\.[0-4]\b|\bnemo\b[^\d]{0,12}2[0-3]\.\d\d|\bmlperf[ \w]{0,10}? v?[0-3]\.\d"
    r"|\b(?:transformer engine|te)[ /v]*(?:0\.\d+|1\.[01])\b|\b20(?:1\d|2[0-3])\b"
)
_UNSAID = re.compile(r"\b(?:no|not|without|non)\b[ -]*(?:\w+ )?$")
_LOSSES = {  # the first that is said
    "-liger": re.compile(r"\bliger\b"),
    "-linear-loss": re.compile(r"\blinear[ _-]*(?:cross|ce\b)|\bflce\b|\bcut[ _-]cross"),
    "-chunked": re.compile(
        r"\bchunk(?:ed)?[ _-]*(?:cross|ce\b|loss|lm[ _-]?head)|chunkedlosswrapper|\blm[ _-]?head[ _-]*chunks"
    ),
    "-loss-kernel": re.compile(r"\bfused[ _-]*(?:cross|ce\b)|\bcross-entropy kernel|\bxentropy\b"),
}
_NARROW = re.compile(
    r"pure[ _-]bf16|bf16[ _-](?:true|pure)|\b(?:all|wholly|model|everything) in bf16|params_kept=bf16"
    r"|param\w*(?:, gradients)? and moments in bf16|\bno (?:fp32 )?masters?\b"
)
_NARROW_CELLS = ("bf16true", "purebf16", "bf16pure")
_DATE = re.compile(r"(?<![0-9a-z.])(20[12]\d)[-_.]?(0[1-9]|1[0-2])(?:[-_.]?[0-3]\d)?(?!\d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What `run` says of them on its `device`, and what its stack, which `has` one of some names, took by its date;
    what is assumed is added to `assumed`. All of it as the name of software says it."""

    run: Run
    device: DeviceSpec
    has: Callable[[Sequence[str]], bool]
    assumed: list[str]

    def attention(self, plain: str, *, dated: bool) -> str:
        """Where it is not that of the software called `plain`, which is Megatron-Core on Hopper or after if `dated`."""
        known = software(plain)
        if not known.fused_attention:
            return ""
        texts = (self.run.text("flash").lower(), _remarks(self.run))
        said = (kernel for text in texts for kernel, word in _GENERATIONS.items() if _says(word, text))
        kernel = next(said, None)
        if kernel is None and dated and _BEFORE_CUDNN.search(self.run.text("framework").lower()):
            self.assumed.append("FlashAttention-2, as Transformer Engine took it until the end of 2023")
            kernel = AttentionKernel.FLASH_2
        return "" if kernel in (None, known.attention_kernel) else f"-{kernel}"

    def loss(self, plain: str) -> str:
        """As the run says, else as the stack's own is. Programs that are compiled whole have their own kernels, as has
        Megatron. LLMQ takes a sequence or so at a time (--lmhead-chunks in its benchmarks)."""
        text = _remarks(self.run)
        said = next((name for name, word in _LOSSES.items() if _says(word, text)), "")
        if not software(plain).eager:
            return said if said in ("-linear-loss", "-chunked") else "-chunked" if self.has(("llmq",)) else ""
        if said not in ("", "-chunked"):
            return said
        compiled = "-fused-loss" if self._compiles_loss() else ""
        whole = self.has(("torchtune",))  # CEWithChunkedOutputLoss widens chunks of logits that are all there
        return f"{compiled}{'-chunked' if (said and not whole) or self._chunks_loss() else ''}"

    def _compiles_loss(self) -> bool:
        """torchtune compiles its loss with its model (apply_compile_strategy in modules/loss), torchtitan does so again
        since February 2025 (build_cross_entropy_loss in components/loss.py), before it had Blackwell."""
        if not self.run.is_yes("compile"):
            return False
        return self.has(("torchtune",)) or (self.has(("torchtitan",)) and self._is_since(2025, 3))

    def _chunks_loss(self) -> bool:
        """torchtitan since 27 April 2026 (ChunkedCELoss, later ChunkedLossWrapper), and so wherever it trains in nvfp4,
        which came in August."""
        four_bits = precision(self.run.text("precision")) == Precision.NVFP4
        date = date_of(self.run)
        return self.has(("torchtitan",)) and (four_bits if date is None else date >= (2026, 5))

    def _is_since(self, year: int, month: int) -> bool:
        """Whether the run is of that month or later; where it has no date, whether its device is."""
        date = date_of(self.run)
        return Precision.NVFP4 in self.device.peak_flops if date is None else date >= (year, month)


def all_narrow(run: Run) -> bool:
    """Whether a row says that parameters, gradients and moments are in bf16 with no copy in fp32."""
    cell = re.sub(r"[^a-z0-9]", "", run.text("precision").lower())
    return cell in _NARROW_CELLS or _says(_NARROW, _remarks(run))


def date_of(run: Run) -> tuple[int, int] | None:
    """Year and month in the name of the stack, else of the source; None where neither has one."""
    texts = (run.text("framework").lower(), run.text("source_ref").lower())
    found = next((match for text in texts if (match := _DATE.search(text))), None)
    return None if found is None else (int(found[1]), int(found[2]))


def _remarks(run: Run) -> str:
    return f"{run.text('extra')}; {run.text('notes')}".lower()


def _says(word: re.Pattern[str], text: str) -> bool:
    """Whether `text` has it, and no `no` or `without` before it."""
    return any(not _UNSAID.search(text[: match.start()]) for match in word.finditer(text))
