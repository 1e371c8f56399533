"""Hosts over ssh, by a program on PATH that stands for it and runs here what it would there."""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.run.launching import probe, remote, ssh
from meshwright.run.launching.shares import shares
from meshwright.run.launching.ssh import Named
from meshwright.run.machine import installed
from meshwright.spec.errors import ConfigError, EnvironmentUnfit, ExitCode, WorkerFailed
from meshwright.spec.job import ElasticSpec
from tests.run.launching.made import ask, on_gpus, on_processors

# Joins its words by blanks and gives them to a shell, as ssh does; one host cannot be entered.
SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
[ "$1" = locked ] && { echo "locked: Permission denied (publickey)." >&2; exit 255; }
host=$1; shift
export HOST_NAME=$host SSH_CONNECTION="10.0.0.9 4000 10.0.0.1 22"
exec sh -c "$*"
"""
# Stands for a host's python: it answers the probe, and as a node waits for a word.
PYTHON = """#!/bin/bash
if [ "$2" = meshwright.run.launching.probe ]; then
  seen=$(cat "$3/meeting")
  [ "$HOST_NAME" = apart ] && seen=
  [ "$HOST_NAME" = empty ] && {{ echo "No module named meshwright" >&2; exit 1; }}
  version={torch}; [ "$HOST_NAME" = old ] && version=1.0
  echo "a word of a login script"
  form='{{"meshwright": "%s", "torch": "%s", "token": "%s", "address": "10.0.0.1", "port": 4711}}\\n'
  printf "$form" {meshwright} "$version" "$seen"
  exit
fi
echo "$@"
[ "$HOST_NAME" = failing ] && exit 5
[ "$HOST_NAME" = dying ] && kill -9 $$
[ "$HOST_NAME" = done ] && exit 0
[ "$HOST_NAME" = returning ] && {{ mkdir "$2" 2>/dev/null && kill -9 $$; mkdir "$2/back"; exit 0; }}
[ "$HOST_NAME" = training ] && {{ while [ ! -e "$2/back" ]; do sleep 0.02; done; exit 75; }}
while read -r word; do echo "told $word"; [ "$word" = stop ] && exit 130; exit 75; done
echo "left alone"
exit 75
"""


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "bin"
    folder.mkdir()
    versions = {name: installed(name) for name in ("meshwright", "torch")}
    for name, source in (("ssh", SSH), ("python", PYTHON.format(**versions))):
        (folder / name).write_text(source)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return str(folder / "python")


def test_every_host_has_the_node_of_its_place(tmp_path: Path) -> None:
    made = on_gpus(tmp_path, "A100")
    asked = ask("ssh", hosts=("user@big:1", "small"), python="/opt/python", time_seconds=600.0)
    lines = [line for line in ssh.text(made, asked, found=shares(made)).splitlines() if line.startswith("ssh ")]
    first, second = (shlex.split(line.removesuffix(" <&4 3>&- 4<&- &")) for line in lines)
    assert (first[-2], second[-2]) == ("user@big", "small")
    words = [shlex.split(each[-1]) for each in (first, second)]
    assert [each[each.index("--node") + 1] for each in words] == ["0", "1"]
    assert {each[each.index("--head") + 1] for each in words} == {"big:29500"}
    assert all(
        each[:4] == ["/opt/python", "-m", "meshwright.run.launching.node", "/shared/first run"] for each in words
    )
    assert all(each[each.index("--stop-after") + 1] == "600" for each in words)


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        (("one",), "1 host for the plan's 2 nodes"),
        (("one", "two", "three"), "3 hosts for the plan's 2 nodes"),
        (("one", "two:8"), "two has 8 devices and node 1 of the plan 1"),
        (("one", "one"), "one is named twice"),
        (("one", ""), "'' names no host"),
        (("one", "-oProxyCommand=x"), "'-oProxyCommand=x' names no host"),
    ],
)
def test_hosts_that_do_not_fit_the_plan_are_told(hosts: tuple[str, ...], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        ssh.hosts_of(ask("ssh", hosts=hosts), found=shares(on_gpus(tmp_path)))
    assert says in str(error.value)


def test_hosts_say_what_they_lack_before_anything_starts(python: str, tmp_path: Path) -> None:
    made = on_processors(tmp_path)
    found = [*shares(made)] * 3
    asked = ask("ssh", run=tmp_path / "run", hosts=("locked", "empty", "old", "apart", "fine", "fine"), python=python)
    with pytest.raises(EnvironmentUnfit) as error:
        ssh.examined(made, asked, found=found)
    told = [str(problem) for problem in error.value.problems]
    assert [problem.partition(":")[0] for problem in told] == ["locked", "empty", "old", "apart"]
    assert "cannot be entered (locked: Permission denied (publickey).)" in told[0]
    assert "cannot run meshwright (No module named meshwright)" in told[1]
    assert f"has torch 1.0 and this machine {installed('torch')}" in told[2]
    assert "does not see what is in" in told[3]


def test_hosts_that_are_fit_meet_where_the_first_is_reached(python: str, tmp_path: Path) -> None:
    made = on_processors(tmp_path)
    asked = ask("ssh", run=tmp_path / "run", hosts=("one", "two"), python=python)
    named = ssh.examined(made, asked, found=shares(made))
    heads = {each.words[each.words.index("--head") + 1] for each in named}
    assert heads == {"10.0.0.1:4711"}
    assert all("--leash" in each.words for each in named)
    with pytest.raises(EnvironmentUnfit, match="one: has no /no/such/python"):
        ssh.examined(made, ask("ssh", run=tmp_path, hosts=("one",), python="/no/such/python"), found=shares(made)[:1])


def test_the_probe_says_what_the_host_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    (tmp_path / "meeting").write_text("word")
    assert probe.main([str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["meshwright"], told["torch"], told["token"]) == (installed("meshwright"), installed("torch"), "word")
    assert told["port"] > 0
    assert probe.address({"SSH_CONNECTION": "10.0.0.9 4000 10.0.0.1 22"}) == "10.0.0.1"


def shown(python: str, folder: Path, *hosts: str, elastic: bool = False) -> list[str]:
    """The script that is shown for these hosts, as a shell runs it."""
    made = on_processors(folder)
    if elastic:
        made = replace(made, job=replace(made.job, elastic=ElasticSpec(min_ranks=1)))
    asked = ask("ssh", run=folder / "run", hosts=hosts, python=python)
    (folder / "go.sh").write_text(ssh.text(made, asked, found=shares(made)))
    return ["sh", str(folder / "go.sh")]


@pytest.mark.parametrize(
    ("hosts", "elastic", "code"),
    [
        (("done", "done"), False, ExitCode.OK),
        (("done", "failing"), False, ExitCode.WORKER),
        (("failing", "done"), False, ExitCode.WORKER),
        (("done", "dying"), False, ExitCode.WORKER),
        (("locked", "done"), False, ExitCode.WORKER),
        (("locked", "done"), True, ExitCode.OK),
    ],
)
def test_the_script_s_exit_code_is_of_the_hosts(
    hosts: tuple[str, str], elastic: bool, code: int, python: str, tmp_path: Path
) -> None:
    done = subprocess.run(shown(python, tmp_path, *hosts, elastic=elastic), capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_script_asks_every_host_to_save(number: signal.Signals, python: str, tmp_path: Path) -> None:
    # A shell that begins with SIGINT ignored, as those in the background do, cannot hear it.
    heard = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])"
    words = [sys.executable, "-c", heard, *shown(python, tmp_path, "one", "two")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, bufsize=0, start_new_session=True)
    try:
        assert all(b"--leash" in next_line(process) for _ in range(2))
        process.send_signal(number)
        told, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert told == b"left alone\n" * 2
    assert process.wait(60) == (ExitCode.SAVED if number != signal.SIGKILL else -number)


def next_line(process: subprocess.Popen[bytes]) -> bytes:
    """What it prints next, within a minute."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], 60)
    assert ready, "nothing was printed for a minute"
    return process.stdout.readline()


