"""`meshwright launch --on slurm` on a SLURM of two nodes that the test starts, through preemption to the end."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.run.launching import sbatch
from meshwright.run.train import train
from meshwright.spec.errors import ExitCode
from meshwright.train.observe.timekeeper import goodput_of
from tests.run.launching.made import on_processors
from tests.run.launching.slurm_here import slurm, why_not
from tests.run.runs import losses

STEPS = 30
WHY_NOT = why_not()


def job_number(said: str) -> int:
    return int(said.partition("job ")[2].partition(":")[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(WHY_NOT), reason=f"no SLURM can be started here: {WHY_NOT}")
def test_a_job_that_nears_its_limit_saves_is_queued_again_and_goes_on_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = on_processors(tmp_path, steps=STEPS)
    train(made, run_dir=tmp_path / "one", say=str.strip)
    plan, run = tmp_path / "plan.json", tmp_path / "run"
    plan.write_text(made.to_json())
    with slurm(tmp_path / "slurm") as environment:
        for name in ("SLURM_CONF", "PATH"):
            monkeypatch.setenv(name, environment[name])
        words = ["launch", str(plan), "--on", "slurm", "--run", str(run), "--time", "8min", "--submit"]
        assert main(words) == ExitCode.OK
        number = job_number(capsys.readouterr().err)
        _until(lambda: len(losses(run)) >= 3)
        # What SLURM sends when the time limit is near, by the script's --signal=B:USR1@…
        subprocess.run(["scancel", "--batch", "--signal=USR1", str(number)], check=True)
        _until(lambda: sbatch.job_of(number).restarts == 1)
        output = (run / "logs" / f"slurm-{number}.out").read_text()
        assert f"the state is saved before the time limit; job {number} is queued again" in output
        done = len(losses(run))
        assert 3 <= done < STEPS
        # A job that was queued again waits for two minutes; an administrator may let it start at once.
        subprocess.run(["scontrol", "update", f"JobId={number}", "StartTime=now"], check=True)
        shown = list[str]()
        code = sbatch.follow(number, output=run / "logs" / "slurm-%j.out", say=shown.append, show=shown.append)
        assert code == ExitCode.OK, "\n".join(shown)
    assert losses(run) == losses(tmp_path / "one")
    kept = goodput_of(run)
    assert kept is not None
    assert (kept.launches, kept.steps, kept.failures) == (2, STEPS, 0)


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 240.0
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.2)
