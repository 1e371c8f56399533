"""What children say is said while they work, and how they end is told: of functions that import next to nothing."""

from __future__ import annotations

import os
import signal

import pytest

from meshwright.run.children import in_children
from meshwright.spec.errors import WorkerFailed


def speaking(lines: list[str], say: object) -> int:
    assert callable(say)
    for line in lines:
        say(line)
    return len(lines)


def test_what_children_say_is_said_while_they_work() -> None:
    said: list[str] = []
    assert in_children(speaking, [{"lines": ["one", "two"]}, {"lines": []}], seconds=60, say=said.append) == (2, 0)
    assert said == ["one", "two"]


def broken(*, rank: int) -> int:
    if rank == 1:
        raise ValueError("rank 1 has no luck")
    return rank


def test_the_error_of_a_child_comes_back() -> None:
    with pytest.raises(WorkerFailed, match="rank 1 has no luck"):
        in_children(broken, [{"rank": 0}, {"rank": 1}], seconds=60)


def asked_to_end() -> str:
    os.kill(os.getpid(), signal.SIGINT)
    return "goes on"


def test_ctrl_c_is_for_the_parent_which_ends_its_children() -> None:
    assert in_children(asked_to_end, [{}], seconds=60) == ("goes on",)
