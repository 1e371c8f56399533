"""From a block of the model to its work: matrix products, scores, traffic, collectives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.cost.blockwise_work import with_meetings
from meshwright.cost.copied_heads import beside_even_share
from meshwright.cost.heaviest import heaviest_rank
from meshwright.cost.loss_chunks import loss_runs
from meshwright.cost.mixture_work import entering, mixture_work
from meshwright.cost.norm_work import NORM, norm_parameters, norm_work, norms_work, scale_work
from meshwright.cost.recurrence_work import recurrence_work
from meshwright.cost.thin import thin_matrices, thin_work
from meshwright.cost.vocabulary import first_rows
from meshwright.cost.work import PAIR, FloatArray, PartWork, Product, Sizes, TensorExchanges
from meshwright.spec.model import (
    Attention,
    Block,
    Embedding,
    FeedForward,
    Head,
    LatentAttention,
    Layer,
    Mixer,
    QueryKeyNorm,
    Recurrence,
    Transform,
    prefix_tokens,
    score_flops_per_token,
    visible_keys,
)

EMBEDDING = "embedding"
ATTENTION = "attention"
FEED_FORWARD = "feed forward"
HEAD = "head and loss"
# Kernels that a part starts forward, where products, attention, residuals and element-wise work are one or a few each;
# backward starts twice as many.
ATTENTION_KERNELS = 8.0  # without what turns and norms queries and keys
ROTARY_KERNELS = 8.0
QUERY_KEY_NORM_KERNELS = 4.0
_VALUE_NORM_KERNELS = 2.0
_GATE_KERNELS = 2.0
_LATENT_KERNELS = 26.0  # with both norms of latents and what turns
GATED_KERNELS, _PLAIN_KERNELS = 6.0, 4.0


def block_work(block: Block, sizes: Sizes) -> tuple[PartWork, ...]:
    """The parts of `block` for one microbatch on one device; their parameters sum to the block's when tensor is 1."""
    sizes = sizes.times(block.tokens)
    parts = _parts(block, sizes)
    return parts if np.all(sizes.slices == 1.0) else tuple(_sliced(part, sizes.slices) for part in parts)


def _sliced(part: PartWork, slices: FloatArray | float) -> PartWork:
    """The same work in more and smaller products, with a start of every kernel for each."""
    products = tuple(replace(p, m=p.m / slices, count=p.count * slices) for p in part.products)
    return replace(part, products=products, kernels=part.kernels * slices)


def _parts(block: Block, sizes: Sizes) -> tuple[PartWork, ...]:
    if isinstance(block, Embedding):
        return (_embedding(block, sizes),)
    if isinstance(block, Head):
        return _head(block, sizes)
    parts: list[PartWork] = []
    if block.mixer is not None:
        mixer = with_meetings(_mixer(block, block.mixer, sizes), sizes)
        mixer = thin_work(mixer, thin_matrices(block, "mixer", sizes.tensor))
        parts += [*norms_work(block.mixer, sizes), replace(mixer, heaviest=heaviest_rank(block.mixer, sizes))]
    for place, part in block.places.items():
        if not isinstance(part, Mixer):
            thin = thin_matrices(block, place, sizes.tensor)
            parts += [*norms_work(part, sizes), thin_work(_transform(part, sizes), thin)]
    if block.sum_norm is not None:
        parts.append(norm_work(block.sum_norm, sizes))
    if block.scaled:
        parts.append(scale_work(block, sizes))
    if block.extra_parameters:
        parts.append(PartWork(name=NORM, parameters=sizes.zeros + block.extra_parameters))
    return tuple(parts)


def _mixer(layer: Layer, mixer: Mixer, sizes: Sizes) -> PartWork:
    length = int(sizes.sequence)
    flops = score_flops_per_token(layer, length) * sizes.tokens / sizes.tensor
    if not isinstance(mixer, Recurrence):
        flops = flops * np.where(np.asarray(sizes.context) > 1.0, 1.0, _beside_seen(mixer, sizes))
    if isinstance(mixer, Attention):
        return _attention(mixer, flops, sizes)
    if isinstance(mixer, LatentAttention):
        return _latent_attention(mixer, flops, sizes)
    return recurrence_work(mixer, sizes)


def _beside_seen(mixer: Attention | LatentAttention, sizes: Sizes) -> FloatArray:
    """Scores that a kernel works out for each that is seen: under a dense mask all, and of a slice behind the first
    those of its queries to all keys up to its last."""
    length, slices = int(sizes.sequence), sizes.slices + sizes.zeros
    dense = _is_dense(mixer, sizes)
    cut = (slices > 1.0) & bool(sizes.dense_masks)
    if not dense and not cut.any():
        return sizes.zeros + 1.0
    chunk, causal = getattr(mixer, "chunk", None), getattr(mixer, "causal", True)
    seen = visible_keys(length, mixer.window, chunk, causal=causal, prefix=prefix_tokens(length, mixer.prefix))
    first = 0.0 if dense else (1.0 - slices / length) / (2.0 * slices)  # the first has no mask of its own
    keys = length * ((1.0 + 1.0 / slices) / 2.0 - first / slices)
    return np.where(cut, keys, length if dense else seen) / seen


