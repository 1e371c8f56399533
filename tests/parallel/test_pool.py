"""Workers that stay up between tests keep nothing of what a test made there."""

from __future__ import annotations

import psutil
from torch.distributed.device_mesh import init_device_mesh

from tests.support.pool import Pool


def meshes() -> int:
    """Files that a worker has open once it has made some."""
    for _ in range(3):
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    return psutil.Process().num_fds()


def others() -> int:
    return meshes()


def test_groups_of_a_function_are_gone_when_another_one_runs(pool: Pool) -> None:
    pool.run(meshes, ranks=4)
    once = pool.run(others, ranks=4)
    for _ in range(2):
        pool.run(meshes, ranks=4)
        again = pool.run(others, ranks=4)
    assert max(again) - max(once) < 10, "less than one mesh takes"
