"""Documents are attended one by one where that is less work, and by a mask where it is not."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from meshwright.nn import Decoder, Sampling, generate, initialize
from meshwright.nn import context as nn_context
from meshwright.nn.context import MOST_DOCUMENTS, Context, GrowingMemory
from tests.support import models

DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2], [4, 4, 4, 4, 4, 4]])


def test_lengths_of_documents_are_counted_in_each_sequence() -> None:
    assert Context(documents=DOCUMENTS).lengths(window=None, chunk=None) == ((2, 3, 1), (6,))


def test_a_window_that_reaches_over_every_document_cuts_none() -> None:
    short = DOCUMENTS[:1]
    assert Context(documents=short).lengths(window=3, chunk=None) == ((2, 3, 1),)
    assert Context(documents=short).lengths(window=2, chunk=None) is None
    assert Context(documents=short).lengths(window=None, chunk=4) is None


def test_many_short_documents_and_remembered_keys_take_a_mask() -> None:
    many = torch.arange(MOST_DOCUMENTS + 1)[None]
    assert Context(documents=many).lengths(window=None, chunk=None) is None
    assert Context(documents=DOCUMENTS, memory=GrowingMemory()).lengths(window=None, chunk=None) is None


def test_the_mask_shows_what_is_causal_near_and_of_the_same_document() -> None:
    mask = Context(documents=DOCUMENTS).mask(6, window=2, chunk=None, prefix=False, device=torch.device("cpu"))
    assert mask is not None
    assert mask[0, 0, 4].tolist() == [False, False, False, True, True, False]
    assert mask[1, 0, 2].tolist() == [False, True, True, False, False, False]
    assert Context().mask(6, window=6, chunk=None, prefix=False, device=torch.device("cpu")) is None


AHEAD = torch.tensor([[1, 0, 2, 1, 0, 0], [3, 2, 1, 0, 0, 0]], dtype=torch.int32)


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (2, None), (None, 4), (3, 2)])
def test_under_a_prefix_mask_prompts_see_all_of_themselves(window: int | None, chunk: int | None) -> None:
    context = Context(documents=DOCUMENTS, ahead=AHEAD)
    mask = context.mask(6, window=window, chunk=chunk, prefix=True, device=torch.device("cpu"))
    assert mask is not None
    for row, query, key in product(range(2), range(6), range(6)):
        seen = key <= query + int(AHEAD[row, query]) and DOCUMENTS[row, query] == DOCUMENTS[row, key]
        seen &= abs(query - key) < (window or 6) and query // (chunk or 6) == key // (chunk or 6)
        assert bool(mask[row, 0, query, key]) == seen, (row, query, key)
    causal = Context(documents=DOCUMENTS).mask(6, window=window, chunk=chunk, prefix=True, device=torch.device("cpu"))
    other = context.mask(6, window=window, chunk=chunk, prefix=False, device=torch.device("cpu"))
    torch.testing.assert_close(causal, other)
    assert Context(ahead=AHEAD).mask(6, window=None, chunk=None, prefix=False, device=torch.device("cpu")) is None


def decoder() -> Decoder:
    found = Decoder(models.prefixed()).double()
    initialize(found, seed=3)
    return found


def test_prompts_attended_one_by_one_are_what_the_mask_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients; and without prompts they are causal ones."""
    model, tokens = decoder(), torch.arange(12).view(2, 6) % models.VOCAB
    found = []
    for most, ahead in ((MOST_DOCUMENTS, AHEAD), (0, AHEAD), (MOST_DOCUMENTS, None), (0, torch.zeros_like(AHEAD))):
        monkeypatch.setattr(nn_context, "MOST_DOCUMENTS", most)
        model.zero_grad()
        logits = model(tokens, documents=DOCUMENTS, ahead=ahead)
        logits.square().sum().backward()
        found.append([logits.detach(), *(p.grad for p in model.parameters())])
    for one, other in ((found[0], found[1]), (found[2], found[3])):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(found[0][0], found[2][0])


def test_what_is_written_sees_a_prompt_that_sees_all_of_itself() -> None:
    """Token by token and beyond what can be remembered, as if everything were read again."""
    model = decoder()
    model.model = replace(model.model, max_positions=8)
    prompt = [3, 1, 4, 1, 5, 9, 2]
    written = list(generate(model, prompt, count=8, sampling=Sampling(temperature=0.0)))
    read, asked = list(prompt), len(prompt)
    for token in written:
        if len(read) > 8:
            read, asked = read[-4:], max(0, asked + 4 - len(read))
        ahead = (asked - 1 - torch.arange(len(read))).clamp(min=0)[None]
        assert int(model(torch.tensor([read]), ahead=ahead)[0, -1].argmax()) == token
        read.append(token)
