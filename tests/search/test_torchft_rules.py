"""Rules of torchft that refuse more than one thing, each of which is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshwright import search
from meshwright.search import Scope
from meshwright.spec.plan import Design
from tests.search.torchft_cases import MORE


@pytest.mark.parametrize(("rule", "made", "says"), MORE, ids=[says for _, _, says in MORE])
def test_what_else_is_refused(rule: str, made: Callable[[], Design], says: str) -> None:
    problems = search.check(made(), scopes=frozenset({Scope.RUNTIME}))
    (told,) = [str(problem) for problem in problems if rule in str(problem)]
    assert says in told
