"""What a pipeline has to do in one step, for schedules that are made to measure: seconds, bytes and limits by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwright.schedule.program import BACKWARD, FORWARD, INPUT, WEIGHT, Ids, Program
from meshwright.schedule.rows import run
from meshwright.spec.errors import ConfigError, Problem

KINDS = (FORWARD, INPUT, WEIGHT)  # of the three operations of a stage and microbatch, numbered in this order
Rows = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`microbatches` through stages whose seconds are given one by one, with the backward in two halves.

    `transfer` is the way to the next stage and, for gradients, back; `placement` the rank of each stage.
    `activation_bytes` of a stage are held from a microbatch's forward to the end of its weight half, and a rank may
    hold `limit_bytes`. Raises ConfigError where one microbatch is beyond a limit.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: tuple[float, ...]
    placement: tuple[int, ...]
    microbatches: int
    activation_bytes: tuple[float, ...]
    limit_bytes: tuple[float, ...]
    own: tuple[tuple[int, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        names = ("forward", "input", "weight", "transfer", "activation_bytes")
        lengths = {name: len(getattr(self, name)) for name in names}
        wrong = [
            Problem(what=f"{length} values for {self.stages} stages", where=f"workload.{name}", fix="one each")
            for name, length in lengths.items()
            if length != self.stages
        ]
        own = tuple(tuple(s for s, at in enumerate(self.placement) if at == rank) for rank in range(self.ranks))
        object.__setattr__(self, "own", own)
        if not wrong:
            for rank, stages in enumerate(own):
                least = sum(self.activation_bytes[stage] for stage in stages)
                if least > self.limit_bytes[rank]:
                    what = f"one microbatch leaves {least:g} bytes and {self.limit_bytes[rank]:g} are allowed"
                    wrong.append(Problem(what=what, where=f"workload.limit_bytes[{rank}]", fix="smaller microbatches"))
        if wrong:
            raise ConfigError(wrong)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def ranks(self) -> int:
        return max(self.placement) + 1

    def seconds(self) -> tuple[tuple[float, ...], ...]:
        """By kind of operation and stage."""
        return (self.forward, self.input, self.weight)

    def operation(self, kind: int, stage: int, microbatch: int) -> int:
        """The number of an operation; `kind` is an index into KINDS."""
        return (stage * self.microbatches + microbatch) * 3 + kind

    def parts(self, operation: int) -> tuple[int, int, int]:
        """Kind, stage and microbatch of an operation."""
        rest, kind = divmod(operation, 3)
        stage, microbatch = divmod(rest, self.microbatches)
        return kind, stage, microbatch

    def rows(self, program: Program) -> Rows:
        """Operations of a schedule, a whole backward as its two halves one after the other."""
        found: Rows = []
        for row in program.table():
            operations = []
            for action in row:
                name = action.work.value
                kinds = {"F": (0,), "B": (1, 2), "I": (1,), "W": (2,)}[name]
                operations += [self.operation(kind, action.stage, action.microbatch) for kind in kinds]
            found.append(operations)
        return found

    def program(self, rows: Rows, *, whole: frozenset[int] = frozenset()) -> Program:
        """The schedule of `rows`; INPUT operations in `whole` are told as whole backwards, with the half after them."""
        made: list[Ids] = []
        for row in rows:
            kind, stage, microbatch = np.array([self.parts(operation) for operation in row]).reshape(-1, 3).T
            joined = np.array([operation in whole for operation in row], dtype=np.bool_)
            work = np.where(joined, BACKWARD, np.array(KINDS)[kind])
            kept = ~np.roll(joined, 1) if joined.any() else np.ones(len(row), dtype=np.bool_)
            made.append(run(work, stage, microbatch)[kept])
        return Program.of(made, stages=self.stages, microbatches=self.microbatches)

    def fits(self, rank: int, row: Sequence[int]) -> bool:
        """Whether the rank keeps its limit."""
        held, limit = 0.0, self.limit_bytes[rank] * (1.0 + 1e-9)
        for operation in row:
            kind = operation % 3
            if kind != 1:
                size = self.activation_bytes[operation // 3 // self.microbatches]
                held += size if kind == 0 else -size
                if held > limit:
                    return False
        return True
