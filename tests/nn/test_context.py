"""Documents are attended one by one where that is less work, and by a mask where it is not."""

from __future__ import annotations

import torch

from meshwright.nn.context import MOST_DOCUMENTS, Context, GrowingMemory

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