def named(python: str, *hosts: str) -> list[Named]:
    return [Named(host=host, words=(python, "part", str(place))) for place, host in enumerate(hosts)]


def test_lines_are_gathered_and_a_signal_asks_every_host_to_save(python: str, tmp_path: Path) -> None:
    shown, said = list[str](), list[str]()

    def send() -> None:
        while len(shown) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    code = remote.run(
        named(python, "one", "two"),
        run_dir=tmp_path,
        say=said.append,
        show=lambda *line: shown.append(" | ".join(line)),
        outlives=False,
    )
    sender.join()
    assert code == ExitCode.SAVED
    assert sorted(shown) == ["one | part 0", "one | told save", "two | part 1", "two | told save"]
    assert said == ["SIGTERM: every host is asked to save; once more stops at once"]
    assert (tmp_path / "logs" / "node-1-two.log").read_text() == "part 1\ntold save\n"


def test_hosts_do_not_outlive_one_that_fails(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_FOLLOWING_SECONDS", 0.2)
    shown = list[str]()

    def run(*hosts: str) -> int:
        return remote.run(
            named(python, *hosts),
            run_dir=tmp_path,
            say=str,
            show=lambda *line: shown.append(" | ".join(line)),
            outlives=False,
        )

    for hosts in (("failing", "two"), ("two", "failing")):
        shown.clear()
        assert run(*hosts) == ExitCode.WORKER
        assert "two | left alone" in shown
    with pytest.raises(WorkerFailed, match="dying: ended without a word"):
        run("dying", "two")
    assert run("done", "done") == ExitCode.OK


@pytest.mark.parametrize("order", [("returning", "training"), ("training", "returning")])
def test_an_elastic_run_outlives_a_host_which_is_entered_again(
    order: tuple[str, str], python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_AGAIN_SECONDS", 0.1)
    said, words = list[str](), (python, "part", str(tmp_path / "mark"))
    hosts = [Named(host=host, words=words) for host in order]
    code = remote.run(hosts, run_dir=tmp_path, say=said.append, show=lambda *_line: None, outlives=True)
    assert code == ExitCode.SAVED
    assert said == ["returning is lost; the others go on, and it is entered again until it comes back"]


def test_a_host_s_name_is_a_file_s_name(tmp_path: Path) -> None:
    assert ssh.log_of(tmp_path, 3, "user@h/1").name == "node-3-user_h_1.log"
