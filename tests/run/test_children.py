"""What children say is said while they work."""

from __future__ import annotations

from meshwright.run.children import in_children


def speaking(lines: list[str], say: object) -> int:
    assert callable(say)
    for line in lines:
        say(line)
    return len(lines)


def test_what_children_say_is_said_while_they_work() -> None:
    said: list[str] = []
    assert in_children(speaking, [{"lines": ["one", "two"]}, {"lines": []}], seconds=60, say=said.append) == (2, 0)
    assert said == ["one", "two"]
