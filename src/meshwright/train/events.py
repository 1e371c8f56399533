"""What happened in a run (events) and what may be done about it (actions): typed values and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from meshwright.spec.errors import Problem
from meshwright.spec.plan import Design


class Ending(StrEnum):
    """Why a run ended: all tokens trained on, as many steps as were asked for, or a signal or the end of its time. One
    that regroups has not: it goes on on other ranks.
    """

    FINISHED = "finished"
    PAUSED = "paused"
    SIGNALLED = "signalled"
    REGROUPING = "regrouping"


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The run is built and stands at `step`; nothing is trained in this process yet, or nothing since its ranks have
    changed, for the reason `why`; `lost` where one of them was. Newer checkpoints that are corrupt were `passed_over`.
    """

    step: int
    total_steps: int
    why: str = ""
    lost: bool = False
    passed_over: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Seconds of one step on every rank of a learner, in order: its own work, in collectives, and waiting for data;
    `writing` says that some rank wrote a checkpoint beside it."""

    own: tuple[float, ...]
    waited: tuple[float, ...]
    input: tuple[float, ...]
    writing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """One optimizer step, the same on every rank.

    `loss` is the mean over the tokens of the global batch, before the update; `seconds`, the `input_seconds` of them in
    which a rank waited for data, and `memory_bytes` are the largest of all ranks; `stop_asked` says that some rank was
    asked to stop, `change_asked` that the ranks are to change. All ranks know that they stand here alike where they are
    `together`, which learners are where they tell each other how they are. `expert_load` is the most that an expert was
    chosen over the mean of its layer's, in the worst layer; None where the model has no experts. `ranks` is of each
    rank, where ranks are watched.
    """

    step: int
    tokens: int
    loss: float
    grad_norm: float
    learning_rate: float
    seconds: float
    memory_bytes: float
    input_seconds: float = 0.0
    stop_asked: bool = False
    change_asked: bool = False
    together: bool = True
    expert_load: float | None = None
    ranks: RankTimes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpoilt:
    """Step `step` was tried and gave a loss or a gradient norm that is not a finite number or leaps, as `unusual` says
    in words, or had no target to learn.

    The same on every rank. Parameters, optimizer and position are those of the step before. `state_finite` says whether
    its parameters are numbers all of them: where they are not, no other batch helps.
    """

    step: int
    loss: float
    grad_norm: float
    num_targets: int
    state_finite: bool
    unusual: str = ""
    stop_asked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Mean loss in nats a token over the held-out sequences, and the same as bits for each byte of text."""

    step: int
    tokens: int
    loss: float
    bits_per_byte: float
    num_sequences: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint of `step` is begun; it counts once it is committed.

    It stopped training for `seconds`. The one before was safe `write_seconds` after it was begun, None where there was
    none; where this one is safe already, it is of this one. Steps take `step_seconds`, 0 before any. Of all ranks the
    largest.
    """

    step: int
    seconds: float
    write_seconds: float | None = None
    step_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """`prints[r]` tells of every bit of the parameters that rank r holds after `step`; ranks that hold the same ones
    have the same."""

    step: int
    prints: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """`prints[r]` tells of every bit that rank r computed in a step that was made for that: of its layers, forward and
    backward, twice from the same state, and of the state after the update."""

    step: int
    prints: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """No step follows this one."""

    step: int
    ending: Ending


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What `rank` says of its own machine, the same on every rank."""

    rank: int
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksProbed:
    """How long a message of `num_bytes` took from host to host: `seconds[sender][receiver]`, 0 where none was sent.

    `hosts` are their names, `host_of` the host of every rank. The same on every rank.
    """

    hosts: tuple[str, ...]
    host_of: tuple[int, ...]
    num_bytes: int
    seconds: tuple[tuple[float, ...], ...]


Event = Started | StepDone | StepSpoilt | Evaluated | Saved | Verified | Replayed | Stopping | Examined | LinksProbed


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Give these numbers to every tracker beside those of the next step, and this line to the person who watches."""

    values: Mapping[str, float] = field(default_factory=dict)
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Measure the validation loss now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Write a checkpoint of the present step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """Take the fingerprints of the parameters of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The ranks of each of `groups`, who should hold the same, make a step alike, from the state of the first of them.
    What the run held is not there any more afterwards. Collective over all ranks."""

    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyState:
    """Copy the present state into memory, so that other ranks can go on from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Go on past the batch of the step that was spoilt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBack:
    """Go on from the newest checkpoint, past the batch of the step that was spoilt; or from that of step `to`, with the
    batches that followed it, and without those saved later."""

    to: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """Go on by `design`, whose model has other ranks, with all that was learned; where it has the present ones, factors
    are balanced anew and their moments begin."""

    design: Design


@dataclass(frozen=True, slots=True, kw_only=True)
class Examine:
    """Ask rank `rank` how its machine does. Collective."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLinks:
    """Send messages of `num_bytes` from host to host, as long as they need to be where that is 0. Collective."""

    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the run after this event."""

    ending: Ending


Action = Log | Evaluate | Save | CopyState | Verify | Replay | Skip | RollBack | Replan | Examine | ProbeLinks | Stop


class Reactor(Protocol):
    """Anything that answers events with actions: a policy of the run itself or a technique.

    Every rank must answer alike: an action may be a collective.
    """

    def react(self, event: Event) -> Iterable[Action]: ...
