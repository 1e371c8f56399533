"""Rules of the context axis: what is told to be chosen can be chosen."""

from __future__ import annotations

import pytest

from meshwright.search.context_rules import CONTEXT_RULES
from meshwright.spec.exchange import Exchange
from tests.search import search_samples as samples
from tests.search.rule_designs import D


@pytest.mark.parametrize(
    ("context", "inner", "fix"),
    [
        (4, 1, "choose 4"),
        (16, 1, "choose 1, 2, 4 or 8, and a context axis of as many"),
        (16, 16, "choose 1, 2, 4 or 8, and a context axis of as many, which a recurrence needs"),
    ],
)
def test_what_is_chosen_for_a_recurrence_over_context_ranks_is_refused_by_no_other_rule(
    context: int, inner: int, fix: str
) -> None:
    """Of eight heads."""
    made = D(
        of=samples.model(layer=samples.recurrent_layer()), context=context, tensor=1, exchange=Exchange(inner=inner)
    )
    found = [problem for rule in CONTEXT_RULES if (problem := rule.check(made)) and "exchange" in problem.where]
    assert [problem.fix for problem in found] == [fix]
