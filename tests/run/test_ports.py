"""A board is there for those who know the word, and goes on for them whatever others send."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from meshwright.run import handshake, ports
from meshwright.run.elastic.keys import KeyServer, KeyStore
from meshwright.run.handshake import introduce
from tests.run.false_port import false_port

WORD = "the word"
HERE = "127.0.0.1"
CALLS = 1 + 32 + 32  # bytes of a handshake that a caller sends


class Door:
    """A board with a value, and what it says of those that it refuses."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.server = KeyServer(HERE, word=WORD, say=self.said.append)
        self.server.start()
        self.friend = self.store()
        self.friend.set("key", "value")

    def store(self, word: str = WORD, *, port: int = 0, seconds: float = 5.0) -> KeyStore:
        return KeyStore(HERE, port or self.server.port, word=word, timeout=timedelta(seconds=seconds))

    def line(self) -> socket.socket:
        return socket.create_connection((HERE, self.server.port), timeout=5)

    def tells(self, why: str, *, times: int = 1) -> bool:
        """It has refused so many for that reason, in a line each, and still serves who was there and who comes."""
        end = time.monotonic() + 5.0
        while sum(why in line for line in self.said) < times and time.monotonic() < end:
            time.sleep(0.005)
        assert self.friend.get("key") == self.store().get("key") == b"value"
        assert all(line.startswith("the board refused a connection of 127.0.0.1:") for line in self.said)
        return len(self.said) == times and all(why in line and "\n" not in line for line in self.said)


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.server.close()
    made.server.join(5)


def ends(line: socket.socket) -> bool:
    """The other side has hung up, having said no more than the number that a handshake begins with."""
    said = 0
    try:
        while more := line.recv(4096):
            said += len(more)
    except ConnectionResetError:
        return said <= 32
    return said <= 32


def test_values_are_there_for_all_who_know_the_word(door: Door) -> None:
    other = door.store()
    assert other.find("nothing", "key") == (None, b"value")
    assert not other.check(["key", "nothing"])
    late = threading.Timer(0.05, door.friend.set, ("late", b"\0\xff"))
    late.start()
    assert other.get("late") == b"\0\xff"
    other.set("large", "x" * 300_000)
    assert door.friend.get("large") == b"x" * 300_000
    with pytest.raises(dist.DistStoreError, match="wait timeout"):
        other.wait(["nothing"], timedelta(seconds=0.01))
    assert door.said == []


@pytest.mark.parametrize("word", ["", "another", WORD[:-1]])
def test_who_does_not_know_the_word_is_refused(door: Door, word: str) -> None:
    with pytest.raises(dist.DistNetworkError, match="connection closed by peer"):
        door.store(word)
    assert door.tells("it does not know the word")


def relayed(door: Door, change: Callable[[bytes, int], bytes]) -> tuple[int, list[bytes]]:
    """A port in front of the board, and what is heard there of callers, which `change` may change by its place."""
    heard: list[bytes] = []
    listening = socket.create_server((HERE, 0))

    def relay() -> None:
        caller, _ = listening.accept()
        with caller, door.line() as board, listening:
            threading.Thread(target=lambda: pour(board, caller), daemon=True).start()
            while more := caller.recv(1 << 16):
                heard.append(more)
                board.sendall(change(more, len(heard)))

    threading.Thread(target=relay, daemon=True).start()
    return listening.getsockname()[1], heard


def pour(source: socket.socket, sink: socket.socket) -> None:
    try:
        while more := source.recv(1 << 16):
            sink.sendall(more)
        sink.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def test_what_was_heard_of_another_is_of_no_use(door: Door) -> None:
    port, heard = relayed(door, lambda said, _: said)
    door.store(port=port).set("key", "value")
    assert WORD.encode() not in b"".join(heard)
    with door.line() as line:
        line.sendall(b"".join(heard))
        assert ends(line)
    assert door.tells("it does not know the word")


def test_what_the_board_says_of_itself_is_no_proof_of_a_caller(door: Door) -> None:
    """Two connections to it, one of which is answered with what the other was."""
    with door.line() as one, door.line() as other:
        numbers = handshake.exactly(one, 32), handshake.exactly(other, 32)
        other.sendall(b"K" + numbers[0] + bytes(32))
        assert ends(other)
        one.sendall(b"K" + numbers[1] + bytes(32))
        assert ends(one)
    assert door.tells("it does not know the word", times=2)


