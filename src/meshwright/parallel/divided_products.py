"""Products of divided tensors: where columns are divided nobody waits, where rows are the ranks sum (1909.08053)."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.parallel.divided import (
    Divided,
    Division,
    Indivisible,
    Unlike,
    Use,
    beside,
    origins_of,
    own,
    parts_among,
)
from meshwright.parallel.torch_compat import plain


def matmul(a: Tensor, b: Tensor, **_: Any) -> Tensor:
    """a @ b. A divided contraction is summed over the ranks and comes out whole."""
    if a.ndim < 2 or b.ndim < 2:
        raise Indivisible("a product with a vector", origins=origins_of((a, b)))
    first = parts_among((a, b))[0]
    backs = {x.division.dim - x.ndim for x in parts_among((a, b))}
    contracts = [isinstance(x, Divided) and x.division.dim - x.ndim == back for x, back in ((a, -1), (b, -2))]
    if any(contracts):
        like = a if contracts[0] else b
        assert isinstance(like, Divided)
        return _contracted(a, b, like=like)
    if len(backs) > 1:
        raise Unlike("tensors divided in two ways are multiplied", origins=origins_of((a, b)))
    back, division = backs.pop(), first.division
    if back in (-1, -2):
        one, other = (a, b) if back == -2 else (b, a)
        if not isinstance(one, Divided) or isinstance(other, Divided):
            raise Unlike("tensors divided in two ways are multiplied", origins=origins_of((a, b)))
        local = plain(one) @ first.axis.enter(other) if back == -2 else first.axis.enter(other) @ plain(one)
        result = first.made(local, Division(dim=local.ndim + back, pieces=division.pieces))
        return whole(result) if division.use is Use.VOCABULARY else result
    local = beside(a, back, division, like=first) @ beside(b, back, division, like=first)
    return first.made(local, Division(dim=local.ndim + back, pieces=division.pieces), origins=origins_of((a, b)))


def _contracted(a: Tensor, b: Tensor, *, like: Divided) -> Tensor:
    pieces = like.division.pieces
    local = [_own_of(x, back, pieces, like=like) for x, back in ((a, -1), (b, -2))]
    return like.axis.leave(local[0] @ local[1])


def _own_of(x: Tensor, back: int, pieces: tuple[int, ...], *, like: Divided) -> Tensor:
    if isinstance(x, Divided):
        if x.division.dim - x.ndim != back or x.division.pieces != pieces:
            raise Unlike("a product of tensors divided in two ways", origins=x.origins | like.origins)
        return plain(x)
    return own(like.axis.enter(x), Division(dim=x.ndim + back, pieces=pieces), like.axis)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b; the bias of a sum over the ranks is added once."""
    if isinstance(weight, Divided) and not isinstance(x, Divided) and weight.division.dim == 0:
        entered, like = weight.axis.enter(x), weight
        near = None if bias is None else beside(bias, -1, weight.division, like=weight)
        local = functional.linear(entered, plain(weight), near)
        result = like.made(local, Division(dim=local.ndim - 1, pieces=weight.division.pieces))
        return whole(result) if weight.division.use is Use.VOCABULARY else result
    if isinstance(x, Divided) and not isinstance(weight, Divided) and x.division.dim < x.ndim - 1:
        # Tokens or heads are divided and not features: every rank has the whole matrix.
        local = functional.linear(plain(x), x.axis.enter(weight), None if bias is None else x.axis.enter(bias))
        return x.made(local, x.division)
    summed = matmul(x, weight.transpose(-1, -2))
    return summed if bias is None else summed + bias


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta bias + alpha a @ b."""
    product = matmul(a, b)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


def baddbmm(bias: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """As `addmm` of every matrix of a batch."""
    return addmm(bias, batch1, batch2, beta=beta, alpha=alpha)


def whole(x: Divided) -> Tensor:
    """x gathered along its last dim."""
    if x.division.dim != x.ndim - 1 or len(x.division.pieces) > 1:
        raise Indivisible("only plain columns are gathered", origins=x.origins)
    return x.axis.gather(plain(x))


def embedding(
    indexes: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    _norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    **_: Any,
) -> Tensor:
    """Rows of a divided table, summed over the ranks of which one has each; or columns of all rows."""
    usual = max_norm is None and not scale_grad_by_freq and not sparse
    if isinstance(indexes, Divided) or not isinstance(weight, Divided) or not usual:
        raise Indivisible("an embedding of this kind", origins=origins_of((indexes, weight)))
    local, axis = plain(weight), weight.axis
    if weight.division.dim == 1:
        rows = functional.embedding(indexes, local, padding_idx)
        return weight.made(rows, Division(dim=rows.ndim - 1, pieces=weight.division.pieces))
    start = axis.rank * len(local)
    own_indexes = indexes - start
    here = (own_indexes >= 0) & (own_indexes < len(local))
    if padding_idx is not None:  # a row that learns nothing
        here_learns = here & (indexes != padding_idx % weight.division.total)
        rows = functional.embedding(own_indexes.clamp(0, len(local) - 1), local)
        rows = torch.where(here_learns[..., None], rows, rows.detach())
    else:
        rows = functional.embedding(own_indexes.clamp(0, len(local) - 1), local)
    return axis.leave(rows * here[..., None])


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Attention of this rank's heads."""
    names = ("attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, rest, strict=False)), **options}
    first = parts_among((query, key, value))[0]
    back = first.division.dim - first.ndim
    if back >= -2:
        raise Indivisible("attention over divided tokens or features of a head", origins=first.origins)
    q, k, v = (_heads(x, back, first) for x in (query, key, value))
    heads = Division(dim=query.ndim + back, pieces=_pieces(query, back, first))
    mask = given.pop("attn_mask", None)
    mask = mask if mask is None else beside(mask, back, heads, like=first)
    apart = first.axis.drawing_apart(q.device) if given.get("dropout_p") else nullcontext()
    with apart:
        local = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **given)
    return first.made(local, heads, origins=origins_of((query, key, value)))


