"""What the job fixes and forbids: read strictly, checked for contradictions, asked by the search and by a rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.schedule import NAMED
from meshwright.search.rules import Rule, Scope
from meshwright.spec.cluster import Precision
from meshwright.spec.codec import nearest
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.exchange import ExchangeKind, TokenLayout
from meshwright.spec.job import OTHER_NAMES, Constraints, Devices, Order
from meshwright.spec.plan import Design, Offload, Plan, Recompute, ScheduleKind, Sharding
from meshwright.spec.synchronize import MEETINGS, SyncKind

Value = int | str

NUMBERS = (
    "devices",
    "tensor",
    "pipeline",
    "replicate",
    "shard",
    "context",
    "inner",
    "expert",
    "expert_tensor",
    "data",
    "chunks",
    "slices",
    "microbatch",
)
WORDS: Mapping[str, tuple[str, ...]] = {
    "zero": tuple(kind.value for kind in Sharding),
    "recompute": tuple(kind.value for kind in Recompute),
    "schedule": tuple(kind.value for kind in NAMED),
    "precision": tuple(kind.value for kind in Precision if kind.multiplies),
    "offload": tuple(kind.value for kind in Offload),
    "exchange": tuple(kind.value for kind in ExchangeKind),
    "token_layout": tuple(layout.value for layout in TokenLayout),
    "sync": MEETINGS,
    "sequence_parallel": ("off", "on"),
}
COLUMNS = (*NUMBERS, *WORDS)
UNUSED: Mapping[str, Value] = {
    **dict.fromkeys([name for name in NUMBERS if name not in ("devices", "microbatch")], 1),
    "zero": Sharding.NONE.value,
    "recompute": Recompute.NONE.value,
    "offload": Offload.NONE.value,
    "sync": SyncKind.EVERY_STEP.value,
    "sequence_parallel": "off",
}
CHOICES: Mapping[str, tuple[str, ...]] = {"devices": tuple(Devices), "order": tuple(Order)}
MOST_DIGITS = 6  # of a degree or a count: the product of three stays a 64-bit whole number


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Constraints as the search asks them: `fixed` values by column, `forbidden` (column, value) pairs.

    A forbidden value of None forbids every use of the column: only its value in UNUSED is left.
    """

    fixed: Mapping[str, Value]
    forbidden: tuple[tuple[str, Value | None], ...]

    def names(self, column: str) -> bool:
        """Whether anything is fixed or forbidden in `column`."""
        return column in self.fixed or any(name == column for name, _ in self.forbidden)

    def allows(self, column: str, value: Value) -> bool:
        return self.refusal(column, value) is None

    def without(self, more: tuple[tuple[str, Value | None], ...]) -> Limits:
        """These, and `more` forbidden."""
        return replace(self, forbidden=(*self.forbidden, *more))

    def refusal(self, column: str, value: Value) -> str | None:
        """`job.constraints.fix.tensor` or `job.constraints.forbid[1]`: the constraint that refuses; None if allowed."""
        if column in self.fixed and self.fixed[column] != value:
            return f"job.constraints.fix.{column}"
        for index, (name, forbidden) in enumerate(self.forbidden):
            if name == column and (value != UNUSED[column] if forbidden is None else value == forbidden):
                return f"job.constraints.forbid[{index}]"
        return None


def limits(constraints: Constraints) -> Limits:
    """The constraints read. Raises ConfigError with every unknown name, impossible value and contradiction."""
    problems: list[Problem] = []
    fixed: dict[str, Value] = {}
    for name, raw in constraints.fix.items():
        value = _read(name, raw, where=f"job.constraints.fix.{name}", problems=problems)
        if value is not None:
            fixed[name] = value
    forbidden: list[tuple[str, Value | None]] = []
    for index, text in enumerate(constraints.forbid):
        where = f"job.constraints.forbid[{index}]"
        name, equals, raw = (part.strip() for part in text.partition("="))
        if not equals and name in COLUMNS and name not in UNUSED:
            problems.append(Problem(where=where, what=f"every plan has a {name}", fix=f"write {name}=VALUE"))
        value = _read(name, raw, where=where, problems=problems) if equals or name not in COLUMNS else None
        forbidden.append((name, value))
    for field, choices in CHOICES.items():
        chosen = getattr(constraints, field)
        if chosen not in choices:
            fix = f"choose {' or '.join(choices)}"
            problems.append(Problem(where=f"job.constraints.{field}", what=f"{chosen!r} is not a choice", fix=fix))
    if not problems:
        problems.extend(_contradictions(fixed, tuple(forbidden)))
    if problems:
        raise ConfigError(problems)
    return Limits(fixed=fixed, forbidden=tuple(forbidden))


