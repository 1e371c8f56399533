"""The work of one block on one device for one microbatch, before any device or network gives it seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshwright.cost.expert_handling import ALL_TOGETHER, ExpertHandling

FloatArray = npt.NDArray[np.float64]
# Scores that are written out at once, where no kernel does without: 64 MiB in fp32.
SCORES_AT_ONCE = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class LossKernel:
    """One kernel reads logits for the loss, and one reads them for their gradients (flash-attn's xentropy).

    `metrics` times more the loss is worked out in fp32, operator by operator and without gradients, to be reported.
    `early`: gradients are written with the loss, after a pass of their own over the logits, and scaled in backward
    (Transformer Engine's cross_entropy.py), unless the head goes back at once, run by run. `tops`: a pass of its own
    finds the largest logit of each token before.
    """

    metrics: int = 0
    early: bool = False
    tops: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the operators of a block depend on beside the model; every array has one entry a combination.

    `batch` sequences of `sequence` tokens; `tensor` ranks divide heads and hidden features; `split` ranks divide the
    tokens of norms and residuals (tensor with sequence parallel, else 1); `itemsize` bytes of an activation.
    `context` ranks divide the tokens of every sequence, of which runs of `inner` trade them for heads; those runs pass
    keys around or, where one `gathers`, gather them; `token_layout` (an index into TOKEN_LAYOUTS; None is the zigzag
    one) says which tokens each holds. `expert` ranks
    hold different experts and `expert_tensor` divide each; `expert` is 0 where experts lie as the tensor axis says.
    `grid_dims` is 1 where tensor ranks lie on a line, 2 on a square and 3 on a cube: there `batch` is the sequences
    whose heads a rank works on, and `tensor` and `split` the ranks along a side.
    Work is done in `slices` of the tokens, one after the other.
    `masked`: attention is given a mask of documents. `dense_masks`: a masked attention reads every score.
    `composite_norms`: root-mean-square norms are written out in fp32. `eager`: element-wise work is
    done operator by operator, and every projection adds its own gradient. `attention_itemsize`:
    bytes of the queries, keys and values that attention reads. `processor`: no accelerator runs this.
    `product_itemsize`: bytes of an element that a product keeps of its input. `added_biases` and `summed_biases`:
    kernels of their own add biases to products, and sum their gradients. `dropout`: branches drop elements out.
    `tokens_first`: the same token of every sequence lies beside one another.
    `unfused`: attention is separate products, whose inputs and result are laid out anew. `loss_kernel`: what works out
    the loss, where that is not the stack's usual operators; `fused_loss`: those write gradients over the logits.
    `whole_logits`: every tensor rank has all logits for it; `loss_chunks` and `scores_at_once` as of Software.
    `experts`: how those of a mixture are handled; `grouped_experts`: one kernel multiplies all of them in two bytes.
    """

    batch: FloatArray
    sequence: float
    tensor: FloatArray
    split: FloatArray
    itemsize: FloatArray
    context: FloatArray | float = 1.0
    inner: FloatArray | float = 1.0
    gathers: npt.NDArray[np.bool_] | bool = False
    token_layout: npt.NDArray[np.int64] | None = None
    expert: FloatArray | float = 0.0
    expert_tensor: FloatArray | float = 0.0
    slices: FloatArray | float = 1.0
    grid_dims: FloatArray | float = 1.0
    masked: bool = False
    dense_masks: bool = False
    scores_at_once: int = SCORES_AT_ONCE
    composite_norms: bool = False
    eager: bool = False
    attention_itemsize: FloatArray | None = None
    processor: bool = False
    grouped_experts: bool = False
    product_itemsize: FloatArray | None = None
    added_biases: bool = False
    summed_biases: bool = False
    dropout: bool = False
    unfused: bool = False
    loss_kernel: LossKernel | None = None
    fused_loss: bool = False
    whole_logits: bool = False
    loss_chunks: int = 1
    experts: ExpertHandling = ALL_TOGETHER
    tokens_first: bool = False

    @property
    def wide(self) -> FloatArray:
        """Bytes of an element where work is done in fp32 at the least."""
        return np.maximum(4.0, self.itemsize)

    @property
    def casts(self) -> FloatArray:
        """Bytes per element to widen or narrow once; 0 where activations are wide already."""
        return np.where(self.itemsize < 4.0, self.itemsize + 4.0, 0.0)

    @property
    def groups_experts(self) -> npt.NDArray[np.bool_]:
        """Whether one kernel makes a product of all experts (nn/grouped.py)."""
        return np.asarray((self.itemsize == 2.0) & self.grouped_experts)

    @property
    def attended(self) -> FloatArray:
        """Bytes of an element of the queries that attention reads."""
        return self.itemsize if self.attention_itemsize is None else self.attention_itemsize

    @property
    def kept_itemsize(self) -> FloatArray:
        """Bytes of an element that a product keeps of its input."""
        return self.itemsize if self.product_itemsize is None else self.product_itemsize

    @property
    def tokens(self) -> FloatArray:
        """Tokens of a microbatch on one context rank."""
        return self.batch * self.sequence / self.context

    @property
    def scores(self) -> FloatArray:
        """Elements of the score matrices of one head on one context rank."""
        return self.batch * self.sequence**2 / self.context

    @property
    def met_scores(self) -> FloatArray:
        """Those of `scores` that are formed where they are written out: slices meet the keys up to their own."""
        slices = np.asarray(self.slices)
        return self.scores * (slices + 1.0) / (2.0 * slices)

    @property
    def score_bytes(self) -> FloatArray:
        """Bytes of a score that backward keeps where attention is not fused: softmax, and what is left of it with the
        mask of what was dropped (2205.05198)."""
        return self.itemsize * (2.0 if self.dropout else 1.0) + (1.0 if self.dropout else 0.0)

    @property
    def ranks(self) -> FloatArray:
        """Tensor ranks in all."""
        return np.asarray(self.tensor**self.grid_dims, dtype=np.float64)

    @property
    def zeros(self) -> FloatArray:
        return np.zeros_like(self.batch)

    def times(self, tokens: float) -> Sizes:
        """The same for a block that sees `tokens` times as many tokens of every sequence."""
        return self if tokens == 1.0 else replace(self, sequence=float(max(1, round(self.sequence * tokens))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A forward product (m, k) x (k, n), `count` times over; its backward is (m, n) x (n, k) and (k, m) x (m, n).

    `together` of them share the device's units: the experts of a mixture. `of` are the names in their part of matrices
    that may be products of two thin ones. Its input is `shared` with the product before it. The second factor is
    `given` where it has no gradient. Rows are multiplied in blocks of `block`, one that two products share for each.
    The rank that has `most` rows has so many times as many.
    """

    m: FloatArray
    n: FloatArray
    k: FloatArray
    count: FloatArray | float = 1.0
    together: FloatArray | float = 1.0
    of: tuple[str, ...] = ()
    shared: bool = False
    given: bool = False
    block: int = 1
    most: FloatArray | float = 1.0

    @property
    def inputs(self) -> FloatArray | float:
        """How many inputs (m, k) no product before has had: one of each expert, however many matrices it meets."""
        return 0.0 if self.shared else self.together

    def multiplied_rows(self, units: int) -> FloatArray:
        """Rows of whole blocks on `units` that have a part of them each, in the mean over where in one they meet.

        Those that are together lie one behind the other in whole blocks, and each but the first shares one with the
        one before it.
        """
        sharing = 1.0 - 1.0 / np.maximum(self.together, 1.0)
        return self.m + units * (self.block - 1.0) * sharing

    @property
    def flops(self) -> FloatArray:
        return 2.0 * self.m * self.n * self.k * self.count

    @property
    def most_flops(self) -> FloatArray:
        """Those of the rank with most rows."""
        return self.flops * self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """FLOPs of the matrix products that a kernel does, so many of which it may `reach` for one that the vector units
    could do, bytes that it reads and writes, and `least` seconds."""

    name: str
    flops: FloatArray | float = 0.0
    bytes: FloatArray | float = 0.0
    reach: float = 1.0
    least: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Kernels of a recurrence between its products, `forward` and `backward`."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorExchanges:
    """Collectives over the tensor axis on one whole hidden activation, counted per pass.

    Without sequence parallel they are all-reduces; with it, all-gathers and reduce-scatters.
    """

    forward: float = 0.0
    backward: float = 0.0
    gathers_forward: float = 0.0
    scatters_forward: float = 0.0
    gathers_backward: float = 0.0
    scatters_backward: float = 0.0
    small: float = 0.0


NO_EXCHANGE = TensorExchanges()
PAIR = TensorExchanges(
    forward=1.0,
    backward=1.0,
    gathers_forward=1.0,
    scatters_forward=1.0,
    gathers_backward=1.0,
    scatters_backward=1.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWork:
    """One part of a block: products, scores, element-wise traffic, kernels, collectives and parameters.

    `score_flops` forward FLOPs of queries by keys and scores by values over visible keys by heads of `score_dim`
    features or of a `scan`, `scores` the elements of the whole score matrices, with `keys` keys for each query; of
    context ranks one has `heaviest` times the mean of them, for which the others wait; `traffic` and `backward_traffic`
    bytes of element-wise work; `kernels` started forward (twice as many backward), and `met` and
    `met_backward` beside them to meet the keys of other context ranks; `exchanges` take place `exchanged` times (once
    or not at all); `parameters` on one device, of which `expert_parameters` lie on the grid of experts. Of a part that
    `closes`, nothing after its last product keeps anything for backward. Bytes of one rank that cross to others in a
    pass: `circulated` keys and values that context ranks pass on, `traded` queries, keys, values and outputs that they
    trade for heads, `dispatched` tokens on their way to their experts (and as many back), each `copies` times
    and to experts of `chosen_groups` runs of all `groups`,
    `regathered` those that expert tensor ranks gather.
    """

    name: str
    parameters: FloatArray
    products: tuple[Product, ...] = ()
    score_flops: FloatArray | float = 0.0
    scan: Scan | None = None
    scores: FloatArray | float = 0.0
    score_dim: float = 0.0
    keys: float = 1.0
    heaviest: FloatArray | float = 1.0
    traffic: FloatArray | float = 0.0
    backward_traffic: FloatArray | float = 0.0
    kernels: FloatArray | float = 0.0
    met: FloatArray | float = 0.0
    met_backward: FloatArray | float = 0.0
    exchanges: TensorExchanges = NO_EXCHANGE
    exchanged: FloatArray | float = 1.0
    closes: bool = False
    expert_parameters: FloatArray | float = 0.0
    circulated: FloatArray | float = 0.0
    traded: FloatArray | float = 0.0
    dispatched: FloatArray | float = 0.0
    copies: float = 1.0
    groups: float = 1.0
    chosen_groups: float = 1.0
    regathered: FloatArray | float = 0.0
