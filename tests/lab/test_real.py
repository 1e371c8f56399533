"""Real hosts, entered by a program on PATH: one that stands for ssh and runs here what it would there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from meshwright.lab.real import is_real, node_of, real_lab
from meshwright.spec.errors import ConfigError, EnvironmentUnfit

SSH = """#!/bin/sh
[ "$1 $2" = "-o BatchMode=yes" ] || exit 255
[ "$3" = nobody@localhost ] && exit 255
shift 3
exec sh -c "$*"
"""


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


def test_a_host_says_what_it_is() -> None:
    assert node_of(real_lab("ssh:localhost").hosts[0]).num_nodes == 1


def test_hosts_that_cannot_be_entered_are_told() -> None:
    with pytest.raises(EnvironmentUnfit, match="nobody@localhost"):
        real_lab("ssh:localhost,nobody@localhost")
    with pytest.raises(ConfigError, match="no host is named"):
        real_lab("ssh:,")


def test_a_cluster_is_no_way_to_hosts() -> None:
    assert is_real("podman:one")
    assert not any(is_real(where) for where in ("8xH100", "local:2", "ssh", "examples/lab/two-sites.toml"))
