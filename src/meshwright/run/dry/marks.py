"""Marks: where passes of a pipeline rank begin and end, the halves of a split backward under names of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from meshwright.parallel import Laid
from meshwright.parallel.synchronize import Synchronizer
from meshwright.run.dry.counter import StepCounter
from meshwright.run.dry.names import PassNames
from meshwright.schedule import Work

_BACKWARDS = {"before_backward": Work.BACKWARD, "before_input": Work.INPUT, "before_weights": Work.WEIGHT}


def _nothing(**_options: bool) -> None: ...


class Marks:
    """A recorder that marks the end of every pass in the counter, once there is one; and what follows until the next
    pass begins, where passes of several stages or microbatches mix. `passed` is told how many passes are done."""

    def __init__(self, names: PassNames, *, passed: Callable[[int], None]) -> None:
        self.counter: StepCounter | None = None
        self._names, self._passed, self._passes = names, passed, 0
        self._last, self._runs = "", False

    def record(self, name: str, _start: float, _seconds: float, *, stage: int = -1, microbatch: int = -1) -> None:
        self._last, self._runs = self._names.name(name, stage=stage, microbatch=microbatch), False
        self.mark(self._last)
        self._passes += microbatch >= 0
        self._passed(self._passes)

    def start(self, counter: StepCounter) -> None:
        """A step begins, and `counter` counts it."""
        self.counter, self._last, self._runs, self._passes = counter, "", False, 0
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
            self._learn_halves(synchronizer)
            for name in _BACKWARDS:
                setattr(synchronizer, name, _around(getattr(synchronizer, name), before=self._begin))
            for name, forms in (("before_weights", True), ("after_weights", False)):
                change = partial(self._form, forms)
                setattr(synchronizer, name, _around(getattr(synchronizer, name), before=change))

    def _learn_halves(self, synchronizer: Synchronizer) -> None:
        """Backwards of the stage of `synchronizer` say which half they are."""
        for name, half in _BACKWARDS.items():
            # The half that is last told of: what is told may tell itself that a whole backward begins.
            told = partial(self._names.tell, half)
            setattr(synchronizer, name, _around(getattr(synchronizer, name), after=told))

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
