"""ssh to this machine: a program that stands for it, and a daemon of the test's own where one is installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONFIGURATION = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile {folder}/sshd.pid
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
"""
CLIENT = """
Host first second
  HostName 127.0.0.1
  Port {port}
  IdentityFile {folder}/user
  StrictHostKeyChecking no
  UserKnownHostsFile {folder}/known
"""
# Joins its words by blanks and gives them to a shell, as ssh does.
PRETENDED = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
shift
exec sh -c "$*"
"""


def why_not() -> str:
    """Why no daemon can be started here; "" where it can."""
    if os.geteuid() != 0:
        return "it needs root to let others in"
    missing = [name for name in ("sshd", "ssh", "ssh-keygen") if _found(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def pretended(folder: Path) -> Path:
    """A folder with an ssh that runs here what it would anywhere."""
    program = folder / "bin" / "ssh"
    program.parent.mkdir(parents=True)
    program.write_text(PRETENDED)
    program.chmod(0o755)
    return program.parent


@contextmanager
def real(folder: Path) -> Iterator[Path]:
    """A folder with an ssh that reaches this machine as `first` and `second`, by a daemon that is gone afterwards."""
    folder.mkdir(parents=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "sshd_config").write_text(CONFIGURATION.format(port=port, folder=folder))
    (folder / "ssh_config").write_text(CLIENT.format(port=port, folder=folder))
    program = folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {_found("ssh")} -F {folder}/ssh_config "$@"\n')
    program.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    with (folder / "log").open("w") as log:
        daemon = subprocess.Popen([str(_found("sshd")), "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log)
    try:
        _await(port, folder / "log")
        yield program.parent
    finally:
        daemon.terminate()
        daemon.wait(20)


def _await(port: int, log: Path) -> None:
    end = time.monotonic() + 20.0
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)


def _found(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin:/usr/bin:/bin")
