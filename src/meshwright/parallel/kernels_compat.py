"""Attention of one tile with its log-sum-exp, by the fastest kernel that gives one: all uses of torch's own operators.

The public scaled_dot_product_attention does not return the log-sum-exp, which joins the tiles of a row of scores, and
its backward takes no log-sum-exp of the whole row. The operators behind it do both; torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from meshwright.cost.work import SCORES_AT_ONCE

aten = torch.ops.aten

# Types of devices for which torch ships FlashAttention-2: nvidia's and AMD's have one name.
FLASH_DEVICES = frozenset({"cuda"})

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How a tile is scored: `mask` bool (queries, keys) says what is seen, None is all, or with `causal` (as many
    keys as queries) what index order leaves."""

    scale: float
    softcap: float | None = None
    causal: bool = False
    mask: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Shapes are (b, heads, queries, d), (b, kv_heads, keys, d) and (b, kv_heads, keys, value_dim).

    `forward(q, k, v, scores)` gives the output and the log-sum-exp (b, heads, queries), -inf where nothing is seen;
    `backward(gradient, q, k, v, out, lse, scores)` the gradients of q, k and v, from the output and the log-sum-exp
    of whole rows.
    """

    name: str
    fits: Callable[[Tensor, Tensor, Tensor, Scores], bool]
    forward: Callable[[Tensor, Tensor, Tensor, Scores], Pair]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Scores], Triple]


def kernel(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Kernel:
    """The first of KERNELS that can do it."""
    return next(entry for entry in KERNELS if entry.fits(q, k, v, scores))


def _fits_processor(q: Tensor, _k: Tensor, v: Tensor, scores: Scores) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and scores.softcap is None


def _additive(scores: Scores, like: Tensor) -> Tensor | None:
    if scores.mask is None:
        return None
    return torch.zeros(scores.mask.shape, dtype=like.dtype, device=like.device).masked_fill(~scores.mask, float("-inf"))


def _processor_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Pair:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, scores.causal, attn_mask=_additive(scores, q), scale=scores.scale
    )
    if scores.mask is not None:
        lse = lse.masked_fill(~scores.mask.any(dim=-1), float("-inf"))
    return out, lse


def _processor_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
) -> Triple:
    result: Triple = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q, k, v, out, lse, 0.0, scores.causal, attn_mask=_additive(scores, q), scale=scores.scale
    )
    return result


def _fits_accelerator(q: Tensor, _k: Tensor, v: Tensor, scores: Scores) -> bool:
    """FlashAttention-2 (2307.08691) as torch ships it: half precision, no mask but the causal one."""
    dims = q.shape[-1]
    plain = scores.softcap is None and scores.mask is None and dims == v.shape[-1]
    return plain and _has_flash(q.device) and q.itemsize == 2 and dims % 8 == 0 and dims <= 256


def _has_flash(device: torch.device) -> bool:
    """nvidia's devices have it from compute capability 8.0 on: Volta and Turing do not."""
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return device.type in FLASH_DEVICES
    return device.type in FLASH_DEVICES and torch.cuda.get_device_capability(device) >= (8, 0)


def _fits_cudnn(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> bool:
    """Where torch itself prefers cuDNN: devices, versions and shapes that it is right and fastest for. Wider heads have
    a forward and no backward there."""
    if not (_fits_accelerator(q, k, v, scores) and q.shape[-1] <= 128 and torch.cuda.is_available()):
        return False
    chosen = torch._fused_sdp_choice(q, k, v, is_causal=scores.causal, scale=scores.scale, enable_gqa=True)
    return chosen == SDPBackend.CUDNN_ATTENTION.value


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Pair:
    found = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, scores.causal, False, scale=scores.scale)
    return found[0], found[1].squeeze(-1)


def _cudnn_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
) -> Triple:
    unread = torch.zeros((), dtype=torch.int64, device=q.device)
    result: Triple = aten._scaled_dot_product_cudnn_attention_backward(
        gradient.contiguous(),
        q,
        k,
        v,
        out.contiguous(),
        lse.contiguous().unsqueeze(-1),
        unread,
        unread,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        scores.causal,
        scale=scores.scale,
    )
    return result


def _accelerator_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Pair:
    found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, scores.causal, False, scale=scores.scale)
    return found[0], found[1]


def _accelerator_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
) -> Triple:
    # Without dropout the state of the random numbers is not read.
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    offset = torch.zeros((), dtype=torch.uint64, device=q.device)
    result: Triple = aten._scaled_dot_product_flash_attention_backward(
        gradient,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        scores.causal,
        seed,
        offset,
        scale=scores.scale,
    )
    return result


