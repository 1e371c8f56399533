"""What workers do in the tests of split backwards."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.nn import Decoder, initialize
from meshwright.parallel.buckets import BucketedGradients
from meshwright.parallel.split import WeightGradients
from tests.support import models


def decoder(**changes: object) -> Decoder:
    whole = Decoder(models.model(**changes)).double()
    initialize(whole, seed=3)
    return whole


def units(of: Decoder) -> list[torch.nn.Module]:
    return [of.embedding, *of.layers.values(), of.head]


def sent_in_time() -> tuple[int, int, list[float]]:
    """How many buckets of gradients are sent when the last half backward ends, of how many, and the largest error."""
    part = decoder()
    weights = WeightGradients(units(part))
    buckets = BucketedGradients(part.parameters(), groups=[dist.group.WORLD], bucket_bytes=20_000)
    tokens = torch.randint(0, models.VOCAB, (2, 2, 8), generator=torch.Generator().manual_seed(dist.get_rank()))
    for index in range(2):
        weights.before_forward(splits=True)
        loss = part(tokens[index]).square().sum()
        buckets.before_input()
        with weights.putting_off(index):
            loss.backward()
    for index in range(2):
        buckets.before_weights(last=index == 1)
        weights.form(index, done=buckets.unit_done)
    sent = buckets._sent
    buckets.after_backward()
    found = {name: p.grad.clone() for name, p in part.named_parameters()}
    plain = decoder()
    plain(tokens.flatten(0, 1)).square().sum().backward()
    errors = []
    for name, parameter in plain.named_parameters():
        dist.all_reduce(parameter.grad)
        errors.append(float((found[name] - parameter.grad).abs().max()))
    return sent, len(buckets._buckets), errors
