"""Observer: on rank 0 every event becomes a line for a person and an object for the trackers."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.train.events import Action, Ending, Evaluated, Event, Saved, Started, StepDone, Stopping
from meshwright.train.observe.console import Console, evaluation_line
from meshwright.train.observe.metrics import Metrics, Yardstick, of_evaluation, of_step
from meshwright.train.observe.timekeeper import Timekeeper
from meshwright.train.observe.trackers import Tracker

_ENDINGS = {
    Ending.FINISHED: "all steps are done",
    Ending.PAUSED: "as many steps as were asked for are done",
    Ending.SIGNALLED: "asked to stop; the step is done and is being saved",
}


class Observer:
    """Shows and keeps events. `last` is the newest step and `validation` the newest evaluation, for the summary;
    `decided` what techniques said that the report of the run tells too."""

    def __init__(self, *, console: Console, tracker: Tracker, yardstick: Yardstick, timekeeper: Timekeeper) -> None:
        self.last: Metrics = {}
        self.validation: Metrics = {}
        self.decided: list[str] = []
        self._console, self._tracker, self._yardstick = console, tracker, yardstick
        self.timekeeper = timekeeper

    def see(self, event: Event, *, extra: Mapping[str, float]) -> None:
        """The event is on the screen and with every tracker; `extra` goes beside the numbers of a step."""
        self.timekeeper.see(event)
        if isinstance(event, StepDone):
            self.last = {**of_step(event, yardstick=self._yardstick), "ettr": self.timekeeper.ettr}
            self._console.step(self.last)
            self._log({**self.last, **extra})
        elif isinstance(event, Evaluated):
            self.validation = of_evaluation(event)
            self._console.say(evaluation_line(self.validation))
            self._log(self.validation)
        elif isinstance(event, Saved):
            self._console.say(f"step {event.step}  saving a checkpoint")
        elif isinstance(event, Started) and event.step and not event.why:
            self._console.say(f"going on from step {event.step} of {event.total_steps}")
        elif isinstance(event, Stopping):
            self._console.say(f"step {event.step}  {_ENDINGS[event.ending]}")

    def measure_against(self, yardstick: Yardstick) -> None:
        """Steps from here on are measured against another prediction."""
        self._yardstick = yardstick

    def did(self, action: Action, *, step: int) -> None:
        """The action is done, and the run stands at `step`."""
        self.timekeeper.did(action, step=step)

    def say(self, line: str) -> None:
        """The line is on the screen and stays."""
        self._console.say(line)

    def note(self, values: Metrics, *, step: int) -> None:
        """Every tracker keeps these numbers, which hold from the end of `step` on."""
        self._tracker.log(values, step=step)

    def leave(self) -> None:
        """Another observer goes on with the run: all that was seen is kept, and nothing is summed up."""
        self.timekeeper.leave()
        self._console.finish()
        self._tracker.finish()

    def finish(self) -> None:
        """The terminal is as it was and every tracker has written what it was given."""
        self._console.finish()
        self._tracker.summarise({**self.last, **self.validation, **self.timekeeper.summary})
        self._tracker.finish()

    def _log(self, metrics: Metrics) -> None:
        step = int(metrics["step"] or 0)
        self._tracker.log({name: value for name, value in metrics.items() if name != "step"}, step=step)
