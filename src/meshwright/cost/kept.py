"""What backward keeps of every part of a block, tensor by tensor, as the training software runs it.

Here as our own modules run it, operator by operator under torch's autograd; `kept_fused` tells of stacks with fused
kernels. Tests hold every figure of this module against a count of the modules' own saved tensors.
"""

from __future__ import annotations

import numpy as np

from meshwright.cost.kept_attention import kept_attention, kept_latent_attention
from meshwright.cost.kept_norms import kept_norm, root_mean_square
from meshwright.cost.kept_part import Kept
from meshwright.cost.received import received_choices, sent_choices
from meshwright.cost.recurrence_work import recurrence_shapes
from meshwright.cost.software import Software
from meshwright.cost.thin import thin_kept, thin_matrices
from meshwright.cost.vocabulary import first_rows
from meshwright.cost.work import FloatArray, Sizes
from meshwright.spec.model import (
    Activation,
    Attention,
    Block,
    Choice,
    Embedding,
    FeedForward,
    Head,
    LatentAttention,
    Mixer,
    Mixture,
    Recurrence,
    Score,
    Transform,
    Weighing,
)

_INDEX_BYTES = 8.0
_LOSS_BYTES = 9.0  # of every token the column of its target, and whether this rank holds it


def kept_eager(block: Block, sizes: Sizes, software: Software) -> tuple[Kept, ...]:
    """The parts of `block` in forward order."""
    if isinstance(block, Embedding):
        return (_embedding(block, sizes),)
    if isinstance(block, Head):
        return _head(block, sizes, software)
    parts: list[Kept] = []
    for place, part in block.places.items():
        inside = _mixer(part, sizes) if isinstance(part, Mixer) else _transform(part, sizes, beside=block.dense)
        inside = thin_kept(inside, thin_matrices(block, place, sizes.tensor), sizes)
        before = () if part.norm is None else (kept_norm(part.norm, sizes),)
        after = () if part.post_norm is None else (kept_norm(part.post_norm, sizes),)
        parts += [*before, inside, *after]
    if block.sum_norm is not None:
        parts.append(kept_norm(block.sum_norm, sizes))
    if block.scaled:
        parts.append(Kept(saved=np.where(sizes.itemsize < sizes.wide, sizes.itemsize, 0.0)))
    return tuple(parts)


def _mixer(mixer: Mixer, sizes: Sizes) -> Kept:
    if isinstance(mixer, Attention):
        return kept_attention(mixer, sizes)
    return kept_latent_attention(mixer, sizes) if isinstance(mixer, LatentAttention) else recurrence(mixer, sizes)


def _transform(part: Transform, sizes: Sizes, *, beside: FeedForward | None) -> Kept:
    return _feed_forward(part, sizes) if isinstance(part, FeedForward) else _mixture(part, sizes, beside=beside)


def recurrence(mixer: Recurrence, sizes: Sizes) -> Kept:
    """An estimate, for no module of ours runs one: the input of the first product and what it gives, what the scan and
    its norm give, and by the delta rule keys, queries and values as they meet; backward has gradients of those beside
    what it convolves again and, of Mamba-2, states and their gradients in fp32 and narrow."""
    m, e, shapes = sizes.tokens, sizes.itemsize, recurrence_shapes(mixer, sizes)
    given = 2.0 * shapes.inner + 2.0 * shapes.shared + mixer.steers * shapes.heads
    met = shapes.mixed if mixer.delta else 0.0
    states = (2.0 if mixer.delta else 2.0 + 8.0 / e) * shapes.states
    return Kept(
        saved=e * m * (mixer.width + given + 3.0 * shapes.inner + met),
        working=e * m * (given + 2.0 * shapes.mixed + shapes.inner + states),
        copied=mixer.matrix_parameters / sizes.tensor,
    )


