"""Documents of known text."""

from __future__ import annotations

WORDS = ("the", "mill", "stood", "by", "a", "slow", "river", "and", "nobody", "had", "seen", "its", "wheel", "turn")


def story(number: int, sentences: int = 60) -> str:
    """A document of its own words: no two numbers share a text."""
    lines = []
    for index in range(sentences):
        picked = [WORDS[(index * 7 + number * 3 + place * place) % len(WORDS)] for place in range(9)]
        lines.append(f"{' '.join(picked)} {number}-{index}." + ("\n\n" if index % 5 == 4 else "\n"))
    return "".join(lines)
