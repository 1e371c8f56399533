"""Launching: signals, the first failure in words, and what each worker finds in its environment."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from meshwright.run import failure
from meshwright.run.launch import Launched, Party, launch, threads_per_worker
from meshwright.run.launching.meeting import Greeting, meet
from meshwright.spec.errors import ExitCode, WorkerFailed

WORKER = """
import json, os, pathlib, signal, sys, time
run, act = pathlib.Path(sys.argv[1]), sys.argv[2]
rank = int(os.environ["RANK"])
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
wanted = ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
(run / f"env-{rank}.json").write_text(json.dumps({name: os.environ[name] for name in wanted}))
if act == "fine":
    from psutil import CONN_LISTEN, Process
    sockets = [each.laddr for each in Process(os.getppid()).net_connections("inet") if each.status == CONN_LISTEN]
    (run / f"listening-{rank}.json").write_text(json.dumps(sockets))
if act == "kill" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if act == "fail" and rank == 1:
    sys.path[:0] = []
    from meshwright.run import failure
    from meshwright.spec.errors import ConfigError, Problem
    sys.exit(failure.record(ConfigError(Problem(what="a bad thing", where="here")),
        path=pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]), run_dir=run))
if act == "fine":
    sys.exit(0)
(run / f"ready-{rank}").touch()
end = time.time() + 20
while not asked and time.time() < end:
    time.sleep(0.02)
(run / f"asked-{rank}").write_text(str(len(asked)))
while act == "hang" and time.time() < end:
    time.sleep(0.02)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What pretends to be a worker. Tests that nohup or a shell in the background started ignore what is sent here."""
    (tmp_path / "pretend_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGQUIT)}
    yield "pretend_worker"
    for number, former in before.items():
        signal.signal(number, former)


def start(tmp_path: Path, module: str, act: str, said: list[str] | None = None) -> Launched:
    say = (said if said is not None else []).append
    return launch(tmp_path, ranks=(0, 1), arguments=[act], say=say, module=module)


def told(launched: Launched) -> WorkerFailed:
    failures = failure.read(launched.failures)
    return failure.told(failures, predicted_bytes=2.0**30, machine_bytes=2.0**31, num_ranks=2)


def test_workers_share_the_cores_and_the_environment_is_put_back(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    before = dict(os.environ)
    listening_before = {tuple(each.laddr) for each in psutil.Process().net_connections("inet")}
    assert start(tmp_path, module, "fine").failures == {}
    assert dict(os.environ) | {"TORCHELASTIC_SIGNALS_TO_HANDLE": ""} == before | {"TORCHELASTIC_SIGNALS_TO_HANDLE": ""}
    found = json.loads((tmp_path / "env-1.json").read_text())
    assert found["WORLD_SIZE"] == "2"
    assert int(found["OMP_NUM_THREADS"]) >= 1
    assert threads_per_worker(10_000) == 1
    listening = {tuple(each) for each in json.loads((tmp_path / "listening-1.json").read_text())} - listening_before
    assert listening == {("127.0.0.1", int(found["MASTER_PORT"]))}


def test_a_worker_that_was_killed_is_told_with_memory(tmp_path: Path, module: str) -> None:
    error = told(start(tmp_path, module, "kill"))
    assert error.exit_code is ExitCode.WORKER
    assert "rank 1 was killed (signal 9), probably out of memory: predicted 1 GiB" in str(error)
    assert "the machine has 2 GiB" in str(error)


def test_an_error_in_a_worker_keeps_its_words_and_its_exit_code(tmp_path: Path, module: str) -> None:
    error = told(start(tmp_path, module, "fail"))
    assert str(error) == "here: a bad thing"
    assert error.exit_code is ExitCode.USAGE


def signal_when_ready(tmp_path: Path, *numbers: signal.Signals) -> threading.Thread:
    """The first signal once the workers wait for one, each further one once they have had one."""

    def send() -> None:
        while not all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)):
            time.sleep(0.02)
        os.kill(os.getpid(), numbers[0])
        for number in numbers[1:]:
            while not all((tmp_path / f"asked-{rank}").exists() for rank in (0, 1)):
                time.sleep(0.02)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_the_first_signal_asks_and_handlers_are_put_back(tmp_path: Path, module: str) -> None:
    handlers, said = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)], list[str]()
    sender = signal_when_ready(tmp_path, signal.SIGTERM)
    launched = start(tmp_path, module, "wait", said)
    sender.join()
    assert launched == Launched(failures={}, asked_to_stop=True)
    assert len(said) == 1
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def test_what_insists_stops_at_once_whatever_the_scheduler_said_before(tmp_path: Path, module: str) -> None:
    sender = signal_when_ready(tmp_path, signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    began = time.monotonic()
    launched = start(tmp_path, module, "hang")
    sender.join()
    assert launched.killed
    assert time.monotonic() - began < 15.0


@pytest.mark.slow
def test_a_node_of_a_party_heeds_a_scheduler_that_says_all_twice(tmp_path: Path, module: str) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        head = f"127.0.0.1:{free.getsockname()[1]}"
    hello = Greeting(node=0, nodes=1, host="here", session="s", design="d", meshwright="m", torch="t")
    met = meet(hello, head=head, run_dir=tmp_path, say=str.strip, seconds=10.0)
    party = Party(node=0, nodes=1, first=0, count=2, rendezvous=met.rendezvous, interface=met.interface)
    said = list[str]()
    sender = signal_when_ready(tmp_path, signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    launched = launch(tmp_path, ranks=(1, 0), arguments=["hang"], say=said.append, module=module, party=party)
    sender.join()
    assert said == ["SIGUSR1: the workers finish this step and save; SIGQUIT stops at once"]
    assert (launched.asked_to_stop, launched.killed) == (True, True)
    assert set(launched.failures) <= {0, 1}
    found = json.loads((tmp_path / "env-0.json").read_text())
    assert found["MASTER_ADDR"] == "127.0.0.1"
    assert f"127.0.0.1:{found['MASTER_PORT']}" != head, "workers reach the store, and its gate is for other nodes"
    assert (tmp_path / "logs" / "node-0").is_dir()
