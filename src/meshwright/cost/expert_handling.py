"""How training software handles the experts of a mixture, as far as it costs time: features, no fitted constants."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertHandling:
    """`dispatches_once`: a token crosses to a node once, however many of its experts are there (DeepEP, 2412.19437).
    `biases_apart`: the bias of what an expert gives is scaled by the router's weights and added expert by expert
    (TEGroupedMLP._apply_bias). `pads`: in eight and four bits rows are copied so that every expert's begin where its
    kernels ask for it, unless what tokens are sent by lays them so (Fp8Padding and Fp8Unpadding of Transformer Engine).
    `clamps_apart`: what an activation clamps is clamped and joined before the kernel of the activation reads it
    (weighted_bias_quick_geglu_impl in Megatron-Core's fused_bias_geglu.py). `fused`: the kernels that multiply all
    experts clamp, activate and weigh as they write (Transformer Engine's fused grouped MLP). `masks`: where experts
    have a capacity, tokens reach them and come back by products with masks, and every place of an expert is multiplied,
    taken or not (2006.16668). `block`: rows of all experts lie one behind the other and are multiplied in blocks of so
    many, one that two experts share for each of them.
    """

    dispatches_once: bool = False
    biases_apart: bool = False
    pads: bool = False
    clamps_apart: bool = False
    fused: bool = False
    masks: bool = False
    block: int = 1

    @property
    def copies_to_pad(self) -> bool:
        """Whether rows have to be copied to be padded: what sends a token once lays it so."""
        return self.pads and not self.dispatches_once


ALL_TOGETHER = ExpertHandling()
