"""Real hosts, entered by a program on PATH: one that stands for ssh and runs here what it would there."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.lab.nodes import detected
from meshwright.lab.real import WAYS, is_real, real_lab
from meshwright.spec.errors import ConfigError, EnvironmentUnfit
from tests.run.launching import sshd_here

SSH = """#!/bin/sh
[ "$1 $2" = "-o BatchMode=yes" ] || exit 255
shift 4
[ "$1" = nobody@localhost ] && exit 255
[ "$1" = silent@localhost ] && exec sleep 60
shift
exec sh -c "$*"
"""


PATH = os.environ["PATH"]
SILENT = WAYS["ssh"].enter


@pytest.fixture(autouse=True)
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What joins its words by blanks and gives them to a shell, as ssh does."""
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin")


def test_words_come_there_as_they_are() -> None:
    with real_lab("ssh:localhost,localhost") as lab:
        first, second = lab.run(["printf", "%s|", "a b", "$HOME", "it's", "{host} of {hosts}"])
        place = lab.run(["sh", "-c", "echo $NODE_RANK $MASTER_ADDR"])[1]
    assert first.output == "a b|$HOME|it's|0 of 2|"
    assert second.output == "a b|$HOME|it's|1 of 2|"
    assert place.output == "1 127.0.0.1\n"
    assert lab.hosts[0].interface == "lo"


@pytest.mark.skipif(bool(sshd_here.why_not()), reason=sshd_here.why_not())
def test_words_come_over_ssh_itself_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", PATH)
    with sshd_here.real(tmp_path / "sshd") as reached:
        monkeypatch.setenv("PATH", f"{reached}:{PATH}")
        with real_lab("ssh:first,second") as lab:
            told = lab.run(["printf", "%s|", "a b", "$HOME", "it's", "{host} of {hosts} at {first}"])
    assert [each.output for each in told] == [f"a b|$HOME|it's|{place} of 2 at 127.0.0.1|" for place in range(2)]


def test_a_host_says_what_it_is() -> None:
    (found,) = detected(real_lab("ssh:localhost"))
    assert found.num_nodes == 1


def test_hosts_that_cannot_be_entered_are_told() -> None:
    with pytest.raises(EnvironmentUnfit, match="nobody@localhost"):
        real_lab("ssh:localhost,nobody@localhost")
    with pytest.raises(ConfigError, match="no host is named"):
        real_lab("ssh:,")
    host = replace(real_lab("ssh:localhost").hosts[0], name="silent@localhost", enter=(*SILENT, "silent@localhost"))
    with pytest.raises(EnvironmentUnfit, match="silent@localhost: true has not ended after 0 s there"):
        host.read("true", within_seconds=0.2)
    with pytest.raises(EnvironmentUnfit, match="no-such-program"):
        replace(host, enter=("no-such-program",)).read("true")


def test_a_cluster_is_no_way_to_hosts() -> None:
    assert is_real("podman:one")
    assert not any(is_real(where) for where in ("8xH100", "local:2", "ssh", "examples/lab/two-sites.toml"))


DOCKER = """#!/bin/sh
case "$2" in
  daemonless) echo "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Does it run?" ;;
  gone) echo "Error response from daemon: No such container: gone" ;;
  asleep) echo "Error response from daemon: container 4f1b is not running" ;;
  bare) echo 'exec: "env": executable file not found in $PATH' >&2; exit 127 ;;
esac >&2
exit 1
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("daemonless", "docker does not reach its daemon (Cannot connect to the Docker daemon at unix:///var/run/"),
        ("gone", "gone: is no container (Error response from daemon: No such container: gone); docker ps --all"),
        ("asleep", "asleep: is not running (Error response from daemon: container 4f1b is not running); docker start"),
        ("bare", 'bare: has no hostname, or cannot run it (exec: "env": executable file not found in $PATH)'),
    ],
)
def test_why_a_container_is_not_entered_is_told(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    with pytest.raises(EnvironmentUnfit) as caught:
        real_lab(f"docker:{name}")
    assert says in str(caught.value)


def test_why_a_host_is_not_entered_over_ssh_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a name that ssh alone knows, too: what is wrong is not that it has no address."""
    unreached = "ssh: connect to host no-such-host.invalid port 22: No route to host"
    (tmp_path / "ssh").write_text(f"#!/bin/sh\necho warning >&2; echo '{unreached}' >&2; exit 255\n")
    with pytest.raises(EnvironmentUnfit) as caught:
        real_lab("ssh:no-such-host.invalid")
    assert f"cannot be entered over ssh ({unreached}); try: ssh -o BatchMode=yes" in str(caught.value)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    for sort in ("ssh", "docker"):
        with pytest.raises(EnvironmentUnfit, match=f"one: this machine has no {sort}; install {sort}"):
            real_lab(f"{sort}:one")
