"""What is wrong is told so that a terminal shows it and obeys nothing of it."""

from __future__ import annotations

import pytest

from meshwright.spec.errors import LONGEST_WORD, Problem, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
        ("a\rb\x9bc", r"a\rb\x9bc"),
        ("safe\u202etxt", r"safe\u202etxt"),
        ("half \ud800", r"half \ud800"),
        ("two\nlines\tand Grüße 日本", "two\nlines\tand Grüße 日本"),
        ("w" * LONGEST_WORD, "w" * LONGEST_WORD),
        ("w" * (LONGEST_WORD + 1) + " end", "w" * LONGEST_WORD + "... end"),
    ],
)
def test_a_terminal_obeys_nothing_of_a_message(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert str(Problem(where="file", what=text)) == f"file: {shown}"