def _is_dense(mixer: Attention | LatentAttention, sizes: Sizes) -> bool:
    """The mask is a matrix of its own, which hides no score from the kernel; context ranks cut it into tiles."""
    if isinstance(mixer, LatentAttention) and mixer.indexer is not None:
        return False
    narrow = (mixer.window or sizes.sequence) < sizes.sequence
    narrow = narrow or (getattr(mixer, "chunk", None) or sizes.sequence) < sizes.sequence
    return sizes.dense_masks and (sizes.masked or narrow or mixer.prefix > 0.0)


def _mask_bytes(mixer: Attention | LatentAttention, sizes: Sizes) -> FloatArray:
    """The kernel's own copy of the mask, one element a score of one head; of context ranks only tiles have one."""
    if not _is_dense(mixer, sizes):
        return sizes.zeros
    return np.where(np.asarray(sizes.context) > 1.0, 0.0, sizes.scores * sizes.itemsize)


def _transform(part: Transform, sizes: Sizes) -> PartWork:
    return _feed_forward(part, sizes) if isinstance(part, FeedForward) else mixture_work(part, sizes)


def _attention(mixer: Attention, score_flops: FloatArray, sizes: Sizes) -> PartWork:
    m, t, e = sizes.tokens, sizes.tensor, sizes.itemsize
    w = sizes.zeros + mixer.width
    query = mixer.heads * mixer.head_dim / t
    key = np.maximum(mixer.kv_heads / t, 1.0) * mixer.head_dim
    keys = 1.0 if mixer.shared_key_value else 2.0
    held = key * mixer.keys
    # Ranks that trade heads have a copy of the keys that their queries ask for; keys are turned and values are not.
    sent = held * np.maximum(sizes.inner / np.maximum(mixer.kv_heads / t, 1.0), 1.0)
    normed = mixer.qk_norm is not QueryKeyNorm.NONE
    replicated = (2 * mixer.head_dim if mixer.qk_norm is QueryKeyNorm.HEAD else 0) + (
        mixer.width if mixer.output_bias else 0
    )
    own = (mixer.parameters - norm_parameters(mixer) - replicated) / t + beside_even_share(mixer, t)
    residual = 3.0 * e * w / sizes.split
    forward, backward = _turn_bytes(sizes) if mixer.rotary else (sizes.zeros, sizes.zeros)
    forward, backward = forward + (2.0 * e if normed else 0.0), backward + (3.0 * e if normed else 0.0)
    values, gates = held if mixer.value_norm else 0.0, query if mixer.gated else 0.0
    forward = forward * (query + held) + 2.0 * e * values + 3.0 * e * gates
    backward = backward * (query + held) + 3.0 * e * values + 5.0 * e * gates
    widened = _widened(sizes, read=query + keys * held, written=query)
    masks = 2.0 * _mask_bytes(mixer, sizes)
    again = 3.0 if sizes.eager else 1.5  # eager: a sum for the residual, and two for three projections' inputs
    entering = query + keys * held + gates
    added, summed = _bias_bytes(sizes, entering=mixer.qkv_bias * entering, leaving=mixer.output_bias * w)
    copied = sizes.unfused * 2.0 * e
    dropped = sizes.dropout * w / sizes.split
    return PartWork(
        name=ATTENTION,
        parameters=own + replicated,
        products=(
            Product(m=m, n=query, k=w, of=("query",)),
            *((Product(m=m, n=query, k=w, of=("gate",)),) if mixer.gated else ()),
            Product(
                m=m * mixer.keys, n=key, k=w, count=keys, of=("key", "value")[: int(keys)], shared=mixer.keys == 1.0
            ),
            Product(m=m, n=w, k=query, of=("output",)),
        ),
        score_flops=score_flops,
        scores=sizes.scores * mixer.keys * mixer.heads / t,
        score_dim=float(mixer.head_dim),
        keys=mixer.keys,
        traffic=m * (forward + widened + residual + added + dropped + copied * query) + masks,
        backward_traffic=m * (backward + widened + again * residual + summed + dropped + copied * (query + entering))
        + 1.5 * masks,
        kernels=ATTENTION_KERNELS
        + (ROTARY_KERNELS if mixer.rotary else 0.0)
        + (QUERY_KEY_NORM_KERNELS if normed else 0.0)
        + (_VALUE_NORM_KERNELS if mixer.value_norm else 0.0)
        + (_GATE_KERNELS if mixer.gated else 0.0),
        exchanges=PAIR,
        closes=mixer.post_norm is None,
        circulated=e * m * 2.0 * sent,
        traded=e * m * 2.0 * (query + sent),
    )


