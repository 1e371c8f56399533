"""Where every rank stood when it was ended, `RUN/stacks`, and which of them stood elsewhere than the others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TOLD = 4  # calls of a stack that are told, the newest first
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function that had not returned."""

    name: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.name} ({Path(self.file).name}:{self.line})"


Stack = tuple[Call, ...]  # the newest call first


def path_of(run_dir: Path, rank: int) -> Path:
    return run_dir / "stacks" / f"rank-{rank:05d}.txt"


def stacks_of(run_dir: Path) -> dict[int, Stack]:
    """The newest stack of the main thread of every rank that left one."""
    found = {}
    for path in sorted((run_dir / "stacks").glob("rank-*.txt")):
        with suppress(OSError, ValueError):
            stack = main_thread(path.read_text(errors="replace"))
            if stack:
                found[int(path.stem.partition("-")[2])] = stack
    return found


def main_thread(text: str) -> Stack:
    """The last stack of a dump of faulthandler, which tells the main thread last; empty where there is none."""
    calls: list[Call] = []
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if frame is None:
            if "most recent call first" in line:
                calls = []
            continue
        number = frame["line"]
        calls.append(Call(name=frame["name"], file=frame["file"], line=int(number) if number.isdigit() else 0))
    return tuple(calls)


def outliers(stacks: Mapping[int, Stack]) -> tuple[int, ...]:
    """Ranks whose innermost calls are none of the most ranks' (ByteRobust: 2509.16293); none where no two are alike."""
    kinds = {rank: _kind(stack) for rank, stack in stacks.items()}
    counts = Counter(kinds.values())
    if not counts:
        return ()
    usual, count = counts.most_common(1)[0]
    return tuple(rank for rank, kind in sorted(kinds.items()) if kind != usual) if count > 1 else ()


def in_words(stack: Stack) -> str:
    """`sleep (loader.py:41), called by next (feed.py:12), ...`, the newest call first."""
    return ", called by ".join(map(str, stack[:_TOLD]))


def _kind(stack: Sequence[Call]) -> tuple[tuple[str, str], ...]:
    return tuple((call.file, call.name) for call in stack[:_TOLD])
