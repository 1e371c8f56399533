"""Which of torch's functions work on divided tensors, and by what rule; any other refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel import divided_moves as moves
from meshwright.parallel import divided_products as products
from meshwright.parallel.divided import (
    Deciding,
    Divided,
    Division,
    Indivisible,
    beside,
    divided,
    origins_of,
    parts_among,
)
from meshwright.parallel.divided_dims import Dims
from meshwright.parallel.divided_einsum import einsum
from meshwright.parallel.torch_compat import plain, plainly


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ELEMENTWISE = _words(
    """add sub rsub mul div true_divide pow neg abs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal square
    sin cos tan sinh cosh tanh asin acos atan atan2 sigmoid special_expit erf erfc sinc hypot logaddexp xlogy
    relu relu6 gelu silu mish elu selu celu leaky_relu softplus softsign logsigmoid hardswish hardsigmoid hardtanh
    threshold tanhshrink hardshrink softshrink
    clamp clip clamp_min clamp_max maximum minimum where masked_fill lerp addcmul addcdiv
    contiguous clone detach data float double half bfloat16 nan_to_num sign floor ceil trunc frac round fmod remainder
    isnan isinf isfinite
    eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or invert zeros_like ones_like empty_like
    full_like view_as_complex view_as_real requires_grad_ zero_ fill_
    """
)
_OPERATORS = {
    **{f"__{name}__": name for name in _words("add sub mul pow neg abs eq ne lt le gt ge invert rsub")},
    **{f"__r{name}__": name for name in _words("add mul div truediv pow")},
    **{f"__i{name}__": name for name in _words("add sub mul truediv")},
    **dict.fromkeys(("__truediv__", "__div__", "__itruediv__"), "div"),
    **dict.fromkeys(("__and__", "__or__"), "logical_and"),
    "__matmul__": "matmul",
    "__rmatmul__": "__rmatmul__",
    "__getitem__": "__getitem__",
}
# What draws random numbers, which ranks draw apart for their parts.
_RANDOM = _words("dropout alpha_dropout rand_like randn_like")
ALONG: Mapping[str, Dims] = {
    **dict.fromkeys(_words("softmax log_softmax softmin cumsum cumprod"), Dims(place=0)),
    **dict.fromkeys(_words("sort argsort"), Dims(place=0, absent=(-1,))),
    "topk": Dims(place=1, absent=(-1,)),
    "flip": Dims(place=0, spread=True),
    "roll": Dims(place=1),
    "normalize": Dims(place=1, absent=(1,)),
}
REDUCTIONS: Mapping[str, Dims] = {
    **dict.fromkeys(_words("mean sum amax amin var std logsumexp all any argmax argmin max min prod"), Dims(place=0)),
    "var_mean": Dims(place=0),
    "norm": Dims(place=1),
}
# What moves one tensor about. A whole one that is told divided arguments has no rule.
_MOVES = _words(
    """view reshape transpose swapaxes swapdims mT t T size shape __getitem__ expand permute unsqueeze squeeze
    flatten unflatten split chunk unbind narrow repeat_interleave pad index_select glu
    """
)
LOOKS = _words(
    """dtype device requires_grad is_cuda is_cpu is_meta is_sparse is_quantized is_nested layout grad_fn is_leaf
    is_floating_point is_complex is_contiguous get_device element_size retains_grad names is_mkldnn is_mps is_xpu
    data_ptr register_hook _version _base is_inference output_nr is_conj is_neg is_vulkan is_mtia is_xla is_ipu
    ndim dim ndimension
    """
)


class Ruled(Divided):
    """A divided tensor on which torch's functions follow these rules."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, Deciding) for kind in types):
            return NotImplemented
        name = function_name(func)
        rule = RULES.get(name) or RULES.get(name.rstrip("_"))
        held = origins_of(_flat(args, kwargs or {}))
        if rule is None:
            raise Indivisible(f"{name} has no rule for divided tensors", origins=held)
        if name in _MOVES and args and not isinstance(args[0], Divided):
            raise Indivisible(f"{name} of a whole tensor with divided arguments", origins=held)
        if kwargs and kwargs.get("out") is not None:
            raise Indivisible(f"{name} into a tensor that is there has no rule", origins=held)
        try:
            return rule(func, *args, **(kwargs or {}))
        except TypeError as error:
            raise Indivisible(f"{name} called so has no rule: {error}", origins=held) from error


def function_name(func: Any) -> str:
    """`add` for torch.add, Tensor.add and the operator; `shape` for the property."""
    name = str(func.__name__)
    if name in ("__get__", "__set__"):
        return str(func.__self__.__name__) + ("" if name == "__get__" else " that is set")
    return _OPERATORS.get(name, name)


