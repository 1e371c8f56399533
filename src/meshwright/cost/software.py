"""What the training software does, as far as it costs time: features, never fitted constants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.expert_handling import ALL_TOGETHER, ExpertHandling
from meshwright.cost.repeated import SCORES, Repeated
from meshwright.cost.shard_copies import ShardCopies
from meshwright.cost.work import SCORES_AT_ONCE, FloatArray, LossKernel
from meshwright.spec.cluster import AttentionKernel, DeviceKind

# The longest sequence that nn attends in fp32 on processors (nn/attention.py says why).
WIDE_ATTENTION_LENGTH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """`fused_attention`: scores never reach memory and hidden keys are skipped. `overlap`: gradients travel during
    backward. `fused_accumulation`: products of weight gradients add to the accumulated gradient themselves.
    `dense_masks`: attention under a window, and on accelerators under a document mask, reads every score (on
    processors documents are attended one by one), and with sinks or caps writes scores out. `casts_each_pass`: weights
    that are not sharded are cast to the precision that multiplies in every pass, and kept for its backward.
    `composite_norms`: on processors a root-mean-square norm is written out in fp32 and keeps two copies;
    `plain_norms`: on every device.
    `eager`: element-wise work is done operator by operator, and every projection adds its own gradient.
    `compiled`: the compiler fuses that work, and backward keeps what it kept.
    `widens_attention`: on processors sequences up to WIDE_ATTENTION_LENGTH are attended in fp32 whatever multiplies.
    `scatters_by_exchange`: on processors reduce-scatters are all-to-alls and a local sum.
    `attention_kernel`: which generation of fused attention; `torch_attention`: PyTorch is asked for it, which has
    another on AMD's devices (AttentionKernel.TRITON). `layer_seconds`: host time of a layer and pass beside its
    kernels where a host drives an accelerator and the device's own was not measured; `mixture_seconds` more where the
    layer has a mixture; `fetch_seconds` more for every module of a layer that has parameters, where hooks gather them.
    `expert_streams`: experts are multiplied one by one, so many at a time, each started in `expert_seconds` of the
    host's time; 0 where one kernel multiplies all. `grouped_experts`: backward of bf16 keeps what that kernel has.
    `hides_experts`: tokens travel to their experts and back while another microbatch works in the same layer.
    `hides_gradients`: what tensor ranks exchange of the gradient of a part's input travels beside the gradients of its
    weights; `regathers`: with sequence parallel the input is gathered again for those, beside its own gradient
    (2205.05198); `pieces`: gathers and scatters go in as many pieces as there are ranks, each beside the product of
    another (10.1145/3567955.3567959).
    `collective_seconds` and `step_seconds`: what a collective and each of its ring's steps take longer than NCCL's of
    today. `waits_for_transfers`: sender and receiver of a stage's features do nothing else until both are done;
    `waits_in_loops`: with several stages on a rank too. `scatters_transfers`: tensor ranks send a slice each between
    stages and gather it in their node.
    `keeps_copies`: parameters in the precision that multiplies lie beside the optimizer's fp32 masters, and gradients
    in a buffer of their own from the first step on; `narrow_parameters`: under recipes of eight and four bits those of
    layers are quantised themselves, and lie beside no other copy; `adds_narrow`: gradients add up in the precision that
    multiplies, whatever they travel in; `reduces_whole`: with the optimizer's state sharded, every rank is sent all of
    their sum; `keeps_terms`: where they add up in more precision than multiplies, those of the last microbatch lie
    beside their sum until another goes back (update_hp_grads of DeepSpeed's runtime/bf16_optimizer.py).
    `sums_replicas_last`: shards of gradients are summed over replicas beyond a node when all backwards are done;
    `scatters_alone`: nothing else is done while they are scattered, and with `gathers_alone` while parameters are
    gathered for a layer.
    `keeps_logits`: those of two microbatches lie in fp32 in the buffers of a pipeline until the next one's replace them
    (pipe_buffers of DeepSpeed's runtime/pipe/engine.py). `whole_logits`: every tensor rank is sent those of the whole
    vocabulary for the loss (TransformerLMHead of Aleph-Alpha/scaling, whose products gather what they give unless
    told otherwise). `fused_loss`: the loss reads logits as they come and
    writes their gradient over them. `placeholders`: Transformer Engine keeps for each shape of weight a tensor that
    stands for the gradient which its product added elsewhere already (get_dummy_wgrad, since release 2.3). `dropout`:
    each branch keeps a mask of what it dropped. `plain_softmax`: where attention is not fused, scores are copied,
    masked and softmaxed in a pass each; `softmax_heads`: the kernel that does so in one pass takes so many heads of a
    batch at a time, and 0 any. `adds_biases` and `sums_biases`: kernels of their own add biases to products,
    as torch did before its products took them along, and sum the gradients of biases. `stops_early`: a layer computed
    again ends before the last product whose result backward does not need (pytorch/pytorch 96866, since 2.1; XLA leaves
    out what nothing reads). `shard_copies`: what sharding copies on the device itself. `loss_kernel`: what works
    out the loss instead of operators, eager or fused. `agrees_on_scales`: tensor ranks compare what they round with one
    scale before every product (cost/scales.py), as our own runtime does. `repeats`: what selective recompute runs
    again. `steps_narrow`: one kernel steps AdamW in whatever it is kept. `narrow_loss`: torch's loss is worked out in
    the precision of the logits, which are not widened for it. `loss_chunks`: head and loss go forward and back in so
    many runs of tokens, one after the other, so that no more than one has its logits; 0 are as many as leave a run
    about as many logits as all tokens have features, its tokens a power of two (fused_linear_cross_entropy.py of
    Liger-Kernel). `experts`: how those of a mixture are handled. `tokens_first`: activations lie by token first and by
    sequence then, as in Megatron. `waits_for_kernels`: a host starts a kernel when the one before has ended, so that
    the device is idle in its time (CUDA_LAUNCH_BLOCKING). `host_bytes`: what a host reads and writes of a parameter
    beside the step of an optimizer that it runs. `filled`: the most of what an allocator reserves that tensors fill.
    `scores_at_once`: the most scores that are written out at a time where context ranks meet and no kernel takes them.
    """

    fused_attention: bool = True
    overlap: bool = True
    fused_accumulation: bool = False
    dense_masks: bool = True
    scores_at_once: int = SCORES_AT_ONCE
    casts_each_pass: bool = True
    grouped_experts: bool = False
    composite_norms: bool = True
    plain_norms: bool = False
    eager: bool = True
    compiled: bool = False
    widens_attention: bool = True
    scatters_by_exchange: bool = True
    scatters_transfers: bool = False
    hides_gradients: bool = False
    regathers: bool = False
    pieces: bool = False
    collective_seconds: float = 0.0
    step_seconds: float = 0.0
    waits_for_transfers: bool = False
    waits_in_loops: bool = False
    attention_kernel: AttentionKernel = AttentionKernel.NATIVE
    torch_attention: bool = False
    layer_seconds: float = 0.0
    mixture_seconds: float = 0.0
    fetch_seconds: float = 0.0
    expert_streams: int = 0
    expert_seconds: float = 0.0
    hides_experts: bool = False
    keeps_copies: bool = False
    narrow_parameters: bool = False
    adds_narrow: bool = False
    reduces_whole: bool = False
    sums_replicas_last: bool = False
    scatters_alone: bool = False
    gathers_alone: bool = False
    keeps_terms: bool = False
    keeps_logits: bool = False
    whole_logits: bool = False
    fused_loss: bool = True
    placeholders: bool = False
    dropout: bool = False
    plain_softmax: bool = False
    softmax_heads: int = 0
    adds_biases: bool = False
    sums_biases: bool = True
    stops_early: bool = True
    shard_copies: ShardCopies = ShardCopies.UNITS
    loss_kernel: LossKernel | None = None
    agrees_on_scales: bool = False
    repeats: frozenset[Repeated] = SCORES
    steps_narrow: bool = False
    narrow_loss: bool = False
    loss_chunks: int = 1
    experts: ExpertHandling = ALL_TOGETHER
    tokens_first: bool = False
    waits_for_kernels: bool = False
    host_bytes: float = 0.0
    filled: float = 1.0

    @property
    def quantizes_once(self) -> bool:
        """Matrices that meet the same input are one (Transformer Engine's fused projections)."""
        return not self.eager

    def experts_together(self, experts: FloatArray | float) -> FloatArray | float:
        """How many of `experts` share the device's units."""
        return np.minimum(experts, self.expert_streams) if self.expert_streams else experts

    def host_seconds(self, kind: DeviceKind, *, mixed: bool) -> float:
        """Host seconds of a layer and pass beside its kernels, where a host drives an accelerator; of one with a
        mixture where `mixed`."""
        return 0.0 if kind is DeviceKind.CPU else self.layer_seconds + (self.mixture_seconds if mixed else 0.0)

    def host_in_turn(self, kind: DeviceKind) -> bool:
        """Whether hosts and devices work one after the other: a processor is its own host."""
        return kind is DeviceKind.CPU or self.waits_for_kernels

    def masks_documents(self, kind: DeviceKind) -> bool:
        return self.dense_masks and kind is not DeviceKind.CPU

    def exchanges_scatter(self, kind: DeviceKind) -> bool:
        return self.scatters_by_exchange and kind is DeviceKind.CPU

    def writes_norms_out(self, kind: DeviceKind) -> bool:
        return self.plain_norms or (self.composite_norms and kind is DeviceKind.CPU)

    def widens(self, kind: DeviceKind, *, length: int) -> bool:
        return self.widens_attention and kind is DeviceKind.CPU and length <= WIDE_ATTENTION_LENGTH