def _fits_padded(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> bool:
    """Values narrower than the keys, of which another kernel takes as many features with zeros behind them."""
    return v.shape[-1] < k.shape[-1] and any(fits(q, k, k, scores) for fits in (_fits_processor, _fits_accelerator))


def _padded_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Pair:
    out, lse = kernel(q, k, k, scores).forward(q, k, _padded(v, k), scores)
    return out.narrow(-1, 0, v.shape[-1]), lse


def _padded_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
) -> Triple:
    gradient, whole, out = (_padded(x, k) for x in (gradient, v, out))
    of_queries, of_keys, of_values = kernel(q, k, k, scores).backward(gradient, q, k, whole, out, lse, scores)
    return of_queries, of_keys, of_values.narrow(-1, 0, v.shape[-1])


def _padded(x: Tensor, like: Tensor) -> Tensor:
    """x with zeros behind its features, as many as `like` has."""
    return functional.pad(x, (0, like.shape[-1] - x.shape[-1]))


def _written_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Pair:
    found = [_run_forward(q[:, :, rows], k, v, run) for rows, run in _runs(q, k, scores)]
    out, lse = zip(*found, strict=True)
    return torch.cat(out, dim=2), torch.cat(lse, dim=2)


def _written_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
) -> Triple:
    wide = torch.promote_types(q.dtype, torch.float32)
    of_queries = torch.empty_like(q)
    of_keys, of_values = (torch.zeros_like(x, dtype=wide) for x in (k, v))
    for rows, run in _runs(q, k, scores):
        part = tuple(x[:, :, rows] for x in (gradient, q, out, lse))
        of_queries[:, :, rows] = _run_backward(part, (k, v), (of_keys, of_values), run)
    return of_queries, of_keys.to(k.dtype), of_values.to(v.dtype)


def _runs(q: Tensor, k: Tensor, scores: Scores) -> Iterator[tuple[slice, Scores]]:
    """Runs of queries whose scores are few enough to be written out at once, with what each of them sees as a mask."""
    queries, keys = q.shape[2], k.shape[2]
    most = max(SCORES_AT_ONCE // max(q.shape[0] * q.shape[1] * keys, 1), 1)
    for start in range(0, queries, most):
        rows = slice(start, min(start + most, queries))
        mask = None if scores.mask is None else scores.mask[rows]
        if scores.causal:
            mask = torch.ones(rows.stop - start, keys, dtype=torch.bool, device=q.device).tril(start)
        yield rows, replace(scores, causal=False, mask=mask)


def _run_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Pair:
    values = _written_scores(q, k, scores)[0]
    lse = values.logsumexp(dim=-1)
    weights = torch.exp(values - lse[..., None]).nan_to_num(0.0)
    return (weights.to(v.dtype) @ v.unsqueeze(2)).flatten(1, 2), lse.flatten(1, 2)


def _run_backward(
    part: tuple[Tensor, ...], met: tuple[Tensor, Tensor], sums: tuple[Tensor, Tensor], scores: Scores
) -> Tensor:
    """The gradient of queries, of `part` the gradient of the output, queries, the output and its log-sum-exp; adds to
    `sums` those of the keys and values that are `met`."""
    (gradient, q, out, lse), (k, v) = part, met
    values, slope = _written_scores(q, k, scores)
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    wide = values.dtype
    gradient = gradient.to(wide).unflatten(1, groups)
    weights = torch.exp(values - lse.to(wide).unflatten(1, groups)[..., None])
    sums[1].add_((weights.transpose(-1, -2) @ gradient).sum(dim=2))
    summed = (gradient * out.to(wide).unflatten(1, groups)).sum(dim=-1, keepdim=True)
    of_scores = weights * (gradient @ v.to(wide).unsqueeze(2).transpose(-1, -2) - summed) * scores.scale
    if slope is not None:
        of_scores = of_scores * slope
    sums[0].add_((of_scores.transpose(-1, -2) @ q.to(wide).unflatten(1, groups)).sum(dim=2))
    return (of_scores @ k.to(wide).unsqueeze(2)).flatten(1, 2).to(q.dtype)


def _written_scores(q: Tensor, k: Tensor, scores: Scores) -> tuple[Tensor, Tensor | None]:
    """Scores (b, kv_heads, groups, queries, keys), -inf where nothing is seen, and what the soft cap's slope is."""
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    wide = torch.promote_types(q.dtype, torch.float32)
    values = (q.unflatten(1, groups) @ k.unsqueeze(2).transpose(-1, -2)).to(wide) * scores.scale
    slope = None
    if scores.softcap is not None:
        bent = torch.tanh(values / scores.softcap)
        values, slope = scores.softcap * bent, 1.0 - bent.square()
    return (values if scores.mask is None else values.masked_fill(~scores.mask, float("-inf"))), slope


KERNELS = (
    Kernel(name="processor", fits=_fits_processor, forward=_processor_forward, backward=_processor_backward),
    Kernel(name="cudnn", fits=_fits_cudnn, forward=_cudnn_forward, backward=_cudnn_backward),
    Kernel(name="flash", fits=_fits_accelerator, forward=_accelerator_forward, backward=_accelerator_backward),
    Kernel(name="padded", fits=_fits_padded, forward=_padded_forward, backward=_padded_backward),
    Kernel(name="written out", fits=lambda *_: True, forward=_written_forward, backward=_written_backward),
)
