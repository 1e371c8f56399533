"""What backward keeps of attention: of what kernels are given and give, or of scores that are written out."""

from __future__ import annotations

import numpy as np

from meshwright.cost.kept_context import kept_by_meeting, meeting_bytes, traded_copies
from meshwright.cost.kept_keys import GivenKeys, all_given, given_keys, later_share, left_share, mean_runs
from meshwright.cost.kept_norms import head_norm_parameters, head_norms, root_mean_square, value_norm
from meshwright.cost.kept_part import Kept
from meshwright.cost.kept_scores import (
    beside_written_out,
    first_masked,
    grows_with_keys,
    mask_copy,
    writes_scores,
    written_out,
)
from meshwright.cost.table import BoolArray
from meshwright.cost.work import FloatArray, Sizes
from meshwright.spec.model import Attention, LatentAttention, QueryKeyNorm

# A seed and an offset; flash attention keeps a scalar beside them that it does not use.
_FLASH_STATE_BYTES, _MASKED_STATE_BYTES = 24.0, 16.0


def kept_attention(mixer: Attention, sizes: Sizes) -> Kept:
    """Input, queries, keys, values and output, what the core keeps inside, and the inputs of norms on the former."""
    m, t, e = sizes.tokens, sizes.tensor, sizes.itemsize
    heads, key_heads = mixer.heads / t, np.maximum(mixer.kv_heads / t, 1.0)
    query, key = heads * mixer.head_dim, key_heads * mixer.head_dim
    held = key * mixer.keys
    normed = mixer.qk_norm is not QueryKeyNorm.NONE
    same = mixer.shared_key_value and mixer.rotary is None and not normed and not mixer.value_norm
    own = (1.0 if same else 2.0) * held
    mask, masked = mask_copy(mixer, sizes), first_masked(mixer, sizes)
    given = given_keys(query, held, own, sizes, masked=masked)
    scores = sizes.met_scores * mixer.keys * heads if sizes.unfused else sizes.zeros
    if sizes.unfused:
        inside = e * m * (query + own) + sizes.score_bytes * scores
    elif writes_scores(mixer, sizes):
        inside = written_out(mixer, heads, query, sizes) + e * m * own * left_share(sizes)
    else:
        inside = _fused_core(given, query=query, keys=2.0 * held, written=query, heads=heads, sizes=sizes, mask=mask)
    met = held * traded_copies(key_heads, sizes)
    inside = kept_by_meeting(
        inside,
        query=query,
        output=query,
        own=met if same else 2.0 * met,
        joined=2.0 * met,
        heads=heads,
        sizes=sizes,
    )
    # The sinks' copy in less precision is an input that only a repeated core needs.
    core = inside - e * m * (query + own) - (np.where(e < sizes.wide, e * heads, 0.0) if mixer.sinks else 0.0)
    width, gate = sizes.zeros + mixer.width, query if mixer.gated else sizes.zeros
    matrices = width * (2.0 * query + gate + (1.0 if mixer.shared_key_value else 2.0) * key)
    working = e * (m * (2.0 * query + given.met + width) + 2.0 * scores)
    grows = grows_with_keys(mixer, heads, query, sizes) if writes_scores(mixer, sizes) else None
    traded, entering = all_given(2.0 * met, own, sizes), e * m * (width + query + 2.0 * gate)
    joined, first = _of_runs(given, mask, sizes, traded=traded, masked=masked, grows=grows)
    capped = mixer.softcap is not None
    meeting = meeting_bytes(query=query, output=query, keys=traded.met, heads=heads, capped=capped, sizes=sizes)
    late = np.where(meeting > 0.0, e * m * query, 0.0)
    working = np.maximum(working, meeting + np.where(meeting > 0.0, e * m * width, 0.0) - late)
    if writes_scores(mixer, sizes):
        working = np.maximum(working, beside_written_out(mixer, heads, query, sizes))
    return Kept(
        saved=entering + inside + head_norms(mixer, query, key, sizes) + value_norm(mixer, key, sizes),
        core=core,
        working=working,
        ending=e * m * (query + width),
        turning=_turning(mixer, query, held, sizes) + e * m * (given.met + width),
        done=inside + e * m * query,
        fed=e * m * width + late,
        late=late,
        waits=e * m * (2.0 * width + 2.0 * query + (1.0 if mixer.shared_key_value else 2.0) * key),
        copied=matrices + head_norm_parameters(mixer, query, key),
        handed=e * m * own * left_share(sizes),
        joined=joined,
        first=first,
        left=e * m * given.left,
    )


def _turning(mixer: Attention, query: FloatArray, key: FloatArray, sizes: Sizes) -> FloatArray:
    """Bytes of queries that are turned back: their gradient in the precision of the angles, and of halves of them the
    last product with what it is of, beside three that are done. Their own gradient is there too where some features
    pass, and with that of keys where it came as one with theirs from ranks that traded it."""
    if mixer.rotary is None:
        return sizes.zeros
    e, wide, turned = sizes.itemsize, sizes.wide, mixer.rotary.dims / mixer.head_dim
    each = np.where(e < wide, 2.0 * wide + 1.5 * e, 3.0 * e) * turned + (e if turned < 1.0 else 0.0)
    traded = np.where(np.asarray(sizes.inner) > 1.0, e * (key + (query if turned == 1.0 else 0.0)), 0.0)
    return np.asarray(sizes.tokens * (query * each + traded))


