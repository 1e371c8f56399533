"""Transport: the state of one replica to another that was away, between two that know the run's word.

torchft's own transports take it from whoever answers, and unpickle what comes. Here both sides prove that they know the
word (`run.handshake`), messages are sealed, and what comes is a description in JSON, which has to be that of what the
other side holds itself, and then the bytes of tensors.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from asyncio import StreamReader as Reader
from asyncio import StreamWriter as Writer
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torchft.checkpointing.transport import CheckpointTransport

from meshwright.run.handshake import HEAD, Refused, Seal, exactly, introduce
from meshwright.run.ports import BACKLOG, Guarded
from meshwright.run.rendezvous import LOOPBACK_ADDRESS
from meshwright.train.replicas import Handed

PURPOSE = "replicas"
CHUNK_BYTES = 4 * 2**20
_LOOK_SECONDS = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """What is handed over after round `step`: its description, and copies of tensors as bytes."""

    step: int
    description: bytes
    parts: tuple[memoryview, ...]


class Transport(CheckpointTransport[dict[str, Any]]):
    """Of one rank. `like` gives what this rank holds itself, which is what it takes and nothing else."""

    def __init__(self, *, word: str, like: Callable[[], Mapping[str, Tensor]], say: Callable[[str], None]) -> None:
        self._word, self._like = word, like
        self._server = _Server(word=word, say=say)
        self._server.start()

    def metadata(self) -> str:
        return f"{LOOPBACK_ADDRESS}:{self._server.port}"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta) -> None:
        """A copy of it is there for who asks, until this round ends."""
        handed: Handed = state_dict["user"]["default"]
        described = {"step": step, "torchft": state_dict["torchft"], "progress": handed.progress}
        described["tensors"] = _described(handed.tensors)
        parts = tuple(_bytes(x.detach().clone(memory_format=torch.contiguous_format)) for x in handed.tensors.values())
        self._server.staged = Staged(step=step, description=json.dumps(described).encode(), parts=parts)

    def disallow_checkpoint(self) -> None:
        self._server.staged = None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        """Raises ConnectionError, TimeoutError or Refused where it does not come whole, from one who knows the word."""
        host, _, port = metadata.rpartition(":")
        own = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in self._like().items()}
        end = time.monotonic() + timeout.total_seconds()
        with socket.create_connection((host, int(port)), timeout=timeout.total_seconds()) as line:
            seal = introduce(line, word=self._word, purpose=PURPOSE.encode())
            if seal is None:
                raise Refused("who listens there does not know the word of this run")
            line.sendall(seal.closed(json.dumps(step).encode()))
            told = json.loads(_heard(line, seal))
            if told["step"] != step or told["tensors"] != _described(own):
                raise Refused("what it holds is not of this model, plan and round")
            for x in own.values():
                into = _bytes(x)
                for start in range(0, len(into), CHUNK_BYTES):
                    chunk = _heard(line, seal)
                    into[start : start + len(chunk)] = chunk
                    if time.monotonic() > end:
                        raise TimeoutError(f"the state did not come within {timeout.total_seconds():g} s")
        counts = {name: int(told["torchft"][name]) for name in ("step", "batches_committed")}
        return {"user": {"default": Handed(tensors=own, progress=told["progress"])}, "torchft": counts}

    def shutdown(self, wait: bool = True) -> None:
        self._server.close()


class _Server(Guarded):
    """Gives what is staged to those who know the word."""

    def __init__(self, *, word: str, say: Callable[[str], None]) -> None:
        listening = socket.create_server((LOOPBACK_ADDRESS, 0), backlog=BACKLOG)
        super().__init__(listening, word=word, purpose=PURPOSE, say=say)
        self.staged: Staged | None = None

    async def _welcome(self, reader: Reader, writer: Writer, seal: Seal) -> None:
        head = await reader.readexactly(HEAD)
        step = json.loads(seal.opened(head, await reader.readexactly(seal.length(head))))
        while (staged := self.staged) is None or staged.step != step:
            await asyncio.sleep(_LOOK_SECONDS)
            if writer.transport.is_closing() or reader.at_eof():
                return
        writer.write(seal.closed(staged.description))
        for part in staged.parts:
            for start in range(0, len(part), CHUNK_BYTES):
                writer.write(seal.closed(bytes(part[start : start + CHUNK_BYTES])))
                await writer.drain()
        await writer.drain()


def _heard(line: socket.socket, seal: Seal) -> bytes:
    head = exactly(line, HEAD)
    return seal.opened(head, exactly(line, seal.length(head)))


def _described(tensors: Mapping[str, Tensor]) -> list[list[Any]]:
    return [[name, str(x.dtype), list(x.shape)] for name, x in tensors.items()]


def _bytes(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    assert x.is_contiguous(), "it was made so"
    plain: Any = x.reshape(-1).view(torch.uint8).numpy()
    return memoryview(plain)
