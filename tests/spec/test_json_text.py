"""JSON that others made: halves of characters are none, whole ones are taken however they are written."""

from __future__ import annotations

import pytest

from meshwright.spec.json_text import parse_json


@pytest.mark.parametrize(
    "text",
    ['{"a": "\\ud83d\\ude00"}', '{"a": "\U0001f600"}', '{"a": "\\\\ud800"}', b'{"a": "\\u00e9"}', '{"a": "x\\udcff"}'],
)
def test_whole_characters_are_taken(text: str | bytes) -> None:
    assert list(parse_json(text)) == ["a"]


@pytest.mark.parametrize("text", ['{"a": "x\\ud800"}', '{"\\uDFff": 1}', b'[["\\ud83d\\ud83d"]]'])
def test_half_of_a_character_is_none_but_where_it_is_asked_for(text: str | bytes) -> None:
    with pytest.raises(ValueError, match="half of a character"):
        parse_json(text)
    parse_json(text, halves=True)
