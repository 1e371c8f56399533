"""What workers do in the tests of scaled losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

from meshwright.parallel.precision import Dtypes
from meshwright.spec.plan import Design
from tests.parallel.move_cases import runner, sequences
from tests.parallel.parity_cases import by_name

Found = tuple[float, dict[str, Any]]


def gradients(design: Design, scales: Sequence[float], in_any: bool = False) -> tuple[Found, ...]:
    """The loss and the gradients of a step with each of these scales, in turn; `in_any` precision losses are scaled."""
    run = runner(design)
    mesh, plan = run.laid.mesh, design.plan
    rows = plan.batch // mesh.data_size
    found: list[Found] = []
    with mock.patch.object(Dtypes, "scales_losses", new=in_any or run.laid.dtypes.scales_losses):
        for number, scale in enumerate(scales):
            tokens = sequences(number * plan.batch + mesh.data_coordinate * rows, rows, design)
            loss = run.laid.step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), number=1, loss_scale=scale)
            pairs = [(name, p.grad) for name, p in run.laid.named_parameters() if p.grad is not None]
            found.append((float(loss), by_name(pairs)))
    return tuple(found)