def test_what_is_changed_on_the_way_is_refused(door: Door) -> None:
    def turned(said: bytes, number: int) -> bytes:
        return said[:-1] + bytes([said[-1] ^ 1]) if number == 2 else said

    port, _ = relayed(door, turned)
    store = door.store(port=port)
    with pytest.raises(dist.DistNetworkError, match="connection closed by peer"):
        store.set("key", "other")
    assert door.tells("its message was changed on the way")


def test_what_is_said_twice_is_refused(door: Door) -> None:
    port, _ = relayed(door, lambda said, number: said * (1 + (number == 2)))
    store = door.store(port=port)
    store.set("key", "value")
    assert door.tells("its message was changed on the way")


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", bytes(8192), b"\xff" * 10])
def test_garbage_is_refused(door: Door, said: bytes) -> None:
    with door.line() as line:
        line.sendall(said)
        assert ends(line)
    assert door.tells("it does not begin as a handshake does")


def test_no_more_is_read_than_a_handshake_has(door: Door) -> None:
    with door.line() as line:
        with suppress(OSError):
            line.sendall(b"K" + b"\xff" * (1 << 22))
        assert ends(line)
    assert door.tells("it does not know the word")


def test_a_message_of_any_length_is_not_waited_for(door: Door) -> None:
    with door.line() as line:
        assert introduce(line, word=WORD, purpose=b"board") is not None
        line.sendall((1 << 31).to_bytes(4, "big") + bytes(32))
        assert ends(line)
    assert door.tells("it announces a message of 2,147,483,648 bytes")


@pytest.mark.parametrize("body", [b"\0\0\0\x04what", b"\0\0\0\x03set", b"\0\0\xff\xff", b"", b"\0\0\0\x03set\0"])
def test_a_message_of_no_meaning_is_refused(door: Door, body: bytes) -> None:
    with door.line() as line:
        seal = introduce(line, word=WORD, purpose=b"board")
        assert seal is not None
        line.sendall(seal.closed(body))
        assert ends(line)
    assert door.tells("it")


@pytest.mark.parametrize("said", [b"", b"K", b"K" + bytes(40), b"S" + b"\xff" * 32])
def test_who_says_nothing_more_is_not_waited_for(door: Door, said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "PATIENCE_SECONDS", 0.2)
    with door.line() as line:
        line.sendall(said)
        assert ends(line)
    assert door.tells("it did not end its handshake within 0.2 s")


def test_who_only_looks_whether_somebody_listens_is_not_told_of(door: Door) -> None:
    door.line().close()
    with door.line() as line:
        line.sendall(b"K" + bytes(CALLS - 2))
        line.shutdown(socket.SHUT_WR)  # a close would take back what the door has not read
        assert ends(line)
    assert door.tells("it hung up in the middle of a handshake")


def test_many_who_say_nothing_keep_nobody_out(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_MOST_AT_THE_DOOR", 8)
    lines = [door.line() for _ in range(24)]
    assert door.store().get("key") == b"value"
    for line in lines:
        line.close()


def test_no_more_than_some_are_told_of(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_MOST_TOLD", 2)
    for _ in range(4):
        with door.line() as line:
            line.sendall(b"?")
            assert ends(line)
    assert len(door.said) == 2
    assert door.said[1].endswith("; no more are told")


def test_a_board_that_does_not_know_the_word_is_not_believed(door: Door) -> None:
    """Nobody is led to another's board by taking its place."""
    with false_port() as (_, port), pytest.raises(dist.DistNetworkError, match="does not know the word of this run"):
        door.store(port=port)


def test_a_board_knows_who_is_there(door: Door) -> None:
    other = door.store()
    other.set("other", "is there")
    assert {other.end, door.friend.end} <= door.server.guests
    other.hang_up()
    with pytest.raises(dist.DistNetworkError, match="connection closed by peer"):
        other.find("key")
    end = time.monotonic() + 5.0
    while other.end in door.server.guests:
        assert time.monotonic() < end, "it is missed"
        time.sleep(0.005)


def test_who_waits_fails_once_it_hangs_up(door: Door) -> None:
    other = door.store()
    threading.Timer(0.1, other.hang_up).start()
    with pytest.raises(dist.DistNetworkError):
        other.wait(["nothing"])