def _pieces(x: Tensor, back: int, like: Divided) -> tuple[int, ...]:
    """Pieces of the heads of x beside those of `like`: of grouped keys there are fewer."""
    count, runs = x.shape[back], len(like.division.pieces)
    if count % (runs * like.axis.size):
        raise Indivisible(f"{count} heads do not divide by {like.axis.size}", origins=like.origins)
    return (count // runs,) * runs


def _heads(x: Tensor, back: int, like: Divided) -> Tensor:
    """This rank's heads of x."""
    pieces = _pieces(x, back, like)
    if not isinstance(x, Divided):
        return own(like.axis.enter(x), Division(dim=x.ndim + back, pieces=pieces), like.axis)
    if x.division.dim - x.ndim != back or x.division.pieces != pieces:
        raise Unlike("queries and keys are divided in two ways", origins=x.origins | like.origins)
    return plain(x)


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    width: int,
    heads: int,
    in_weight: Tensor,
    in_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_weight: Tensor,
    out_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    is_causal: bool = False,
    average_attn_weights: bool = True,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """nn.MultiheadAttention of (tokens, batch, features) whose packed input matrix is divided, by its parts."""
    unusual = (bias_k, bias_v, static_k, static_v)
    if use_separate_proj_weight or add_zero_attn or query.ndim != 3 or any(entry is not None for entry in unusual):
        reason = "nn.MultiheadAttention is divided only with one width, batches and no added keys"
        raise Indivisible(reason, origins=origins_of((in_weight,)))
    biases = (None,) * 3 if in_bias is None else in_bias.split(width)
    parts = zip((query, key, value), in_weight.split(width), biases, strict=True)
    q, k, v = (_per_head(linear(x, weight, bias), heads) for x, weight, bias in parts)
    mask = _mask(attn_mask, key_padding_mask, heads=heads, like=query)
    causal = is_causal and mask is None
    dropped, shown = dropout_p if training else 0.0, None
    if need_weights:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        weights = functional.dropout((scores if mask is None else scores + mask).softmax(-1), dropped)
        mixed, shown = weights @ v, _shown(weights, average=average_attn_weights)
    else:
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropped, is_causal=causal)
    joined = mixed.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], width)
    return functional.linear(joined, out_weight, out_bias), shown


def _shown(weights: Tensor, *, average: bool) -> Tensor:
    """Divided weights (batch, heads, queries, keys), whole: each head's, or their average."""
    assert isinstance(weights, Divided)
    if not average:
        last = weights.permute(0, 2, 3, 1)
        assert isinstance(last, Divided)
        return whole(last).permute(0, 3, 1, 2)
    return weights.axis.leave(plain(weights).sum(1)) / weights.shape[1]


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """A slope below zero for all, or for each channel, which is dim 1."""
    slopes = weight if weight.numel() == 1 or x.ndim < 2 else weight.view(-1, *[1] * (x.ndim - 2))
    return torch.where(x > 0, x, slopes * x)


def depthwise(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **named: Any) -> Tensor:
    """A convolution of each divided channel, dim 1, by itself; `rest` are stride, padding, dilation and groups."""
    *steps, groups = rest if len(rest) == 4 else (*rest, named.pop("groups", 1))
    if not isinstance(x, Divided) or x.division.dim != 1 or not groups == len(weight) == x.division.total:
        raise Indivisible("a convolution that mixes divided channels", origins=origins_of((x, weight)))
    rows = Division(dim=0, pieces=x.division.pieces)
    near = [None if entry is None else own(x.axis.enter(entry), rows, x.axis) for entry in (weight, bias)]
    local = plain(x)
    return x.made(func(local, *near, *steps, groups=local.shape[1], **named), x.division)


def _per_head(x: Tensor, heads: int) -> Tensor:
    """(batch, heads, tokens, features of a head) of (tokens, batch, features)."""
    return x.reshape(x.shape[0], x.shape[1], heads, x.shape[2] // heads).permute(1, 2, 0, 3)


def _mask(attention: Tensor | None, padding: Tensor | None, *, heads: int, like: Tensor) -> Tensor | None:
    """What is added to scores (batch, heads, queries, keys), from masks of which true forbids."""
    found = None
    if attention is not None:
        found = _additive(attention, like)
        found = found.view(-1, heads, *found.shape[1:]) if found.ndim == 3 else found[None, None]
    if padding is not None:
        keys = _additive(padding, like)[:, None, None, :]
        found = keys if found is None else found + keys
    return found


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill_(mask, float("-inf"))