def columns_of(plan: Plan) -> dict[str, Value]:
    """The value of every column of a plan; of zero, recompute and offload all that its blocks do, as in `full+none`."""
    group = plan.first_group
    policies = _policies(plan)
    return {
        "devices": plan.world_size,
        "tensor": plan.tensor,
        "pipeline": plan.pipeline,
        "replicate": plan.replicate,
        "shard": plan.shard,
        "context": plan.context,
        "inner": plan.exchange.inner,
        "expert": plan.experts.expert if plan.experts else 1,
        "expert_tensor": plan.experts.tensor if plan.experts else plan.tensor,
        "data": plan.data,
        "chunks": plan.schedule.chunks,
        "slices": plan.schedule.slices,
        "microbatch": plan.microbatch,
        "zero": "+".join(policies["zero"]),
        "recompute": "+".join(policies["recompute"]),
        "offload": "+".join(policies["offload"]),
        "exchange": plan.exchange.kind.value,
        "token_layout": plan.exchange.layout.value,
        "schedule": plan.schedule.kind.value,
        "precision": group.precision.value,
        "sync": plan.gradients.word,
        "sequence_parallel": "on" if group.sequence_parallel else "off",
    }


def _policies(plan: Plan) -> dict[str, list[str]]:
    """What the blocks of a plan shard, compute again and keep away, each policy once."""
    groups = plan.groups
    return {
        "zero": sorted({group.sharding.value for group in groups}),
        "recompute": sorted({group.recompute.value for group in groups}),
        "offload": sorted({group.offload.value for group in groups}),
    }


def keeps_constraints(design: Design) -> Problem | None:
    """The plan keeps what the job fixes and avoids what it forbids, in each of its blocks."""
    asked = limits(design.job.constraints)
    columns: dict[str, Sequence[Value]] = {name: [value] for name, value in columns_of(design.plan).items()}
    for column, values in (columns | _policies(design.plan)).items():
        for value in values:
            refusal = asked.refusal(column, value)
            if refusal:
                what = f"refused by {refusal}"
                return Problem(where=f"plan ({column} {value})", what=what, fix="change one of the two")
    plan, held = design.plan, design.job.constraints.order == "usual"
    if held and (plan.is_placed or not plan.has_usual_order):
        where = "plan.placement" if plan.is_placed else "plan.axes"
        what = "an order that is not the usual one is refused by job.constraints.order"
        return Problem(where=where, what=what, fix="change one of the two")
    return None


CONSTRAINT_RULES = (Rule(name="keeps-constraints", scope=Scope.PLAN, check=keeps_constraints),)


_TRADES = ("all-to-all", "all_to_all", "alltoall", "a2a", "ulysses")


def _read(name: str, raw: Value, *, where: str, problems: list[Problem]) -> Value | None:
    if name not in COLUMNS:
        near = nearest(name, (*COLUMNS, *OTHER_NAMES))
        problems.append(Problem(where=where, what=f"{name!r} is not a column of a plan", fix=near))
        return None
    text = str(raw).strip()
    if name in NUMBERS:
        if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS and int(text) >= 1:
            return int(text)
        what, fix = f"expected a whole number of 1 or more, got {raw!r}", f"write 1 to {10**MOST_DIGITS - 1:,}"
        problems.append(Problem(where=where, what=what, fix=fix))
        return None
    if name == "zero" and text in ("0", "1", "2", "3"):
        return WORDS["zero"][int(text)]
    if name == "sequence_parallel" and text.lower() in ("true", "false"):
        return "on" if text.lower() == "true" else "off"
    if text in WORDS[name]:
        return text
    fix = nearest(text, WORDS[name])
    if name == "exchange" and text in _TRADES:
        fix = "how many context ranks trade heads, all to all, is inner: inner=8; exchange is how the rest meet"
    what = f"{raw!r} is not {'an' if name[0] in 'aeio' else 'a'} {name}"
    problems.append(Problem(where=where, what=what, fix=fix))
    return None


def _contradictions(fixed: Mapping[str, Value], forbidden: tuple[tuple[str, Value | None], ...]) -> list[Problem]:
    problems = []
    asked = Limits(fixed={}, forbidden=forbidden)
    for name, value in fixed.items():
        refusal = asked.refusal(name, value)
        if refusal:
            what = f"{name} is fixed at {value} and {refusal} forbids it"
            problems.append(Problem(where=f"job.constraints.fix.{name}", what=what, fix="drop one of the two"))
    data = [fixed.get(name) for name in ("replicate", "shard", "data")]
    replicate, shard, whole = (number if isinstance(number, int) else None for number in data)
    if replicate and shard and whole and replicate * shard != whole:
        what = f"replicate {replicate} x shard {shard} is not data {whole}"
        problems.append(Problem(where="job.constraints.fix.data", what=what, fix="drop one of the three"))
    if fixed.get("zero") == Sharding.NONE.value and (shard or 1) > 1:
        what = f"zero none leaves nothing to shard over {shard} ranks"
        problems.append(Problem(where="job.constraints.fix.shard", what=what, fix="fix replicate, or zero1"))
    if fixed.get("chunks", 1) != 1 and fixed.get("schedule", "interleaved") != ScheduleKind.INTERLEAVED.value:
        what = f"chunks {fixed['chunks']} belong to the interleaved schedule, and {fixed['schedule']} is fixed"
        problems.append(Problem(where="job.constraints.fix.chunks", what=what, fix="fix schedule = interleaved"))
    return problems
