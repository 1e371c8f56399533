"""On an accelerator, every fused kernel of tiles gives what is written out, in rows that other tiles are part of."""

from __future__ import annotations

import pytest
import torch

from meshwright.parallel.kernels_compat import KERNELS, Scores

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")]
WRITTEN = KERNELS[-1]


@pytest.mark.parametrize("name", ["cudnn", "flash", "padded"])
@pytest.mark.parametrize(("heads", "queries", "keys", "causal"), [(8, 512, 512, True), (8, 300, 700, False)])
def test_fused_kernels_give_what_is_written_out(name: str, heads: int, queries: int, keys: int, causal: bool) -> None:
    fused = next(entry for entry in KERNELS if entry.name == name)
    if name == "cudnn" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuDNN is preferred from sm90 on")
    torch.manual_seed(0)
    half = {"dtype": torch.bfloat16, "device": "cuda"}
    dims, value_dims = (192, 128) if name == "padded" else (64, 64)
    q = torch.randn(2, heads, queries, dims, **half)
    k, v = (torch.randn(2, 2, keys, features, **half) for features in (dims, value_dims))
    scores = Scores(scale=dims**-0.5, causal=causal)
    wide = [x.double() for x in (q, k, v)]
    out, lse = fused.forward(q, k, v, scores)
    wanted, also = WRITTEN.forward(*wide, scores)
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), also, rtol=1e-3, atol=1e-3)
    whole, gradient = torch.logaddexp(also, torch.ones_like(also)), torch.randn_like(wanted)
    joined = wanted * torch.exp(also - whole)[..., None]
    found = fused.backward(gradient.bfloat16(), q, k, v, joined.bfloat16(), whole.float(), scores)
    for one, other in zip(found, WRITTEN.backward(gradient, *wide, joined, whole, scores), strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 2e-2
