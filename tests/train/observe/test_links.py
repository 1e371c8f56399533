"""Which link is slow, from two matrices of seconds."""

from __future__ import annotations

import pytest

from meshwright.train.events import LinksProbed
from meshwright.train.observe.links import slow_links

HOSTS = ("a", "b", "c", "d")
SIZE = 1 << 20


def probed(seconds: float = 0.1, *, slow: dict[tuple[str, str], float] | None = None, count: int = 4) -> LinksProbed:
    names = HOSTS[:count]
    rows = [[0.0 if one == other else seconds for other in names] for one in names]
    for (one, other), times in (slow or {}).items():
        rows[names.index(one)][names.index(other)] *= times
    matrix = tuple(tuple(row) for row in rows)
    return LinksProbed(hosts=names, host_of=tuple(range(count)), num_bytes=SIZE, seconds=matrix)


def test_a_single_cell_is_a_link() -> None:
    (found,) = slow_links(probed(), probed(slow={("a", "c"): 3.0, ("c", "a"): 2.5}))
    assert found.hosts == ("a", "c")
    assert found.before / found.now == pytest.approx(3.0)
    assert found.words == "the link a - c gives 28.0 Mbit/s of the 83.9 Mbit/s it gave"


def test_a_row_and_a_column_are_a_host() -> None:
    slow = {pair: 4.0 for one in "abd" for pair in ((one, "c"), ("c", one))}
    (found,) = slow_links(probed(), probed(slow=slow))
    assert found.hosts == ("c",)
    assert found.words.startswith("all links of host c give ")


def test_all_of_them_are_the_network_between_them() -> None:
    (found,) = slow_links(probed(), probed(0.25))
    assert found.hosts == HOSTS


def test_of_two_hosts_it_is_the_link_between_them() -> None:
    (found,) = slow_links(probed(count=2), probed(0.3, count=2))
    assert found.hosts == ("a", "b")


def test_a_little_slower_is_not_slow_and_neither_is_the_start_of_a_message() -> None:
    assert slow_links(probed(), probed(0.13)) == ()
    assert slow_links(probed(1e-4), probed(5e-4)) == ()


def test_hosts_that_were_not_probed_say_nothing() -> None:
    alone = LinksProbed(hosts=("a",), host_of=(0, 0), num_bytes=0, seconds=())
    assert slow_links(alone, alone) == ()