def hidden_copies(*, gated: bool, activation: Activation) -> float:
    """Copies of the hidden features that backward keeps: what the activation reads or gives, the two factors of a
    gate, and the input of the last product. A plain relu gives what the product reads, and needs no more; a clamped
    gate forms again what it gave."""
    relu = activation is Activation.RELU or (gated and activation is Activation.CLAMPED_SWIGLU)
    return (3.0 if relu else 4.0) if gated else (1.0 if relu else 2.0)


def _hidden_beside(*, gated: bool, activation: Activation) -> float:
    """Copies that the activation's backward has beside those: gradients of what it gave and read, where the last
    product's input is gone and no relu needs it, and what a clamped gate forms again."""
    if gated and activation is Activation.CLAMPED_SWIGLU:
        # As nn.feed_forward has it: the gradient of what it gave, both factors', two parts of a slope, and a mask of a
        # byte beside elements of two; less the last product's input.
        return 4.5
    return 2.0 if gated or activation in (Activation.RELU, Activation.RELU_SQUARED) else 1.0


def _feed_forward(part: FeedForward, sizes: Sizes) -> Kept:
    m, e, h = sizes.tokens, sizes.itemsize, part.hidden / sizes.tensor
    inside = hidden_copies(gated=part.gated, activation=part.activation) * h
    beside = _hidden_beside(gated=part.gated, activation=part.activation)
    late = 0.0 if part.activation is Activation.RELU and not part.gated else h
    return Kept(
        saved=e * m * (part.width + inside),
        working=e * m * (beside * h + part.width),
        ending=e * m * (h + part.width),
        fed=e * m * (part.width + late),
        late=e * m * late,
        waits=e * m * (2.0 * part.width + (3.0 if part.gated else 2.0) * h),
        copied=part.matrix_parameters / sizes.tensor,
    )


def _mixture(part: Mixture, sizes: Sizes, *, beside: FeedForward | None) -> Kept:
    """Router, rows sorted by expert, experts, and rows before and after their weights.

    Backward has most when rows are given their weights' gradients, of which forward kept one set that is gone by then;
    when the experts' are all there; and, of experts in one kernel, at their activation. Of every choice the index of
    its expert, its place in the order twice, its weight before and after sorting. On a grid of experts a rank routes
    its own tokens, sends the choices of those and receives others; a shared branch reads the tokens of all tensor ranks
    beside them, once experts are done. Ranks that divide an expert receive the choices of all of them: what they make
    of those lies in two orders and, one rank's part after the other, as it is summed, beside what came; and the
    gradients of it in two.
    """
    m, e = sizes.tokens, sizes.itemsize
    grid = np.asarray(sizes.expert + sizes.zeros) > 0.0
    slices = np.where(grid, sizes.expert_tensor, sizes.tensor)
    holders = np.where(grid, sizes.expert, 1.0)
    own = m / np.where(grid, sizes.tensor, 1.0)
    chosen, h = own * part.top_k, part.hidden / slices
    sent, received = sent_choices(part, sizes), received_choices(part, sizes)
    inside = hidden_copies(gated=part.gated, activation=part.activation) * h
    choices = chosen * (3.0 * _INDEX_BYTES + e) + _scores_kept(part, own, chosen, sizes)
    read = np.where((part.shared is not None) & (own < m), own + m, own)
    saved = e * (read * part.width + received * (part.width + inside) + 2.0 * sent * part.width) + choices
    waits = m * (part.width + part.experts) + received * (2.0 * part.width + (3.0 if part.gated else 2.0) * h)
    experts = float(part.width * part.hidden * (3 if part.gated else 2) * part.experts) / (slices * holders)
    saved = saved + _gate(part, sizes, tokens=own, beside=beside)
    copied = sum(norm.parameters for norm in part.inner_norms) + part.width * part.experts + experts
    branch = sizes.zeros
    if part.shared is not None:
        shared = hidden_copies(gated=part.shared.gated, activation=part.shared.activation)
        branch = e * m * shared * part.shared.hidden / sizes.tensor
        saved = saved + branch
        products = 3.0 if part.shared.gated else 2.0
        waits = waits + m * (part.width + products * part.shared.hidden / sizes.tensor)
        copied = copied + part.shared.matrix_parameters / sizes.tensor
    if part.shared_gate:
        saved, waits, copied = saved + e * m * (part.width + 1.0), waits + m, copied + part.width
    behind = branch + e * ((read - own) * part.width + (m * (part.width + 1.0) if part.shared_gate else 0.0))
    lies = np.where(grid & (holders * slices > 1.0), received, 0.0)
    parts = lies + np.where(slices > 1.0, lies / slices, 0.0)

    hidden = _hidden_beside(gated=part.gated, activation=part.activation) * received * h - 2.0 * sent * part.width
    least = 2.0 * sent * part.width
    most = np.where(sizes.groups_experts, np.maximum(hidden, least), least)
    return Kept(
        saved=saved,
        working=e * (own * part.width + np.maximum(most, (parts + lies) * part.width - least)),
        ending=e * (own * part.width - received * inside),
        given=e * (own * part.width - received * inside - least) - branch,
        giving=e * received * ((2.0 if part.gated else 1.0) * part.width + h),
        making=np.where(lies > 0.0, e * ((parts + 2.0 * lies) * part.width - least) - behind, 0.0),
        inside=e * ((lies + received) * part.width - least) - behind,
        going=e * ((own + received) * part.width - least) - behind,
        waits=e * waits,
        copied=copied,
        experts=experts,
    )