def _of_runs(
    given: GivenKeys,
    mask: FloatArray,
    sizes: Sizes,
    *,
    traded: GivenKeys,
    masked: BoolArray,
    grows: FloatArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Bytes of what all slices but the first put together, and of what that one has of such kind: of what is `given`
    and the mask, of all that `grows` with the keys where scores are written out, or of what context ranks `traded`."""
    share, each = later_share(sizes), sizes.itemsize * sizes.tokens
    if grows is None:
        later = np.where(masked, mask * share, mask)
        joined, first = each * given.joined + later, each * given.first + mask - later
    else:
        joined, first = grows * share, grows * (1.0 - share)
    context = np.asarray(sizes.context + sizes.zeros) > 1.0
    return np.where(context, each * traded.joined, joined), np.where(context, 0.0, first)


def _fused_core(
    given: GivenKeys,
    *,
    query: FloatArray,
    keys: FloatArray,
    written: FloatArray,
    heads: FloatArray,
    sizes: Sizes,
    mask: FloatArray,
    even: bool = True,
) -> FloatArray:
    """Queries, what is `given` of `keys` and values, a mask and the log-sum-exp of a fused kernel; where they are
    widened, wide inputs and output beside what slices leave each other.

    The memory-efficient kernel takes what flash attention does not: masks, values not as wide as keys (`even`).
    """
    m, e, wide = sizes.tokens, sizes.itemsize, sizes.attended
    widened = wide * (query + keys * mean_runs(sizes) + written) + e * given.own * (left_share(sizes) > 0.0)
    held = np.where(wide > e, widened, e * (query + given.own + given.joined + given.first))
    flash = even & (mask == 0.0)
    state = 0.0 if sizes.processor else np.where(flash, _FLASH_STATE_BYTES, _MASKED_STATE_BYTES)
    return m * held + m * heads * sizes.wide + state + mask


def _written_latent(
    query: FloatArray, value: FloatArray, seen: FloatArray, heads: FloatArray, sizes: Sizes
) -> FloatArray:
    """Bytes of keys, of values or what is `seen` of them, and of masks, where scores of latents are written out."""
    doubled = (np.asarray(sizes.batch + sizes.zeros) > 1.0) | (sizes.itemsize < sizes.wide)
    values = np.where(doubled, value * mean_runs(sizes), seen)
    masks = sizes.met_scores * heads * sizes.dense_masks
    return np.asarray(sizes.wide * (sizes.tokens * (query * mean_runs(sizes) + values) + masks))


def kept_latent_attention(mixer: LatentAttention, sizes: Sizes) -> Kept:
    """Latents with their norms on every tensor rank, and the queries, keys and values of its heads.

    Values are a slice of what the up-projection gives, and keep it whole. Processors have no fused kernel for values
    of another width than the keys', and write the scores out in fp32, with a copy of the values unless one sequence of
    that precision needs none.
    """
    m, e, wide = sizes.tokens, sizes.itemsize, sizes.wide
    heads = mixer.heads / sizes.tensor
    query, value = heads * (mixer.nope_dim + mixer.rope_dim), heads * mixer.value_dim
    raised = heads * (mixer.nope_dim + mixer.value_dim)
    inputs, share = 2.0 * query + raised, left_share(sizes)
    even = mixer.nope_dim + mixer.rope_dim == mixer.value_dim
    given = all_given(query + value, query + raised, sizes)
    mask, grows = mask_copy(mixer, sizes), None
    if sizes.processor and not even:
        values = np.where(share > 0.0, given.joined * value / (query + value), raised)
        grows = _written_latent(query, value, values, heads, sizes)
        inside = wide * m * query + grows + e * m * (query + raised) * share
    else:
        inside = _fused_core(
            given, query=query, keys=query + value, written=value, heads=heads, sizes=sizes, mask=mask, even=even
        )
    # Values that are traded are copied out of what the up-projection gave.
    met = np.where(np.asarray(sizes.inner) > 1.0, value, inputs - 2.0 * query)
    inside = kept_by_meeting(
        inside, query=query, output=value, own=query + met, joined=query + value, heads=heads, sizes=sizes
    )
    core = inside - e * m * inputs
    joined, first = _of_runs(given, mask, sizes, traded=given, masked=first_masked(mixer, sizes), grows=grows)
    width, rank, latent = sizes.zeros + mixer.width, mixer.query_rank, float(mixer.kv_rank + mixer.rope_dim)
    around = root_mean_square(m * mixer.kv_rank, m, sizes) + e * m * mixer.kv_rank
    whole = not sizes.composite_norms
    around = around + np.where(whole | (e >= wide), e * m * mixer.rope_dim, 0.0)
    padded = np.maximum(query - value, 0.0)
    meeting = meeting_bytes(query=query, output=value, keys=given.met, heads=heads, padded=padded, sizes=sizes)
    late = np.where(meeting > 0.0, e * m * value, 0.0)
    copied = width * (latent + value) + mixer.kv_rank * (heads * (mixer.nope_dim + mixer.value_dim) + 1.0)
    fed = e * m * (width + mixer.kv_rank)
    above = query + latent + heads * (mixer.nope_dim + mixer.value_dim) + width + value
    if rank is None:
        copied = copied + width * query
    else:
        fed, above = fed + e * m * rank, above + rank
        around = around + root_mean_square(m * rank, m, sizes) + e * m * rank
        copied = copied + rank * (width + query + 1.0)
    return Kept(
        saved=e * m * (width + value) + inside + around,
        core=core,
        working=np.maximum(e * m * (query + given.met), meeting - late) + e * m * width,
        ending=e * m * (value + width),
        fed=fed + late,
        late=late,
        waits=fed + e * m * above,
        copied=copied,
        handed=e * m * (query + raised) * share,
        joined=joined,
        first=first,
        left=e * m * given.left,
    )
