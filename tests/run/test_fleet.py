"""Hosts of an elastic run: who leads, what they tell each other, and what is left of it when one is lost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.run.elastic.board import Board, Epoch
from meshwright.run.elastic.crew import Place
from meshwright.run.elastic.deputy import Deputy
from meshwright.run.elastic.fleet import Fleet
from meshwright.run.elastic.homes import Home, Term, claim, newest_term
from meshwright.run.elastic.lines import connections_of, own_connections
from tests.run.pretended import PretendCrew

WORD = "the word"
PLACES = tuple(Place(host=host, group=0) for host in (0, 0, 1, 1))


def until(known: Callable[[], bool]) -> None:
    end = time.monotonic() + 30.0
    while not known():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def leading(folder: Path) -> Fleet:
    """Host 0 leads, with workers that do as a test says."""
    board = Board.host(word=WORD, say=str.strip)
    term = Term(number=1, home=board.home, digest="d")
    assert claim(folder, term)
    board.lead(1)
    own = PretendCrew(board)
    fleet = Fleet(folder, board=board, arguments=(), places=PLACES, own=own, host=0, term=term)
    fleet.look()
    return fleet


def following(fleet: Fleet, *, name: str = "gpu-7") -> Deputy:
    """Host 1."""
    board = Board.at([fleet.board.home], word=WORD)
    home = Home(host=1, address="127.0.0.1", port=1)
    deputy = Deputy(board=board, crew=PretendCrew(board), home=home, name=name)
    assert deputy.look()
    return deputy


def crew_of(deputy: Deputy) -> PretendCrew:
    assert isinstance(deputy.crew, PretendCrew)
    return deputy.crew


def looked(fleet: Fleet, known: Callable[[], bool]) -> None:
    def look() -> bool:
        fleet.look()
        return known()

    until(look)


def test_a_process_finds_its_own_connections_as_the_system_tells_of_them() -> None:
    board = Board.host(word=WORD, say=str.strip)
    other = Board.at([board.home], word=WORD)
    found = own_connections()
    assert other.home.port in {one.raddr.port for one in found}
    assert sorted(found) == sorted((one.fd, one.laddr, one.raddr) for one in connections_of(os.getpid()))


def test_one_host_leads_in_a_term(tmp_path: Path) -> None:
    home = Home(host=3, address="10.0.0.3", port=4000)
    assert Home.of(str(home)) == home
    assert newest_term(tmp_path) is None
    first = Term(number=1, home=home, digest="d")
    assert claim(tmp_path, first)
    assert not claim(tmp_path, Term(number=1, home=Home(host=4, address="10.0.0.4", port=1), digest="d"))
    assert newest_term(tmp_path) == first


def test_who_loses_the_board_turns_to_the_one_that_leads_and_tells_it_all_again() -> None:
    first, second = Board.host(word=WORD, say=str.strip), Board.host(word=WORD, say=str.strip, host=1)
    first.lead(1)
    worker = Board.at([first.home, second.home], word=WORD)
    worker.register("0.0", pid=7)
    worker.stand_ready("0.0")
    second.make(Epoch(number=0, members=("0.0",), design="design.json", homes=(second.home,)))
    second.lead(2)
    del first
    assert worker.first_epoch("0.0").homes == (second.home,)
    assert (worker.term, worker.turns, worker.home) == (2, 1, second.home)
    assert (second.pid("0.0"), second.is_ready("0.0")) == (7, True)


def test_a_host_starts_what_it_is_told_to_and_says_how_it_ended(tmp_path: Path) -> None:
    fleet = leading(tmp_path)
    assert not fleet.can_start("2.0")
    assert not fleet.is_whole
    deputy = following(fleet)
    crew = crew_of(deputy)
    looked(fleet, lambda: fleet.is_whole)
    assert [home.host for home in fleet.homes] == [0, 1]
    fleet.start("2.0")
    fleet.start("3.0")
    deputy.look()
    assert crew.names == ("2.0", "3.0")
    looked(fleet, lambda: fleet.names == ("2.0", "3.0"))
    assert not fleet.has_ended("3.0")
    crew.fails("3.0")
    deputy.look()
    looked(fleet, lambda: fleet.has_ended("3.0"))
    failure = fleet.failure("3.0", rank=3)
    assert failure is not None
    assert (failure.rank, failure.problems[0].what) == (3, "a bad thing")
    fleet.kill("2.0")
    deputy.look()
    looked(fleet, lambda: fleet.has_ended("2.0"))
    assert fleet.failure("2.0", rank=2) is None
    assert fleet.holds()


def test_a_host_that_is_lost_takes_its_workers_with_it_and_may_come_back(tmp_path: Path) -> None:
    fleet = leading(tmp_path)
    deputy = following(fleet)
    looked(fleet, lambda: fleet.is_whole)
    fleet.start("2.0")
    deputy.look()
    del deputy
    looked(fleet, lambda: fleet.has_ended("2.0"))
    failure = fleet.failure("2.0", rank=2)
    assert failure is not None
    assert failure.problems[0].what == "node 1 (gpu-7) was lost"
    assert not fleet.can_start("2.1")
    assert fleet.holds(), "no other host leads"
    assert newest_term(tmp_path) == Term(number=2, home=fleet.board.home, digest="d")
    again = following(fleet)
    looked(fleet, lambda: fleet.can_start("2.1"))
    fleet.start("2.1")
    again.look()
    assert crew_of(again).names == ("2.1",)
    assert fleet.has_ended("2.0")
    assert claim(tmp_path, Term(number=3, home=again.home, digest="d"))
    del again
    looked(fleet, lambda: fleet.others == ())
    assert not fleet.holds(), "another host leads, which may have gone on with the others"
