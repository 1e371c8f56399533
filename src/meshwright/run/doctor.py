"""doctor: what this machine has of what training needs, tried for real, each with one command to try."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.run.children import in_child, in_children
from meshwright.run.detect import calibration_file
from meshwright.run.machine import cache_root, installed
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.json_text import parse_json
from meshwright.spec.units import format_bytes

if TYPE_CHECKING:
    from meshwright.run.probes import TorchFacts

PYTHON_VERSIONS = ((3, 11), (3, 13))
TORCH_VERSIONS = ((2, 11), (2, 14))
_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED_BYTES = 64 * 2**20
_LEAST_FILES = 1024
_LEAST_DISK_BYTES = 2 * 2**30
_LEAST_WRITE_SPEED = 20e6
_WRITTEN_BYTES = 32 * 2**20
_CHILD_SECONDS = 90.0
_WORST_CLOCK_SECONDS = 5.0


class State(StrEnum):
    """`warn`: training works, something else is slower or missing. `fail`: training does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing that was looked at: what was found, and a command that shows it or mends it."""

    name: str
    state: State
    found: str
    command: str


def doctor(*, folder: Path | None = None) -> tuple[Row, ...]:
    """Every row, in the order in which things are needed; takes some seconds, for workers are really started.

    `folder` is where runs would be kept; None is the current directory. Nothing is left behind.
    """
    place = folder or Path.cwd()
    facts = _facts()
    rows = [_python(), _torch(facts), _gloo(), *_accelerators(facts), _shared_memory(), _open_files()]
    rows += [_disk(place), _disk_speed(place), _compiler(), _port(), _clock(place), _tokenizers(), _calibration()]
    return tuple(rows)


def _python() -> Row:
    version = sys.version_info[:2]
    known = PYTHON_VERSIONS[0] <= version < PYTHON_VERSIONS[1]
    state = State.OK if known else State.WARN if version >= PYTHON_VERSIONS[1] else State.FAIL
    found = platform.python_version() if known else f"{platform.python_version()}; tested on 3.11 and 3.12"
    return Row(name="python", state=state, found=found, command="python --version")


def _facts() -> TorchFacts | MeshwrightError:
    try:
        from meshwright.run.probes import torch_facts

        facts: TorchFacts = in_child(torch_facts, {}, seconds=_CHILD_SECONDS)
    except ImportError as error:
        return MeshwrightError(str(error))
    except MeshwrightError as error:
        return error
    return facts


def _torch(facts: TorchFacts | MeshwrightError) -> Row:
    command = "python -c 'import torch; print(torch.__version__)'"
    if isinstance(facts, MeshwrightError):
        return Row(name="torch", state=State.FAIL, found=f"cannot be imported: {facts}", command=command)
    version = tuple(int(part) for part in facts.version.split("+")[0].split(".")[:2])
    known = TORCH_VERSIONS[0] <= version < TORCH_VERSIONS[1]
    found = facts.version if known else f"{facts.version}; supported are 2.11 to 2.13"
    state = State.OK if known else State.WARN if version >= TORCH_VERSIONS[1] else State.FAIL
    return Row(name="torch", state=state, found=found, command=command)


def _gloo() -> Row:
    """Two fresh processes sum a tensor with each other."""
    command = "torchrun --standalone --nproc-per-node 2 -m meshwright.run.probes"
    with tempfile.TemporaryDirectory(prefix="meshwright-") as temporary:
        store = str(Path(temporary) / "store")
        given = [{"rank": rank, "world": 2, "store": store} for rank in range(2)]
        try:
            from meshwright.run.probes import all_reduce_once

            results = in_children(all_reduce_once, given, seconds=_CHILD_SECONDS)
        except (MeshwrightError, ImportError) as error:
            return Row(name="gloo", state=State.FAIL, found=f"two processes could not talk: {error}", command=command)
    right = all(total == 3.0 for total, _ in results)
    milliseconds = 1e3 * max(seconds for _, seconds in results)
    found = f"two processes all-reduced 1 MiB in {milliseconds:.1f} ms" if right else f"wrong sums: {results}"
    return Row(name="gloo", state=State.OK if right else State.FAIL, found=found, command=command)


def _accelerators(facts: TorchFacts | MeshwrightError) -> Iterator[Row]:
    if isinstance(facts, MeshwrightError) or not facts.accelerators:
        yield Row(name="accelerators", state=State.OK, found="none seen; the processor is used", command="nvidia-smi")
        return
    names = ", ".join(dict.fromkeys(facts.accelerators))
    yield Row(name="accelerators", state=State.OK, found=f"{len(facts.accelerators)} x {names}", command="nvidia-smi")
    state = State.OK if facts.nccl else State.FAIL if len(facts.accelerators) > 1 else State.WARN
    found = f"nccl {facts.nccl}" if facts.nccl else "this torch has no nccl"
    yield Row(
        name="nccl", state=state, found=found, command="python -c 'import torch; print(torch.cuda.nccl.version())'"
    )


def _shared_memory() -> Row:
    command = f"df -h {_SHARED_MEMORY}"
    if not _SHARED_MEMORY.is_dir():
        return Row(name="shared memory", state=State.WARN, found=f"no {_SHARED_MEMORY}", command=command)
    size = shutil.disk_usage(_SHARED_MEMORY).total
    state = State.OK if size >= _LEAST_SHARED_BYTES else State.WARN
    advice = "" if state is State.OK else "; give the container more (docker run --shm-size=1g)"
    return Row(
        name="shared memory",
        state=state,
        found=f"{format_bytes(size)} in {_SHARED_MEMORY}{advice}",
        command=command,
    )


def _open_files() -> Row:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state = State.OK if soft == resource.RLIM_INFINITY or soft >= _LEAST_FILES else State.WARN
    advice = "" if state is State.OK else f"; many workers need more (ulimit -n {min(hard, 65536)})"
    shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    return Row(name="open files", state=state, found=f"{shown} at once{advice}", command="ulimit -n")


def _disk(place: Path) -> Row:
    command = f"df -h {place}"
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Row(name="disk", state=State.FAIL, found=f"{place}: {error.strerror}", command=command)
    state = State.OK if free >= _LEAST_DISK_BYTES else State.WARN
    return Row(name="disk", state=state, found=f"{format_bytes(free)} free in {place}", command=command)


def _disk_speed(place: Path) -> Row:
    """Writes and flushes a file where runs would be, and removes it."""
    command = f"dd if=/dev/zero of={place}/probe bs=1M count=32 conv=fsync && rm {place}/probe"
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".meshwright-") as file:
            start = time.perf_counter()
            file.write(os.urandom(_WRITTEN_BYTES))
            file.flush()
            os.fsync(file.fileno())
            speed = _WRITTEN_BYTES / (time.perf_counter() - start)
    except OSError as error:
        found = f"cannot write in {place}: {error.strerror}"
        return Row(name="write speed", state=State.FAIL, found=found, command=command)
    state = State.OK if speed >= _LEAST_WRITE_SPEED else State.WARN
    return Row(name="write speed", state=state, found=f"{format_bytes(speed)}/s, flushed", command=command)


def _compiler() -> Row:
    wanted = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    found = next((path for name in wanted if name and (path := shutil.which(name))), None)
    if found:
        return Row(name="C++ compiler", state=State.OK, found=found, command=f"{found} --version")
    missing = "none; job.compile stays off without one"
    return Row(name="C++ compiler", state=State.WARN, found=missing, command="apt-get install g++")


def _port() -> Row:
    """A socket on this host's loopback listens and is reached."""
    command = "ss -ltn"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    except OSError as error:
        return Row(name="port", state=State.FAIL, found=f"loopback cannot be used: {error}", command=command)
    return Row(name="port", state=State.OK, found=f"loopback works (port {port} was free)", command=command)


