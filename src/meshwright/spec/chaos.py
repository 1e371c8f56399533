"""Chaos: what became of a run under faults, and what it lost by them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from meshwright.spec.errors import ExitCode, Problem
from meshwright.spec.faults import Fault
from meshwright.spec.goodput import Goodput

MENDABLE = frozenset({ExitCode.SAVED, ExitCode.INTERRUPTED, ExitCode.WORKER, ExitCode.ENVIRONMENT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """A fault that was done `at_seconds` after the first launch began, when rank 0 was at `step` of launch `launch`.

    `recovered`: a whole step was done again, or the run ended well, `back_seconds` later. `found_seconds` is until the
    launch ended, None where it went on, and `named_seconds` until the run said which rank was lost, None where it did
    not. `words` are what it said of this fault as it ended, or as it went on without a rank; `undone_steps` had to be
    done again.
    """

    fault: Fault
    at_seconds: float
    step: int
    launch: int
    recovered: bool = False
    back_seconds: float | None = None
    found_seconds: float | None = None
    words: str = ""
    undone_steps: int = 0
    named_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnd:
    """How launch `number` ended after `seconds`: its exit code (minus the signal that ended it), and why in its own
    words."""

    number: int
    seconds: float
    exit_code: int
    words: str

    @property
    def is_mendable(self) -> bool:
        """Whether a person would start it again as it is: a signal stopped it, a worker or a disk failed, or it was
        killed. What was asked wrongly, and faults of the program, come again."""
        return self.exit_code in MENDABLE or self.exit_code < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Losses of `steps` steps beside those of the run `against`: the largest relative difference, and what it may be.

    `missing` steps are in one of the two alone. `same_state`: the tensors of the last checkpoints are the same bits;
    None where they lie in other files or are of other steps.
    """

    against: str
    steps: int
    worst: float
    tolerance: float
    missing: tuple[int, ...]
    same_state: bool | None

    @property
    def is_equal(self) -> bool:
        """Every step is there and has the loss that it should; and its state, where that has to be the same bits."""
        return (
            not self.missing and self.worst <= self.tolerance and (self.tolerance > 0 or self.same_state is not False)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos:
    """What a run under faults came to. `missed` faults never had their moment; `gave_up` is why it was not started
    again, "" where it trained to its end. `undisturbed_steps` were done in `undisturbed_seconds`, with no fault open.
    `read` sequences were read exactly once where there are no `problems`; `curve` is None where no run was there to
    compare with. `interrupted`: it was ended before the run, or the comparison, was; data was not looked at, or losses
    were not."""

    run: str
    plan: str
    struck: tuple[Struck, ...]
    missed: tuple[Fault, ...]
    launches: tuple[LaunchEnd, ...]
    wall_seconds: float
    undisturbed_seconds: float
    undisturbed_steps: int
    gave_up: str
    goodput: Goodput | None
    read: int
    problems: tuple[Problem, ...]
    curve: Curve | None
    interrupted: bool = False
    schema: int = 1

    @property
    def recovered(self) -> int:
        return sum(each.recovered for each in self.struck)

    @property
    def is_sound(self) -> bool:
        """Every fault was done and recovered from, no data was lost or repeated, and losses are as undisturbed."""
        done = not self.interrupted and not self.gave_up and not self.missed
        well = done and self.recovered == len(self.struck) and not self.problems
        return well and (self.curve is None or self.curve.is_equal)

    def told(self) -> dict[str, object]:
        """As `--json` and `RUN/chaos.json` have it: whether it is sound, and all that was found."""
        return {"sound": self.is_sound, **{each.name: getattr(self, each.name) for each in fields(self)}}
