"""Whatever is wrong with several options of a command is told in one go."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshwright
from meshwright.cli import main
from meshwright.spec.errors import ConfigError


def _told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_every_option_of_plan_that_is_wrong_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        "--model": ("llama-3.1-9b",),
        "--set": ("batch_tokns=1", "cluster.intr.bandwidth=5", "cluster.nodes=0"),
        "--for": ("tortitan",),
        "--why": ("tq=3,pp=x", "zz=3"),
        "--sweep": ("job.precisio=1", "cluster.nodez=1"),
    }
    words = [word for option, values in wrong.items() for value in values for word in (option, value)]
    told = _told(["plan", "--cluster", "8xH100", *words], capsys)
    for place in (
        "model: no model is called 'llama-3.1-9b'",
        "--set batch_tokns: unknown key",
        "--set cluster.intr.bandwidth: ",
        "--set cluster.nodes=0: ",
        "--for: 'tortitan'",
        "--why tq: ",
        "--why pipeline: ",
        "--why zz: ",
        "--sweep job.precisio: ",
        "--sweep cluster.nodez: ",
    ):
        assert [line for line in told if line.startswith(f"error: {place}")], place
    assert len(told) == 10


def test_what_no_plan_can_mend_is_told_with_what_is_misspelt(capsys: pytest.CaptureFixture[str]) -> None:
    sets = ("batch_tokens=1000", "constraints.fix.tensr=3", "constraints.fix.precision=fp7")
    words = [word for entry in sets for word in ("--set", entry)]
    told = _told(["plan", "-m", "gpt2", "-c", "8xH100", *words, "--sweep", "cluster.nodez=1"], capsys)
    places = [line.removeprefix("error: ").partition(": ")[0] for line in told]
    assert places == [
        "job.batch_tokens",
        "job.sequence_length",
        "job.constraints.fix.tensr",
        "job.constraints.fix.precision",
        "--sweep cluster.nodez",
    ]


def test_what_is_wrong_with_a_training_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.toml").write_text("sed = 1\n")
    words = ["train", "--model", "tny", "--cluster", "locl", "--job", str(tmp_path / "job.toml"), "--set", "compil=on"]
    told = _told(words, capsys)
    assert len(told) == 4
    for name in ("'tny'", "'locl'", "job.toml:1 sed", "--set compil"):
        assert any(name in line for line in told), name


def test_the_same_in_python() -> None:
    with pytest.raises(ConfigError) as caught:
        meshwright.design("tny", "8xH10")
    assert len(caught.value.problems) == 2