def _flat(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    found: list[Any] = []
    for entry in (*args, *kwargs.values()):
        found += entry if isinstance(entry, (list, tuple)) else [entry]
    return found


def _elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    given = (*args, *kwargs.values())
    parts = parts_among(given)
    if func.__name__.endswith("_") and not isinstance(args[0], Divided):
        raise Indivisible("a whole tensor is changed by a divided one", origins=origins_of(given))
    first = max(parts, key=lambda x: plain(x).ndim)
    back = first.division.dim - plain(first).ndim
    near = [beside(x, back, first.division, like=first) for x in args]
    named = {key: beside(x, back, first.division, like=first) for key, x in kwargs.items()}
    dim = max(x.ndim for x in given if isinstance(x, Tensor)) + back
    local = func(*near, **named)
    division = Division(dim=dim, pieces=first.division.pieces, use=first.division.use)
    return first.made(local, division, origins=origins_of(given))


def _random(func: Any, x: Divided, *args: Any, **kwargs: Any) -> Any:
    if not kwargs.get("training", True):
        return _elementwise(func, x, *args, **kwargs)
    with x.axis.drawing_apart(plain(x).device):
        return _elementwise(func, x, *args, **kwargs)


def _cast(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    near = [plain(entry) if isinstance(entry, Divided) else entry for entry in args]
    if not isinstance(x, Divided):
        return func(x, *near, **kwargs)
    return moves.moved(x, func(plain(x), *near, **kwargs), x.division.dim)


def _narrow(_func: Any, x: Divided, dim: int, start: int, length: int) -> Any:
    dim = moves.place_of(dim, plain(x).ndim)
    start = moves.place_of(start, x.whole_shape()[dim])
    return moves.index(x, (*[slice(None)] * dim, slice(start, start + length)))


def _along(named: Dims) -> Callable[..., Any]:
    def rule(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, Divided):
            raise Indivisible("a whole tensor with divided arguments", origins=origins_of((*args, *kwargs.values())))
        dims = named.of(args, kwargs, ndim=plain(x).ndim)
        if x.division.dim in dims:
            raise moves.refuse(x, f"{function_name(func)} along divided features")
        return _all(func(plain(x), *args, **kwargs), lambda y: moves.moved(x, y, x.division.dim))

    return rule


def _reduction(named: Dims) -> Callable[..., Any]:
    def rule(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("other", args[0] if args else None), Tensor):
            return _elementwise(func, x, *args, **kwargs)  # the greater or lesser of two tensors
        if not isinstance(x, Divided):
            raise Indivisible("a whole tensor with divided arguments", origins=origins_of((*args, *kwargs.values())))
        dims = named.of(args, kwargs, ndim=plain(x).ndim)
        if x.division.dim in dims:
            raise moves.refuse(x, f"{function_name(func)} over divided features")
        local = func(plain(x), *args, **kwargs)
        before = sum(dim < x.division.dim for dim in dims)

        def wrapped(y: Tensor) -> Tensor:
            return moves.moved(x, y, x.division.dim - (before if y.ndim < plain(x).ndim else 0))

        return _all(local, wrapped)

    return rule


def _all(found: Any, wrap: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(found, Tensor):
        return wrap(found)
    return type(found)(*map(wrap, found)) if hasattr(found, "_fields") else type(found)(map(wrap, found))


def _normed(func: Any, x: Tensor, shape: Iterable[int], *args: Any, **kwargs: Any) -> Any:
    sizes = list(shape)
    if not isinstance(x, Divided) or x.division.dim >= plain(x).ndim - len(sizes):
        raise Indivisible(f"{function_name(func)} over divided features", origins=origins_of((x, *args)))
    enter = x.axis.enter
    near = [enter(entry) if isinstance(entry, Tensor) else entry for entry in args]
    named = {key: enter(entry) if isinstance(entry, Tensor) else entry for key, entry in kwargs.items()}
    return moves.moved(x, func(plain(x), sizes, *near, **named), x.division.dim)


def _sizes(args: tuple[Any, ...]) -> list[int]:
    return list(args[0]) if len(args) == 1 and not isinstance(args[0], int) else list(args)


def _view(_func: Any, x: Divided, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[0], torch.dtype):
        raise moves.refuse(x, "a view as another dtype")
    return moves.view(x, _sizes(args) if args else list(kwargs["shape"]))


def _size(_func: Any, x: Divided, dim: int | None = None) -> Any:
    return x.whole_shape() if dim is None else x.whole_shape()[dim]


def _look(func: Any, x: Divided, *args: Any, **kwargs: Any) -> Any:
    return plainly(func, x, *args, **kwargs)


def _hooked(_func: Any, x: Divided, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """`hook` sees a gradient divided as x is."""
    kind, division, axis, origins = type(x), x.division, x.axis, x.origins

    def of_part(gradient: Tensor) -> Tensor | None:
        changed = hook(divided(gradient, division, kind=kind, axis=axis, origins=origins))
        if changed is not None and not isinstance(changed, Divided):
            raise Indivisible("a hook gives a whole gradient of a divided tensor", origins=origins)
        return changed if changed is None else plain(changed)

    return plainly(Tensor.register_hook, x, of_part)


def _times(func: Any, x: Tensor, other: Tensor) -> Any:
    return products.matmul(other, x) if func.__name__ == "__rmatmul__" else products.matmul(x, other)


def _bare(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule that needs not know which spelling of the function was called."""
    return lambda _func, *args, **kwargs: rule(*args, **kwargs)


def _made_whole(func: Any, x: Divided, *args: Any, **kwargs: Any) -> Any:
    return func(plain(x), *args, **kwargs)


def _like(name: str) -> Callable[..., Any]:
    """x in the shape of another, by the function `name` that takes a shape."""

    def rule(_func: Any, x: Tensor, other: Tensor) -> Any:
        return getattr(x, name)(other.shape)

    return rule


def _permute(_func: Any, x: Divided, *args: Any, **kwargs: Any) -> Any:
    return moves.permute(x, _sizes(args) if args else kwargs["dims"])


def _expand(_func: Any, x: Divided, *args: Any, **kwargs: Any) -> Any:
    return moves.expand(x, _sizes(args) if args else kwargs["size"])


def _interleaved(_func: Any, x: Divided, repeats: Any, dim: Any = None, **_: Any) -> Any:
    if not isinstance(repeats, int) or dim is None:
        raise moves.refuse(x, "repeats that depend on data")
    return moves.repeat_interleave(x, repeats, dim)


def _selected(_func: Any, x: Divided, dim: int, index: Tensor) -> Any:
    return moves.index(x, (*[slice(None)] * moves.place_of(dim, plain(x).ndim), index))


def _glu(_func: Any, x: Divided, dim: int = -1) -> Any:
    value, gate = moves.chunk(x, 2, dim)
    return value * gate.sigmoid()


def _padded(func: Any, x: Divided, pad: Iterable[int], *args: Any, **kwargs: Any) -> Any:
    widths = list(pad)
    if x.division.dim >= plain(x).ndim - len(widths) // 2:
        raise moves.refuse(x, "padding of divided features")
    return moves.moved(x, func(plain(x), widths, *args, **kwargs), x.division.dim)


SIZES = _words("size shape numel nelement __len__")  # which are those of the whole
RULES: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_RANDOM, _random),
    **{name: _along(named) for name, named in ALONG.items()},
    **{name: _reduction(named) for name, named in REDUCTIONS.items()},
    **dict.fromkeys(LOOKS, _look),
    "register_hook": _hooked,
    **dict.fromkeys(("layer_norm", "rms_norm"), _normed),
    **dict.fromkeys(("to", "type", "type_as", "cpu", "cuda"), _cast),
    **dict.fromkeys(("view", "reshape"), _view),
    **dict.fromkeys(("matmul", "__rmatmul__", "mm", "bmm"), _times),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _bare(moves.transpose)),
    "mT": lambda _func, x: moves.transpose(x, -2, -1),
    **dict.fromkeys(("t", "T"), lambda _func, x: moves.permute(x, range(plain(x).ndim)[::-1])),
    **dict.fromkeys(("concat", "cat", "concatenate"), _bare(moves.cat)),
    **dict.fromkeys(("size", "shape"), _size),
    "numel": lambda _func, x: x.whole_shape().numel(),
    "nelement": lambda _func, x: x.whole_shape().numel(),
    "__len__": lambda _func, x: x.whole_shape()[0],
    "__getitem__": _bare(moves.index),
    "view_as": _like("view"),
    "reshape_as": _like("reshape"),
    "expand": _expand,
    "expand_as": _like("expand"),
    **dict.fromkeys(_words("new_zeros new_ones new_full new_empty new_tensor"), _made_whole),
    "permute": _permute,
    "unsqueeze": _bare(moves.unsqueeze),
    "squeeze": _bare(moves.squeeze),
    "flatten": _bare(moves.flatten),
    "unflatten": _bare(moves.unflatten),
    "split": _bare(lambda x, split_size_or_sections, dim=0: moves.split(x, split_size_or_sections, dim)),
    "chunk": _bare(lambda x, chunks, dim=0: moves.chunk(x, chunks, dim)),
    "unbind": _bare(moves.unbind),
    "narrow": _narrow,
    "index_select": _selected,
    "stack": _bare(moves.stack),
    "repeat_interleave": _interleaved,
    "pad": _padded,
    "glu": _glu,
    "einsum": _bare(einsum),
    "linear": _bare(products.linear),
    "prelu": _bare(products.prelu),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), products.depthwise),
    "addmm": _bare(products.addmm),
    "baddbmm": _bare(products.baddbmm),
    "embedding": _bare(products.embedding),
    "scaled_dot_product_attention": _bare(products.scaled_dot_product_attention),
    "multi_head_attention_forward": _bare(products.multi_head_attention_forward),
}
