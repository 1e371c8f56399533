"""What the closest miss names fits where it is followed."""

from __future__ import annotations

import re

import pytest

from meshwright import catalog, search
from meshwright.spec.errors import NoPlanFits


def test_more_devices_are_named_with_all_that_makes_their_plan_fit() -> None:
    """What is followed to the letter fits: its offload is named, its chance, and that it is one to predict alone."""
    beside = catalog.load_cluster("1xRTX-4090")
    model = catalog.load_model("llama-3.1-8b")
    length = ("sequence_length=4096", "batch_tokens=64Ki")
    job = catalog.load_job(None, sets=length)
    with pytest.raises(NoPlanFits) as raised:
        search.design(model, beside, job)
    (told,) = re.findall(r"such devices would fit \((.*)\)", str(raised.value))
    assert re.search(r"optimizer offloaded; fits with [\d.]+ %$", told)
    narrow = catalog.load_job(None, sets=(*length, "optimizer.state=dynamic8", "optimizer.master=bf16_stochastic"))
    with pytest.raises(NoPlanFits) as raised:
        search.design(model, beside, narrow)
    assert re.search(r"offloaded; fits with [\d.]+ %; can be predicted and not trained yet\)", str(raised.value))