def _clock(place: Path) -> Row:
    """The clock of this host against that of the file system, which checkpoints are dated by."""
    command = "date; timedatectl"
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".meshwright-") as file:
            ahead = Path(file.name).stat().st_mtime - time.time()
    except OSError as error:
        return Row(name="clock", state=State.WARN, found=f"not compared: {error.strerror}", command=command)
    state = State.OK if abs(ahead) <= _WORST_CLOCK_SECONDS else State.WARN
    return Row(name="clock", state=state, found=f"{abs(ahead):.2f} s from the file system's", command=command)


def _tokenizers() -> Row:
    found = {name: installed(name) for name in ("tokenizers", "tiktoken")}
    missing = [name for name, version in found.items() if version == "not installed"]
    state = State.FAIL if "tokenizers" in missing else State.WARN if missing else State.OK
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    return Row(name="tokenizers", state=state, found=text, command="pip install tokenizers tiktoken")


def _calibration() -> Row:
    command = "meshwright cluster measure"
    path = calibration_file()
    if not path.is_file():
        found = f"this machine was not measured (none in {cache_root()}); predictions use typical figures"
        return Row(name="calibration", state=State.WARN, found=found, command=command)
    try:
        source = str(parse_json(path.read_text()).get("source", "of unknown source"))
    except (OSError, json.JSONDecodeError, AttributeError) as error:
        return Row(name="calibration", state=State.WARN, found=f"{path} cannot be read: {error}", command=command)
    return Row(name="calibration", state=State.OK, found=source, command=command)


def healthy(rows: Iterable[Row]) -> bool:
    """Whether training works: no row failed."""
    return all(row.state is not State.FAIL for row in rows)
