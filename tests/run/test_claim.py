"""A run directory is trained by one launch at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.run.claim import claimed
from meshwright.spec.errors import ConfigError

HOLDER = """
import sys, time
from pathlib import Path
from meshwright.run.claim import claimed
with claimed(Path(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(60)
"""


def test_a_second_launch_is_refused_and_told_whose_the_run_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with claimed(run), pytest.raises(ConfigError, match=rf"goes on already.*process {os.getpid()} on "), claimed(run):
        pytest.fail("it was claimed twice")
    with claimed(run), claimed(run, node=1):
        assert (run / "claim-0").is_file()


def test_a_launch_that_was_killed_lets_go(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"mine\n"
        with pytest.raises(ConfigError, match=f"process {holder.pid} on "), claimed(tmp_path):
            pytest.fail("another process has it")
        holder.kill()
        holder.wait()
    with claimed(tmp_path):
        assert (tmp_path / "claim-0").read_text().startswith(f"process {os.getpid()} on ")
