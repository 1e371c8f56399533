"""Ranks have so long to connect as a group is formed, and its collectives keep their own time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from meshwright.run.torch_compat import forget_groups, formed_within


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


def test_every_try_to_connect_has_a_fifth_of_the_time_or_what_the_group_has(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def form(*_asked: Any, timeout: timedelta, **_options: Any) -> tuple[Any, None]:
        given.append(timeout.total_seconds())
        return dist.GroupMember.NON_GROUP_MEMBER, None

    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", form)
    ask: Any = distributed_c10d
    with formed_within(timedelta(seconds=10)):
        for seconds in (1800.0, 1.0):
            ask._new_process_group_helper(2, 0, [0, 1], timeout=timedelta(seconds=seconds))
    assert given == [2.0, 1.0]
    assert ask._new_process_group_helper is form