def _scores_kept(part: Mixture, tokens: FloatArray, choices: FloatArray, sizes: Sizes) -> FloatArray:
    """In fp32 at the least the weights of choices, a softmax over them alone; or the scores of all experts, and what is
    chosen of them with its sum where one is divided by the other."""
    how = part.routing
    parted = how.weighing is Weighing.NORMALIZED and how.choice is not Choice.PROTOTYPES
    alone = parted and how.score is Score.SOFTMAX and how.groups == 1
    if alone and not how.bias_rate and not how.balance_loss:
        return choices * sizes.wide
    return sizes.wide * (tokens * part.experts + ((choices + tokens) if parted else 0.0))


def _gate(part: Mixture, sizes: Sizes, *, tokens: FloatArray, beside: FeedForward | None) -> FloatArray:
    """Norms of what the router and the experts read, and the weights of choices before the scales of experts, with
    those scales.

    Both norms keep what enters, as the norm of a branch `beside` does where its tokens are the same. The router keeps
    what it multiplies whether it was normed or not.
    """
    found, e = sizes.zeros, sizes.itemsize
    known = beside is not None and beside.norm is not None
    for _ in part.inner_norms:
        found = found + root_mean_square(tokens * part.width, tokens, sizes, shared=known)
        known = True
    if part.expert_scale:
        found = found + sizes.tokens * part.top_k * np.where(e < sizes.wide, 2.0 * e, e)
    return found


def _embedding(block: Embedding, sizes: Sizes) -> Kept:
    """The tokens; where ranks share the table, also which rows are here."""
    split = np.where(sizes.tensor > 1.0, 1.0, 0.0)
    return Kept(saved=sizes.tokens * (_INDEX_BYTES + split), working=sizes.tokens * block.width * sizes.itemsize)


def _head(block: Head, sizes: Sizes, software: Software) -> tuple[Kept, ...]:
    """One copy of the logits, over which backward writes their gradient, another inside a soft cap.

    A loss of torch's own keeps their log-softmax in fp32 instead.
    """
    m, e = sizes.tokens, sizes.itemsize
    norms = () if block.norm is None else (kept_norm(block.norm, sizes),)
    rows = first_rows(block.vocab, sizes.tensor)
    logits = m * (float(block.vocab) if software.whole_logits else rows)
    capped = 0.0 if block.softcap is None else e * logits
    head = Kept(
        saved=m * (e * block.width + _LOSS_BYTES + sizes.wide),
        working=e * m * block.width,
        fed=e * m * block.width,
        waits=e * m * block.width,
        logits=capped + logits * (e if software.fused_loss or software.narrow_loss else sizes.wide),
        copied=rows * block.width,
    )
    return (*norms, head)
