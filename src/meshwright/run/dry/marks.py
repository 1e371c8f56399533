"""Marks: where passes of a pipeline rank begin and end, the halves of a split backward under names of their own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial

from meshwright.parallel import Laid
from meshwright.parallel.synchronize import Synchronizer
from meshwright.run.dry.counter import StepCounter
from meshwright.schedule import Work
from meshwright.schedule.moves import PATIENT_SENDS
from meshwright.spec.report import LineName

_HALVES = {Work.BACKWARD: "", Work.INPUT: " of inputs", Work.WEIGHT: " of weights"}
_BACKWARDS = {"before_backward": Work.BACKWARD, "before_input": Work.INPUT, "before_weights": Work.WEIGHT}
SPLIT = f"{LineName.BACKWARD} of "  # what names of the halves of a backward begin with


def _nothing(**_options: bool) -> None: ...


class PassNames:
    """`pass|stage|number`, where a backward is whole or the half that its synchroniser was told of last; the number is
    that of the microbatch, or of its slice where there are `slices`, which go forward in order and back in reverse.

    What a half does to memory depends on which half its stage ran before it, for gradients of norms are made in one
    and taken in the other; on whether it is the last of the step; and a half of weights on how many of inputs came
    since its own, as what those sent is kept for PATIENT_SENDS. Its name tells all that.
    """

    def __init__(self, *, slices: int) -> None:
        self._slices = slices
        self._half, self._last = Work.BACKWARD, False
        self._before: dict[int, str] = {}
        self._inputs: dict[int, list[int]] = defaultdict(list)
        self._done: Counter[tuple[str, int, int]] = Counter()

    def restart(self) -> None:
        """A step begins."""
        self._before.clear()
        self._inputs.clear()
        self._done.clear()

    def watch(self, synchronizer: Synchronizer) -> None:
        """Backwards of the stage of `synchronizer` say which half they are."""
        for name, half in _BACKWARDS.items():
            # The half that is last told of: what is told may tell itself that a whole backward begins.
            setattr(synchronizer, name, _around(getattr(synchronizer, name), after=partial(self.tell, half)))

    def tell(self, half: Work, last: bool = False) -> None:
        """The backward that runs is `half`, the `last` of its stage in this step."""
        self._half, self._last = half, last

    def name(self, name: str, *, stage: int, microbatch: int) -> str:
        """The name of the pass that ended."""
        whole = name != LineName.BACKWARD or self._half is Work.BACKWARD
        number = self._number(name, stage, microbatch) if self._slices > 1 else microbatch
        return f"{name}{'' if whole else self._told(stage, microbatch)}|{stage}|{number}"

    def _number(self, name: str, stage: int, microbatch: int) -> int:
        if microbatch < 0:
            return microbatch
        done = self._done[name, stage, microbatch]
        self._done[name, stage, microbatch] += 1
        return microbatch * self._slices + (done if name == LineName.FORWARD else self._slices - 1 - done)

    def _told(self, stage: int, microbatch: int) -> str:
        half = _HALVES[self._half]
        before, self._before[stage] = self._before.get(stage, ""), half
        inputs, since = self._inputs[stage], ""
        if self._half is Work.INPUT:
            inputs.append(microbatch)
        else:
            behind = len(inputs) - 1 - inputs.index(microbatch)
            since = f" {min(behind, PATIENT_SENDS + 1)} behind"
        return f"{half}{since} after{before}{' at last' if self._last else ''}"


class Marks:
    """A recorder that marks the end of every pass in the counter, once there is one; and what follows until the next
    pass begins, where passes of several stages or microbatches mix."""

    def __init__(self, *, slices: int) -> None:
        self.counter: StepCounter | None = None
        self._names = PassNames(slices=slices)
        self._last, self._runs = "", False

    def record(self, name: str, _start: float, _seconds: float, *, stage: int = -1, microbatch: int = -1) -> None:
        self._last, self._runs = self._names.name(name, stage=stage, microbatch=microbatch), False
        self.mark(self._last)

    def start(self, counter: StepCounter) -> None:
        """A step begins, and `counter` counts it."""
        self.counter, self._last, self._runs = counter, "", False
        self._names.restart()

    def mark(self, name: str) -> None:
        if self.counter is not None:
            self.counter.mark(name)

    def have_gradients(self) -> None:
        """Backward is over, and gradients are whole."""
        if self.counter is not None:
            self.counter.mark_owned()
            self.counter.updates = True

    def watch(self, laid: Laid) -> None:
        """Passes of `laid` say when they begin."""
        for part, synchronizer in zip(laid.parts, laid.synchronizers, strict=True):
            part.register_forward_pre_hook(self._begin)
            self._names.watch(synchronizer)
            for name in _BACKWARDS:
                setattr(synchronizer, name, _around(getattr(synchronizer, name), before=self._begin))
            for name, forms in (("before_weights", True), ("after_weights", False)):
                change = partial(self._form, forms)
                setattr(synchronizer, name, _around(getattr(synchronizer, name), before=change))

    def _begin(self, *_arguments: object, **_options: object) -> None:
        """A pass begins, unless it is the one that has begun."""
        if not self._runs:
            self.mark(f"after {self._last}" if self._last else "begin")
        self._runs = True

    def _form(self, forms: bool) -> None:
        if self.counter is not None:
            self.counter.forms_gradients = forms


def _around(
    told: Callable[..., None], *, before: Callable[[], None] = _nothing, after: Callable[..., None] = _nothing
) -> Callable[..., None]:
    """`before`, what is told, and `after`, which is told the same."""

    def call(**options: bool) -> None:
        before()
        told(**options)
        after(**options)

    return call
