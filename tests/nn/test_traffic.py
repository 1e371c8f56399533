"""The cost model's element-wise bytes are those that the operators of a real layer and a real loss move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from meshwright import catalog, nn
from meshwright.cost.loss_chunks import chunks_bytes
from meshwright.cost.operators import HEAD, block_work
from meshwright.cost.software import WIDE_ATTENTION_LENGTH
from meshwright.cost.work import Sizes
from meshwright.nn.attention import WIDE_LENGTH
from meshwright.nn.context import Context
from meshwright.nn.loss import ACCELERATOR_CHUNK_ELEMENTS, CPU_CHUNK_ELEMENTS
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.model import Block
from meshwright.train.torch_compat import TorchDispatchMode, leaves

BATCH, LENGTH = 2, 64
MODEL = catalog.load_model("llama-2m")
# Operators that only look, that multiply matrices, or that touch a few elements of what they are given.
LOOKS = {"view", "t", "transpose", "detach", "slice", "expand", "unsqueeze", "squeeze", "permute", "select", "split"}
MORE_LOOKS = {"_unsafe_view", "_reshape_alias", "as_strided", "unbind", "scalar_tensor"}
MAKES = {"empty", "empty_like", "empty_strided", "new_empty_strided"}
FEW = {"gather", "scatter_"}
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
NOT_COUNTED = LOOKS | MORE_LOOKS | MAKES | FEW | {"mm", ATTENTION, f"{ATTENTION}_backward"}


@dataclass
class Tally(TorchDispatchMode):
    """Bytes read and written by element-wise operators while entered."""

    num_bytes: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = {name: x for name, x in (kwargs or {}).items() if name != "out"}
        name = func.overloadpacket.__name__
        if name not in NOT_COUNTED:
            tensors = [x for x in leaves((args, read, result)) if isinstance(x, Tensor)]
            self.num_bytes[name] = self.num_bytes.get(name, 0.0) + sum(moved(x) for x in tensors)
        return result

    @property
    def total(self) -> float:
        return sum(self.num_bytes.values())


T = TypeVar("T", bound=Tally)


def moved(x: Tensor) -> float:
    """Bytes of the elements that exist: a dim that is expanded counts once."""
    return float(x.element_size() * np.prod([size for size, step in zip(x.shape, x.stride(), strict=True) if step]))


def tallied(call: Callable[[], Tensor], *, tally: type[T]) -> tuple[T, T]:
    """What `call` did forward and backward."""
    forward, backward = tally(), tally()
    with forward:
        result = call()
    gradient = torch.ones_like(result)
    with backward:
        result.backward(gradient)
    return forward, backward


def counted(call: Callable[[], Tensor]) -> tuple[float, float]:
    """Bytes of `call` forward and backward."""
    forward, backward = tallied(call, tally=Tally)
    return forward.total, backward.total


def modelled(block: Block, dtype: torch.dtype, *, only: str = "") -> tuple[float, float]:
    one, size = np.ones(1), np.array([float(dtype.itemsize)])
    sizes = Sizes(
        batch=BATCH * one,
        sequence=float(LENGTH),
        tensor=one,
        split=one,
        itemsize=size,
        composite_norms=True,
        eager=True,
        fused_loss=True,
        attention_itemsize=np.maximum(4.0, size),
    )
    parts = [part for part in block_work(block, sizes) if only in ("", part.name)]
    return sum(float(np.sum(part.traffic)) for part in parts), sum(
        float(np.sum(part.backward_traffic)) for part in parts
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_layer_moves_the_bytes_that_are_priced(dtype: torch.dtype) -> None:
    decoder = nn.Decoder(MODEL).to(dtype)
    nn.initialize(decoder, seed=0)
    x = torch.randn(BATCH, LENGTH, MODEL.width, dtype=dtype, requires_grad=True)
    layer, context = next(iter(decoder.layers.values())), Context()
    layer(x, context)
    found = counted(lambda: layer(x, context))
    assert found == pytest.approx(modelled(MODEL.layers[0], dtype), rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_loss_moves_the_bytes_that_are_priced(dtype: torch.dtype) -> None:
    logits = torch.randn(BATCH, LENGTH, MODEL.vocab, dtype=dtype, requires_grad=True)
    targets = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    found = counted(lambda: nn.token_losses(logits, targets).mean())
    assert found == pytest.approx(modelled(MODEL.head, dtype, only=HEAD), rel=0.02)


def test_both_rooms_agree_on_what_is_attended_in_fp32() -> None:
    assert WIDE_ATTENTION_LENGTH == WIDE_LENGTH


@pytest.mark.parametrize(
    ("kind", "elements"),
    [(DeviceKind.CPU, CPU_CHUNK_ELEMENTS), (DeviceKind.CUDA, ACCELERATOR_CHUNK_ELEMENTS)],
)
def test_both_rooms_agree_on_the_logits_that_a_loss_reads_at_once(kind: DeviceKind, elements: int) -> None:
    most, _ = chunks_bytes(np.array([1e12]), np.array([4.0]), kind=kind)
    assert most == 4.0 * elements
