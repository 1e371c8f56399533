"""The batch script: its options, and what its shell does, with programs that stand for SLURM's."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.run.launching import sbatch, slurm
from meshwright.run.launching.shares import shares
from meshwright.spec.errors import ConfigError, EnvironmentUnfit, ExitCode, WorkerFailed
from meshwright.spec.job import ElasticSpec
from meshwright.spec.plan import Design
from tests.run.launching.made import ask, on_gpus, on_processors

# Ends with the code in the file `code`, at once or when it is signalled; its words and signals are kept.
SRUN = """#!/bin/bash
here=$(dirname "$0")
printf '%s\\n' "$@" > "$here/words"
trap 'echo USR1 >> "$here/signals"; exit $(cat "$here/code")' USR1
trap 'echo TERM >> "$here/signals"; exit $(cat "$here/code")' TERM
touch "$here/started"
[ -e "$here/at-once" ] && exit $(cat "$here/code")
while :; do sleep 0.02; done
"""
SCONTROL = """#!/bin/bash
here=$(dirname "$0")
if [ "$1 $2" = "show hostnames" ]; then cat "$here/hostnames"; exit; fi
if [ "$1 $2" = "show node" ]; then [ -n "$3" ] && echo "NodeName=$3" && echo "   NodeAddr=$3.rack Version=22"; exit; fi
echo "$@" >> "$here/asked"
"""


def script(made: Design, **asked: Any) -> str:
    return slurm.script(made, ask("slurm", **asked), found=shares(made), grace=120)


def options(text: str) -> dict[str, str]:
    return {name: value for name, _, value in re.findall(r"^#SBATCH --([a-z-]+)(=(.*))?$", text, re.MULTILINE)}


def test_a_job_of_an_elastic_run_outlives_a_node(tmp_path: Path) -> None:
    made = on_processors(tmp_path)
    assert "no-kill" not in options(script(made))
    assert "--wait=60 " in script(made)
    elastic = replace(made, job=replace(made.job, elastic=ElasticSpec(min_ranks=1)))
    assert options(script(elastic))["no-kill"] == ""
    assert "--no-kill --wait=0 " in script(elastic)


def test_the_plan_says_what_is_asked_of_slurm(tmp_path: Path) -> None:
    made = on_gpus(tmp_path)
    found = options(script(made, partition="gpu", account="us", time_seconds=93784.0))
    assert found == {
        "job-name": "first-run",
        "nodes": "2",
        "ntasks-per-node": "1",
        "exclusive": "",
        "mem": "0",
        "gres": "gpu:1",
        "partition": "gpu",
        "account": "us",
        "time": "1-02:03:04",
        "signal": "B:USR1@120",
        "requeue": "",
        "open-mode": "append",
        "output": "'/shared/first run/logs/slurm-%j.out'",
    }
    assert "gres" not in options(script(on_processors(tmp_path)))
    assert made.plan.digest() in script(made)


def test_a_site_adds_and_takes_away(tmp_path: Path) -> None:
    found = options(script(on_gpus(tmp_path), extra=("constraint=h100&ib", "gres=", "--exclusive=user", "overcommit")))
    assert found["constraint"] == "'h100&ib'"
    assert found["exclusive"] == "user"
    assert found["overcommit"] == ""
    assert "gres" not in found
    assert found["mem"] == "0"
    assert options(script(on_gpus(tmp_path), extra=("mem=900G",)))["mem"] == "900G"
    assert "mem" not in options(script(on_gpus(tmp_path), extra=("mem=", "mem-per-gpu=100G")))
    for extra in ("nodes=3", "signal=USR2@1", "=x", "time=5"):
        with pytest.raises(ConfigError, match="is not for --scheduler to set"):
            script(on_gpus(tmp_path), extra=(extra,))


class Shell:
    """The script in a shell whose srun and scontrol are ours."""

    def __init__(self, folder: Path, text: str, *, code: int, hostnames: str = "n0\nn1\n") -> None:
        self.folder = folder / "bin"
        self.folder.mkdir()
        for name, source in (("srun", SRUN), ("scontrol", SCONTROL)):
            (self.folder / name).write_text(source)
            (self.folder / name).chmod(0o755)
        (self.folder / "code").write_text(str(code))
        (self.folder / "hostnames").write_text(hostnames)
        (self.folder / "job").write_text(text)

    def start(self) -> subprocess.Popen[str]:
        known = {"SLURM_JOB_ID": "70007", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_RESTART_COUNT": "2"}
        environment = {**os.environ, **known, "PATH": f"{self.folder}:{os.environ['PATH']}"}
        return subprocess.Popen(
            ["bash", str(self.folder / "job")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def signalled(self, number: signal.Signals) -> tuple[int, str]:
        """The exit code and what the script asked of scontrol, once it was signalled while srun runs."""
        shell = self.start()
        while not (self.folder / "started").exists():
            time.sleep(0.01)
        shell.send_signal(number)
        shell.communicate(timeout=20)
        asked = self.folder / "asked"
        return shell.returncode, asked.read_text() if asked.exists() else ""

    def read(self, name: str) -> list[str]:
        return (self.folder / name).read_text().splitlines()


def test_a_run_that_was_stopped_by_its_time_limit_is_queued_again(tmp_path: Path) -> None:
    shell = Shell(tmp_path, script(on_processors(tmp_path)), code=ExitCode.SAVED)
    assert shell.signalled(signal.SIGUSR1) == (ExitCode.SAVED, "requeue 70007\n")
    assert shell.read("signals") == ["USR1"]
    words = shell.read("words")
    assert words[words.index("--head") + 1] == "n0.rack:20007"
    assert words[words.index("--session") + 1] == "70007.2"
    assert words[words.index("--node") + 1] == "SLURM_NODEID"
    assert words[words.index("-m") + 2] == "/shared/first run"


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, ExitCode.SAVED), (signal.SIGUSR1, ExitCode.WORKER), (signal.SIGUSR1, ExitCode.OK)],
)
def test_what_was_cancelled_or_failed_or_is_done_is_not(number: signal.Signals, code: int, tmp_path: Path) -> None:
    shell = Shell(tmp_path, script(on_processors(tmp_path)), code=code)
    assert shell.signalled(number) == (code, "")


def test_the_exit_code_is_that_of_the_nodes(tmp_path: Path) -> None:
    shell = Shell(tmp_path, script(on_processors(tmp_path)), code=ExitCode.ENVIRONMENT)
    (shell.folder / "at-once").touch()
    started = shell.start()
    started.communicate(timeout=20)
    assert started.returncode == ExitCode.ENVIRONMENT


def test_nodes_without_a_place_to_meet_do_not_start(tmp_path: Path) -> None:
    shell = Shell(tmp_path, script(on_processors(tmp_path)), code=0, hostnames="")
    started = shell.start()
    _, said = started.communicate(timeout=20)
    assert started.returncode == ExitCode.ENVIRONMENT
    assert "scontrol tells no address of node '' of 'n[0-1]' to meet at" in said
    assert not (shell.folder / "words").exists()


JOB = (
    "JobId={id} JobName=x JobState={state} Reason={reason} Requeue=1 Restarts={restarts} ExitCode={code}:0 NodeList=n0"
)


def queue(folder: Path, monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
    """An sbatch that takes any script, and a scontrol that gives these answers, the last one ever after."""
    (folder / "answers").write_text("\n".join(answers) + "\n")
    programs = {
        "sbatch": "echo '41;cluster'",
        "scontrol": 'cd "$(dirname "$0")"; head -n 1 answers; [ $(wc -l < answers) -gt 1 ] && sed -i 1d answers; true',
    }
    for name, source in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{source}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(sbatch, "_LOOK_SECONDS", 0.01)


def test_a_job_is_followed_through_its_queues_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = [("PENDING", "Priority", 0), ("RUNNING", "None", 0), ("PENDING", "BeginTime", 1), ("COMPLETED", "None", 1)]
    lines = [JOB.format(id=41, state=state, reason=reason, restarts=times, code=0) for state, reason, times in told]
    queue(tmp_path, monkeypatch, *lines)
    (tmp_path / "slurm-41.out").write_text("step 1\nstep 2\nhalf a li")
    said, shown = list[str](), list[str]()
    number = sbatch.submit(tmp_path / "script")
    assert sbatch.follow(number, output=tmp_path / "slurm-%j.out", say=said.append, show=shown.append) == 0
    assert said == [
        "job 41 is pending (Priority)",
        "job 41 is running",
        "job 41 is pending (BeginTime); queued again once",
    ]
    assert shown == ["step 1", "step 2"]


def test_a_job_that_slurm_ended_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue(tmp_path, monkeypatch, JOB.format(id=41, state="TIMEOUT", reason="TimeLimit", restarts=0, code=0))
    with pytest.raises(WorkerFailed, match=r"SLURM ended job 41: TIMEOUT \(TimeLimit\)"):
        sbatch.follow(41, output=tmp_path / "none", say=str, show=str)
    queue(tmp_path, monkeypatch, JOB.format(id=41, state="FAILED", reason="NonZeroExitCode", restarts=0, code=5))
    assert sbatch.follow(41, output=tmp_path / "none", say=str, show=str) == ExitCode.WORKER


def test_a_machine_without_slurm_and_a_slurm_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentUnfit, match="this machine has no sbatch; run it where SLURM is"):
        sbatch.submit(tmp_path / "script")
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'invalid partition' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(EnvironmentUnfit, match=r"sbatch refuses \(invalid partition\)"):
        sbatch.submit(tmp_path / "script")
