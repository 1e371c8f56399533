"""Who knows the word is let in to the store, and nobody else, whatever they send."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from random import Random

import psutil
import pytest
from torch.distributed import DistError, TCPStore

from meshwright.run.launching import token
from meshwright.run.launching.gate import Door, Gate, knows, leave_a_note
from meshwright.run.rendezvous import server_at, store_here
from tests.run.false_port import false_port

WORD = "the word"
SOON = timedelta(seconds=5)


@pytest.fixture(scope="module")
def gate() -> Iterator[Gate]:
    store = store_here(timeout=SOON)
    store.set("key", "value")
    made = Gate(server_at("127.0.0.1", 0), word=WORD, store_port=store.port, say=str.strip)
    made.start()
    yield made
    del store


def through(gate: Gate, word: str) -> TCPStore:
    door = Door(head=("127.0.0.1", gate.port), word=word)
    door.start()
    return TCPStore("127.0.0.1", door.port, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False)


def test_a_node_that_knows_the_word_reaches_the_store(gate: Gate) -> None:
    assert knows(WORD, head=("127.0.0.1", gate.port))
    stores = [through(gate, WORD) for _ in range(3)]
    assert [store.get("key") for store in stores] == [b"value"] * 3
    stores[0].set("large", "x" * 300_000)
    assert len(stores[1].get("large")) == 300_000


def test_a_node_that_does_not_is_not_let_in(gate: Gate) -> None:
    for word in ("", "another", WORD[:-1]):
        assert not knows(word, head=("127.0.0.1", gate.port))
    with pytest.raises(DistError):
        through(gate, "another")


def test_whatever_is_sent_the_gate_stays_open_for_those_who_know(gate: Gate) -> None:
    rng = Random(0)
    for _ in range(30):
        with socket.create_connection(("127.0.0.1", gate.port), timeout=5) as line:
            line.recv(32)
            line.sendall(rng.choice((b"K", b"S", b"")) + rng.randbytes(rng.randrange(200)))
    leave_a_note("y" * 100_000, head=("127.0.0.1", gate.port))
    assert knows(WORD, head=("127.0.0.1", gate.port))
    assert through(gate, WORD).get("key") == b"value"
    assert all(len(text) <= 4096 for text in gate.strangers)


def test_the_head_must_know_the_word_too() -> None:
    """Nobody is led to another's store by taking the place of node 0."""
    with false_port() as address:
        assert not knows(WORD, head=address)


def test_only_the_gate_listens_at_the_head(gate: Gate) -> None:
    listening = {each.laddr for each in psutil.Process().net_connections("inet") if each.status == psutil.CONN_LISTEN}
    assert ("127.0.0.1", gate.port) in {tuple(each) for each in listening}
    assert all(each.ip == "127.0.0.1" for each in listening)


def test_the_word_is_its_owner_s_to_read(tmp_path: Path) -> None:
    assert token.read(tmp_path) == ""
    first, second = token.leave(tmp_path), token.leave(tmp_path)
    assert token.read(tmp_path) == second != first
    assert stat.S_IMODE((tmp_path / "meeting").stat().st_mode) == 0o600
