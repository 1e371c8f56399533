"""Names of passes, which tell all that decides what a pass does to memory: what a rank marks, in the step's order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from meshwright.schedule import Work, planned
from meshwright.schedule.moves import PATIENT_SENDS
from meshwright.schedule.table import Table
from meshwright.spec.plan import Plan
from meshwright.spec.report import LineName

RECEIVE = "receive"
SPLIT = f"{LineName.BACKWARD} of "  # what names of backwards begin with where some are split
_HALVES = {Work.BACKWARD: " of both", Work.INPUT: " of inputs", Work.WEIGHT: " of weights"}
_TO_SPLIT = " to be split"  # a forward that keeps what the halves of its backward take, where others do not


@dataclass(frozen=True, slots=True)
class Action:
    """What a pipeline rank does next: `work` is F, B, I, W, RECV_F, RECV_B, SEND_F, SEND_B, REDUCE_GRAD, UNSHARD or
    RESHARD; `number` is that of the microbatch, or of its slice among those of all, and -1 where it is for all."""

    work: str
    stage: int
    number: int


def halved(table: Table) -> dict[int, frozenset[int]]:
    """Microbatches by stage whose backward has two halves; {} where none or all have."""
    found: dict[int, set[int]] = defaultdict(set)
    whole = False
    for row in table:
        for action in row:
            whole = whole or action.work is Work.BACKWARD
            if action.work is Work.INPUT:
                found[action.stage].add(action.microbatch)
    return {stage: frozenset(those) for stage, those in found.items()} if whole else {}


def table_of(plan: Plan) -> Table:
    """What every pipeline rank runs."""
    return planned.table(plan.schedule, pipeline=plan.pipeline)


class PassNames:
    """`pass|stage|number`, where a backward is whole or the half that its synchroniser was told of last; the number is
    that of the microbatch, or of its slice where there are `slices`, which go forward in order and back in reverse.

    What a half does to memory depends on which half its stage ran before it, for gradients of norms are made in one
    and taken in the other; on whether it is the last of the step; and a half of weights on how many gradients were sent
    since its own, as what those sent is kept for PATIENT_SENDS. Its name tells all that. So do those of whole backwards
    where others are `halved`, and of forwards that keep more for that.
    """

    def __init__(self, *, slices: int, halved: Mapping[int, frozenset[int]]) -> None:
        self._slices, self._halved = slices, halved
        self._half, self._last = Work.BACKWARD, False
        self._before: dict[int, str] = {}
        self._sent: dict[int, list[int]] = defaultdict(list)
        self._done: Counter[tuple[str, int, int]] = Counter()

    def restart(self) -> None:
        """A step begins."""
        self._before.clear()
        self._sent.clear()
        self._done.clear()

    def tell(self, half: Work, last: bool = False) -> None:
        """The backward that runs is `half`, the `last` of its stage in this step."""
        self._half, self._last = half, last

    def name(self, name: str, *, stage: int, microbatch: int) -> str:
        """The name of the pass that ended."""
        told = ""
        if name == LineName.BACKWARD and (self._halved or self._half is not Work.BACKWARD):
            told = self._told(stage, microbatch)
        elif name == LineName.FORWARD and microbatch in self._halved.get(stage, ()):
            told = _TO_SPLIT
        number = self._number(name, stage, microbatch) if self._slices > 1 else microbatch
        return f"{name}{told}|{stage}|{number}"

    def _number(self, name: str, stage: int, microbatch: int) -> int:
        if microbatch < 0:
            return microbatch
        done = self._done[name, stage, microbatch]
        self._done[name, stage, microbatch] += 1
        return microbatch * self._slices + (done if name == LineName.FORWARD else self._slices - 1 - done)

    def _told(self, stage: int, microbatch: int) -> str:
        half = _HALVES[self._half]
        before, self._before[stage] = self._before.get(stage, ""), half
        sent, since = self._sent[stage], ""
        if self._half is Work.WEIGHT:
            behind = len(sent) - 1 - sent.index(microbatch)
            since = f" {min(behind, PATIENT_SENDS + 1)} behind"
        else:
            sent.append(microbatch)
        return f"{half}{since} after{before}{' at last' if self._last else ''}"


def names_of(plan: Plan) -> PassNames:
    """The names of what ranks of `plan` run in a step."""
    return PassNames(slices=plan.schedule.slices, halved=halved(table_of(plan)) if plan.pipeline > 1 else {})


def marked(plan: Plan, actions: Iterable[Action]) -> Iterator[str]:
    """RECEIVE for every tensor that a rank makes room for where it performs `actions`, and the name of every pass."""
    slices, stages = plan.schedule.slices, range(len(plan.stages))
    names = names_of(plan)
    left = [planned.passes(plan.schedule, stage) for stage in stages]
    ends = [plan.first_trained_block >= plan.stages[stage].stop for stage in stages]  # no gradient reaches these
    for action in actions:
        stage, index, work = action.stage, action.number // slices, action.work
        if work == "RECV_F" or (work == "RECV_B" and not ends[stage]):
            yield RECEIVE
        elif work == Work.FORWARD:
            yield names.name(LineName.FORWARD, stage=stage, microbatch=index)
        elif work == "REDUCE_GRAD":
            yield names.name(LineName.GRADIENTS, stage=stage, microbatch=-1)
        elif work in (Work.BACKWARD, Work.INPUT, Work.WEIGHT) and not ends[stage]:
            left[stage] -= work != Work.INPUT
            names.tell(Work(work), last=not left[stage])
            yield names.name(LineName.BACKWARD, stage=stage, microbatch=index)


def place_of(plan: Plan, name: str) -> str:
    """The name of a stretch with its stage's place on its rank instead of the stage, and with the slice of the
    microbatch instead of its number."""
    parts = name.split("|")
    if len(parts) != 3:
        return name
    stage, number = int(parts[1]), int(parts[2])
    chunk = plan.stages_of(plan.stages[stage].rank).index(stage) if stage >= 0 else -1
    return f"{parts[0]}|{chunk}|{number % plan.schedule.slices if number >= 0 else number}"


def passes_of(plan: Plan, *, rank: int) -> Counter[str]:
    """How often pipeline rank `rank` runs a pass of each place in a step, what ends the step left out."""
    row, slices = table_of(plan)[rank], plan.schedule.slices
    actions = (Action(action.work.value, action.stage, action.microbatch * slices + action.slice) for action in row)
    return Counter(place_of(plan, name) for name in marked(plan, actions))
