"""A SLURM of two nodes on this machine: its daemons, each with its own port, under one folder."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
NODES = ("n0", "n1")

CONFIGURATION = """
ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=20
NodeName=n0 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs=1 RealMemory=1000 State=UNKNOWN
NodeName=n1 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[2]} CPUs=1 RealMemory=1000 State=UNKNOWN
PartitionName=both Nodes=n0,n1 Default=YES MaxTime=10 State=UP
"""


def why_not() -> str:
    """Why no SLURM can be started here; "" where it can."""
    if os.geteuid() != 0:
        return "its daemons need root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    return (
        f"not installed: {', '.join(missing)} (apt-get install slurmctld slurmd slurm-client munge)" if missing else ""
    )


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which sbatch and its kin reach a SLURM of two idle nodes, which is gone afterwards."""
    for name in ("state", "spool/n0", "spool/n1"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    # munged refuses a folder that others could write into.
    folder.chmod(0o755)
    text = CONFIGURATION.format(host=socket.gethostname().partition(".")[0], folder=folder, ports=_ports(3))
    (folder / "slurm.conf").write_text(text)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
    munge = ["munged", "--force", f"--key-file={key}", f"--socket={folder}/munge.sock"]
    munge += [f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed"]
    try:
        for words in (munge, ["slurmctld"], *(["slurmd", "-N", node] for node in NODES)):
            subprocess.run(words, env=environment, check=True, timeout=60)
        _await_idle(environment, folder)
        yield environment
    finally:
        for name in ("slurmd-n0", "slurmd-n1", "slurmctld", "munged"):
            _end(folder / f"{name}.pid")


def _await_idle(environment: dict[str, str], folder: Path) -> None:
    end = time.monotonic() + 60.0
    while True:
        told = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if told.stdout.split() == ["idle"] * len(NODES):
            return
        assert time.monotonic() < end, f"{told.stdout}{told.stderr}{(folder / 'slurmctld.log').read_text()[-2000:]}"
        time.sleep(0.5)


def _end(pid_file: Path) -> None:
    """The daemon of that file has ended."""
    with suppress(OSError, ValueError):
        number = int(pid_file.read_text())
        os.kill(number, signal.SIGTERM)
        end = time.monotonic() + 20.0
        while time.monotonic() < end:
            os.kill(number, 0)
            time.sleep(0.1)
        os.kill(number, signal.SIGKILL)


def _ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    try:
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"
