"""A group fails to be formed in time where one of its ranks is lost, and its collectives keep their own time."""

from __future__ import annotations

import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.run.torch_compat import forget_groups, formed_within
from tests.run import forming_rank

ROOT = Path(forming_rank.__file__).parent.parent.parent


def test_collectives_of_a_group_wait_as_long_as_they_would() -> None:
    waits = timedelta(seconds=77)
    with formed_within(timedelta(seconds=10)):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=waits)
    group = dist.group.WORLD
    assert group is not None
    backend: Any = group._get_backend(torch.device("cpu"))
    try:
        assert backend.options._timeout == waits
    finally:
        forget_groups()


@pytest.mark.slow
def test_a_rank_that_is_killed_as_a_group_forms_holds_up_the_others_for_no_longer(tmp_path: Path) -> None:
    """Torch alone lets them wait for hours."""
    command = [sys.executable, "-m", forming_rank.__name__, str(tmp_path / "store")]
    with subprocess.Popen([*command, "1", "5.0"], cwd=ROOT) as lost:
        left = subprocess.run([*command, "0", "5.0"], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert lost.returncode == -signal.SIGKILL
    took, waits, told = left.stdout.split(maxsplit=2)
    assert 4.9 < float(took) < 7.0
    assert float(waits) == timedelta(minutes=30).total_seconds()
    assert "connectFullMesh failed" in told
