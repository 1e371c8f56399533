"""What plans of one job choose, as columns: a peer's rules are asked of one plan and of a table of them alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.cost import PlanTable
from meshwright.cost.layout import Layout
from meshwright.cost.table import (
    EXCHANGES,
    OFFLOADS,
    PRECISIONS,
    RECOMPUTES,
    SCHEDULES,
    SHARDINGS,
    TOKEN_LAYOUTS,
)
from meshwright.export.meaning import Sizes, exchange_words, sizes
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design, ScheduleKind

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
_KINDS: dict[str, tuple[StrEnum, ...]] = {
    "sharding": SHARDINGS,
    "recompute": RECOMPUTES,
    "offload": OFFLOADS,
    "schedule": SCHEDULES,
    "precision": PRECISIONS,
    "gradient_precision": PRECISIONS,
    "exchange": EXCHANGES,
    "token_layout": TOKEN_LAYOUTS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The rows of `table`, all of one model, cluster and job; a rule answers with a mask of shape (rows,).

    What leaves no trace is written in one way: one pipeline rank with one stage runs 1f1b.
    """

    table: PlanTable
    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    sizes: Sizes

    @classmethod
    def of(cls, table: PlanTable, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> Columns:
        alone = (table.pipeline == 1) & (table.chunks == 1) & (table.slices == 1)
        usual = SCHEDULES.index(ScheduleKind.ONE_F_ONE_B)
        plain = replace(table, schedule=np.where(alone, usual, table.schedule))
        return cls(table=plain, model=model, cluster=cluster, job=job, sizes=sizes(model))

    @classmethod
    def of_design(cls, design: Design) -> Columns:
        """The one row of a design. Raises ConfigError where its blocks differ in what one row cannot say."""
        table = PlanTable.from_plan(design.plan)
        return cls.of(table, model=design.model, cluster=design.cluster, job=design.job)

    def __len__(self) -> int:
        return len(self.table)

    def among(self, name: str, *kinds: StrEnum) -> Mask:
        """Rows of which the column `name`, an enumeration, is one of `kinds`."""
        known = _KINDS[name]
        return np.isin(getattr(self.table, name), [known.index(kind) for kind in kinds])

    def everywhere(self, answer: bool) -> Mask:
        """The same answer for every row: of the model, the machines or the job."""
        return np.full(len(self), answer)

    def of_layouts(self, answer: Callable[[Layout], bool]) -> Mask:
        """What `answer` says of the layout of every row; each layout is asked once."""
        used = np.unique(self.table.layout)
        said = np.zeros(len(self.table.layouts), dtype=np.bool_)
        said[used] = [answer(self.table.layouts[index]) for index in used]
        return said[self.table.layout]

    def mixes(self, which: int) -> Mask:
        """Rows whose layers differ in what is computed again (0) or moved away (1)."""
        return self.of_layouts(lambda layout: len({policy[which] for policy in layout.policies[1:-1]}) > 1)

    def uses(self, name: str, *kinds: StrEnum) -> Mask:
        """Rows some of whose layers have one of `kinds` of the column `name`, recompute or offload."""
        known, which = _KINDS[name], 0 if name == "recompute" else 1
        wanted = {known.index(kind) for kind in kinds}
        said = self.of_layouts(lambda layout: any(policy[which] in wanted for policy in layout.policies[1:-1]))
        spelt = self.of_layouts(lambda layout: bool(layout.policies))
        return np.where(spelt, said, self.among(name, *kinds))

    @property
    def has_experts(self) -> bool:
        return bool(self.sizes.mixture)

    @property
    def expert(self) -> Ids:
        """Ranks over which experts are divided by number: 1 without a grid."""
        return np.where(self.table.on_grid, self.table.expert, 1)

    @property
    def expert_tensor(self) -> Ids:
        """Ranks over which each expert is divided: the tensor degree without a grid."""
        return np.where(self.table.on_grid, self.table.expert_tensor, self.table.tensor)

    def word(self, name: str) -> str:
        """The first row's value of the column `name`, as it is written."""
        if name == "exchange":
            kind = EXCHANGES[int(self.table.exchange[0])]
            return exchange_words(kind, inner=self.number("inner"), context=self.number("context"))
        return str(_KINDS[name][int(getattr(self.table, name)[0])])

    def number(self, name: str) -> int:
        """The first row's number in the column `name`, of the table or of this."""
        values: Any = getattr(self, name) if name in ("expert", "expert_tensor") else getattr(self.table, name)
        return int(values[0])