def _bias_bytes(sizes: Sizes, *, entering: FloatArray, leaving: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Bytes per token to add biases where a kernel of its own does, and to sum their gradients.

    The bias of what is `leaving` a tensor rank is added after the sum over ranks, beside the residual.
    """
    added = sizes.added_biases * 2.0 * sizes.itemsize * entering
    return added, sizes.summed_biases * sizes.itemsize * (entering + leaving / sizes.split)


def _widened(sizes: Sizes, *, read: FloatArray, written: FloatArray) -> FloatArray:
    """Bytes per token to cast what attention reads and writes in a pass."""
    wide, e = sizes.attended, sizes.itemsize
    return np.where(wide > e, (wide + e) * (read + written), 0.0)


def _turn_bytes(sizes: Sizes) -> tuple[FloatArray, FloatArray]:
    """Bytes per rotated feature forward and backward: one pass each where fused, else every operator's.

    As nn.rotary.rotate has it: four products of halves, which read features as they are, two sums of halves, both
    joined and cast back. Backward: four products (4), a sign (1), four sums (6), halves laid into whole ones (3).
    """
    if not sizes.eager:
        return 2.0 * sizes.itemsize, 3.0 * sizes.itemsize
    forward = 2.0 * sizes.itemsize + 7.0 * sizes.wide + sizes.casts
    return forward, 14.0 * sizes.wide + sizes.zeros


def _latent_attention(mixer: LatentAttention, score_flops: FloatArray, sizes: Sizes) -> PartWork:
    """Down-projections are the same on every tensor rank; heads are divided."""
    m, t, e = sizes.tokens, sizes.tensor, sizes.itemsize
    w = sizes.zeros + mixer.width
    heads = mixer.heads / t
    query_dim, up_dim = mixer.nope_dim + mixer.rope_dim, mixer.nope_dim + mixer.value_dim
    latent = mixer.kv_rank + mixer.rope_dim
    products = [
        Product(m=m, n=sizes.zeros + latent, k=w, of=("kv_down",)),
        Product(m=m, n=heads * up_dim, k=sizes.zeros + mixer.kv_rank, of=("kv_up",)),
    ]
    whole = float(mixer.width * latent + mixer.kv_rank)
    rank = mixer.query_rank
    if rank is None:
        products.append(Product(m=m, n=heads * query_dim, k=w, of=("query",)))
    else:
        products += [
            Product(m=m, n=sizes.zeros + rank, k=w, of=("query_down",)),
            Product(m=m, n=heads * query_dim, k=sizes.zeros + rank, of=("query_up",)),
        ]
        whole += mixer.width * rank + rank
    if mixer.indexer is not None:
        indexer, source = mixer.indexer, sizes.zeros + (rank or mixer.width)
        products += [
            Product(m=m, n=sizes.zeros + indexer.heads * indexer.head_dim, k=source),
            Product(m=m, n=sizes.zeros + indexer.head_dim + indexer.heads, k=w),
        ]
        whole += indexer.parameters(mixer.width, rank or mixer.width)
    products.append(Product(m=m, n=w, k=heads * mixer.value_dim, of=("output",)))
    own = mixer.parameters - norm_parameters(mixer) - whole
    inner = heads * (2.0 * query_dim + mixer.value_dim)
    widened = _widened(sizes, read=inner, written=heads * mixer.value_dim)
    traffic = e * m * (3.0 * w / sizes.split + 2.0 * inner + 4.0 * (latent + (rank or 0))) + m * widened
    return PartWork(
        name=ATTENTION,
        parameters=own / t + whole,
        products=tuple(products),
        score_flops=score_flops,
        scores=sizes.scores * heads,
        score_dim=0.5 * (query_dim + mixer.value_dim),
        traffic=traffic,
        backward_traffic=1.5 * traffic,
        kernels=_LATENT_KERNELS,
        exchanges=PAIR,
        closes=mixer.post_norm is None,
        circulated=e * m * heads * (query_dim + mixer.value_dim),
        traded=e * m * heads * 2.0 * (query_dim + mixer.value_dim),
    )


def _feed_forward(part: FeedForward, sizes: Sizes) -> PartWork:
    m, t, e = sizes.tokens, sizes.tensor, sizes.itemsize
    w, h = sizes.zeros + part.width, part.hidden / t
    replicated = part.width if part.bias else 0
    own = part.parameters - norm_parameters(part) - replicated
    residual = 3.0 * w / sizes.split
    # Gated, the activation is 2 passes and the product 3; backward both factors' gradients and the activation's are 3.
    back = (9.0 if sizes.eager else 8.0) if part.gated else 3.0
    # A residual is a sum of 3 passes; eager backward adds the gradients of both first products' inputs as well.
    again = 2.0 if sizes.eager and part.gated else 1.0
    _, summed = _bias_bytes(sizes, entering=part.bias * h * (2.0 if part.gated else 1.0), leaving=part.bias * w)
    dropped = sizes.dropout * w / sizes.split
    return PartWork(
        name=FEED_FORWARD,
        parameters=own / t + replicated,
        products=(
            Product(m=m, n=h, k=w, count=2.0 if part.gated else 1.0, of=entering(part)),
            Product(m=m, n=w, k=h, of=("down",)),
        ),
        traffic=m * (e * ((5.0 if part.gated else 2.0) * h + residual) + dropped),
        backward_traffic=m * (e * (back * h + again * residual) + summed + dropped),
        kernels=GATED_KERNELS if part.gated else _PLAIN_KERNELS,
        exchanges=PAIR,
        closes=part.post_norm is None,
    )


def _embedding(block: Embedding, sizes: Sizes) -> PartWork:
    hidden = sizes.tokens * block.width * sizes.itemsize
    return PartWork(
        name=EMBEDDING,
        parameters=sizes.zeros + (first_rows(block.vocab, sizes.tensor) + block.positions) * block.width,
        traffic=(2.0 + (2.0 if block.positions else 0.0)) * hidden,
        backward_traffic=3.0 * hidden,
        kernels=2.0 + (1.0 if block.positions else 0.0),
        exchanges=TensorExchanges(forward=1.0, scatters_forward=1.0, gathers_backward=1.0),
    )


def _head(block: Head, sizes: Sizes) -> tuple[PartWork, ...]:
    """The product with the vocabulary and the loss, which reads logits in fp32 by chunks.

    Where every tensor rank has all logits, they are gathered, joined to one tensor and taken apart again. Where there
    are several runs of tokens, the gradient of the matrix that each but the first gives is read, and its sum is read
    and written.
    """
    m, e = sizes.tokens, sizes.itemsize
    w, v = sizes.zeros + block.width, first_rows(block.vocab, sizes.tensor)
    own = (0 if block.tied else block.width) + (1 if block.bias else 0)
    norms = () if block.norm is None else (norm_work(block.norm, sizes),)
    forward, backward = _loss_bytes(sizes)
    runs = loss_runs(block, sizes.loss_chunks, m)
    exchanges = TensorExchanges(backward=1.0, gathers_forward=1.0, scatters_backward=1.0, small=3.0)
    read, joined = v, sizes.zeros
    if sizes.whole_logits:
        features = block.vocab / block.width  # an all-gather is half of an all-reduce
        exchanges = replace(exchanges, forward=0.5 * features, gathers_forward=1.0 + features, small=0.0)
        read, joined = sizes.zeros + block.vocab, np.where(sizes.tensor > 1.0, 2.0 * e, 0.0)
    head = PartWork(
        name=HEAD,
        parameters=own * v,
        products=(Product(m=m / runs, n=v, k=w, count=runs),),
        traffic=m * read * (forward + joined),
        backward_traffic=m * read * backward + m * v * joined + 3.0 * e * (runs - 1.0) * v * w,
        kernels=runs * (8.0 + (2.0 if block.softcap else 0.0)),
        exchanges=exchanges,
    )
    return (*norms, head)


def _loss_bytes(sizes: Sizes) -> tuple[FloatArray, FloatArray]:
    """Bytes per logit forward and backward: of one kernel each, of every operator where eager, else of a few passes.

    Those of nn.loss, where `fused_loss`: the largest is found, differences are written in fp32, their exponentials are
    taken in place and summed; backward takes them again and writes each, weighed, over its logit.
    """
    e = sizes.itemsize
    if sizes.loss_kernel is not None:
        read = 3.0 if sizes.loss_kernel.early else 2.0 if sizes.loss_kernel.tops else 1.0
        scaled = 0.0 if sizes.loss_kernel.early and sizes.loss_chunks != 1 else 2.0
        return read * e + sizes.loss_kernel.metrics * (sizes.casts + 2.0 * sizes.wide), scaled * e
    if not sizes.eager:
        return 2.0 * e + 16.0, 2.0 * e + 12.0
    if sizes.fused_loss:
        return 2.0 * e + 4.0 * sizes.wide, 2.0 * e + 4.0 * sizes.wide
    return e + sizes.casts + 5.0 * sizes.wide, e + sizes.casts + 7.0 * sizes.wide
