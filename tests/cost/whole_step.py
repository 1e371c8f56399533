"""The peak of one rank's step by our own modules, counted under fake tensors."""

from __future__ import annotations

from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.nn import Decoder, token_losses
from meshwright.nn.decoder import DecoderLayer
from meshwright.nn.weights import Weighted
from meshwright.parallel.recompute import apply_recompute
from meshwright.spec.model import ModelSpec
from tests.cost.saved_tensors import LiveBytes, Setting, default_dtype, even_counts


def step_peak(model: ModelSpec, setting: Setting, *, microbatches: int) -> int:
    """The most bytes beside parameters over `microbatches` of forward and backward, gradients among them."""
    shape = (setting.batch, setting.sequence)
    with FakeTensorMode(allow_non_fake_inputs=True), mock.patch.object(torch, "bincount", even_counts):
        with default_dtype(setting.master):
            decoder = Decoder(model)
        for part in decoder.modules():
            if isinstance(part, Weighted) and setting.compute is not setting.master:
                part.reader = lambda weight: weight.to(setting.compute)
            if isinstance(part, DecoderLayer):
                apply_recompute(part, setting.recompute)
        live = LiveBytes(apart=decoder.parameters())
        with live:
            tokens, targets = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
            for _ in range(microbatches):
                token_losses(decoder(tokens), targets).mean().backward()
    return live.peak
