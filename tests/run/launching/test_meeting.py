"""Nodes meet before workers start: those that differ, lack something or do not come are named on every node."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.run.launching import meeting
from meshwright.run.launching.meeting import Greeting, Met, agree_on_end, meet
from meshwright.spec.errors import EnvironmentUnfit, Problem

HELLO = Greeting(node=0, nodes=2, host="here", session="s", design="abc", meshwright="1", torch="2")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_LEAVING_SECONDS", 1.0)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def together(greetings: Sequence[Greeting], folders: Sequence[Path], *, seconds: float = 10.0) -> list[Met | str]:
    """What each node finds: that all have met, or the words of what is wrong."""
    head = f"127.0.0.1:{free_port()}"

    def come(place: int) -> Met | str:
        try:
            return meet(greetings[place], head=head, run_dir=folders[place], say=str.strip, seconds=seconds)
        except EnvironmentUnfit as error:
            return str(error)

    with ThreadPoolExecutor(len(greetings)) as pool:
        return list(pool.map(come, range(len(greetings))))


def test_nodes_that_agree_have_the_ranks_of_their_numbers(tmp_path: Path) -> None:
    found = together([replace(HELLO, node=node, nodes=3) for node in (2, 0, 1)], [tmp_path] * 3)
    met = [each for each in found if isinstance(each, Met)]
    assert len(met) == 3
    given = [each.rendezvous.next_rendezvous() for each in met]
    assert [(each.rank, each.world_size) for each in given] == [(2, 3), (0, 3), (1, 3)]
    assert {each.bootstrap_store_info.master_addr for each in given if each.bootstrap_store_info} == {"127.0.0.1"}
    assert {each.interface for each in met} == {"lo"}
    with ThreadPoolExecutor(3) as pool:
        ends = [
            pool.submit(agree_on_end, each.store, code, node=node, nodes=3, seconds=5.0)
            for each, node, code in zip(met, (2, 0, 1), (75, None, None), strict=True)
        ]
        assert [end.result() for end in ends] == [75, 75, 75]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"design": "other"}, "node 1 (there): reads another design (other; node 0 has abc)"),
        ({"nodes": 3}, "node 1 (there): was told of another number of nodes (3; node 0 has 2)"),
        ({"torch": "3"}, "node 1 (there): has another version of torch (3; node 0 has 2)"),
        ({"session": "old"}, "node 1 (there): is of another launch (old; node 0 has s)"),
        ({"problems": (Problem(what="no GPU", where="torch"),)}, "node 1 (there): torch: no GPU"),
    ],
)
def test_a_difference_is_told_on_every_node(change: dict[str, object], says: str, tmp_path: Path) -> None:
    other = replace(HELLO, node=1, host="there", **change)  # type: ignore[arg-type]  # fields of a Greeting
    assert together([HELLO, other], [tmp_path] * 2) == [says, says]


def test_a_run_directory_that_is_not_shared_is_told(tmp_path: Path) -> None:
    other = replace(HELLO, node=1, host="there")
    found = together([HELLO, other], [tmp_path / "one", tmp_path / "two"], seconds=1.0)
    assert all("node 1 (there): does not see what node 0 writes into the run directory" in str(each) for each in found)


def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    greetings = [replace(HELLO, node=node, nodes=4) for node in (0, 2)]
    found = together(greetings, [tmp_path] * 2, seconds=1.0)
    says = "meeting: node 1, 3 of 4 did not come within 1 s (those that came are node 0 (here), node 2 (here))"
    assert str(found[0]).startswith(says)


def test_of_two_nodes_with_one_number_the_second_is_told(tmp_path: Path) -> None:
    greetings = [replace(HELLO, nodes=2), replace(HELLO, node=1), replace(HELLO, node=1, host="twin")]
    found = [str(each) for each in together(greetings, [tmp_path] * 3)]
    assert sum("two nodes say that they are node 1" in each for each in found) == 1


def test_a_head_that_is_not_there_and_one_that_is_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnfit, match=r"node 1 \(here\) does not reach node 0 at 127.0.0.1"):
        meet(replace(HELLO, node=1), head=f"127.0.0.1:{free_port()}", run_dir=tmp_path, say=str.strip, seconds=0.5)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentUnfit, match="node 0 cannot hold the meeting"):
            meet(HELLO, head=f"127.0.0.1:{port}", run_dir=tmp_path, say=str.strip, seconds=0.5)
    for head in ("host", ":5", "host:port", "host:70000"):
        with pytest.raises(EnvironmentUnfit, match="is no HOST:PORT to meet at"):
            meet(HELLO, head=head, run_dir=tmp_path, say=str.strip, seconds=0.5)


def test_nobody_waits_for_ever_for_how_the_run_ended(tmp_path: Path) -> None:
    first, second = together([HELLO, replace(HELLO, node=1)], [tmp_path] * 2)
    assert isinstance(first, Met)
    assert isinstance(second, Met)
    with pytest.raises(EnvironmentUnfit, match="the node of rank 0 does not say how the run ended"):
        agree_on_end(second.store, None, node=1, nodes=2, seconds=0.2)
