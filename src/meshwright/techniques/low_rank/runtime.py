"""LowRankTraining: watches ranks of the dense model, asks for the switch where it pays, and for the way back."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwright.cost.holdings import PARAMETERS, Contents
from meshwright.cost.learner_holdings import ANCHOR
from meshwright.cost.low_rank import Verdict, candidates, given_ranks, verdict
from meshwright.parallel import relocate
from meshwright.parallel.relocate import State
from meshwright.parallel.stable_rank import stable_ranks
from meshwright.spec import codec
from meshwright.spec.low_rank import Cuttlefish, LowRank, Pufferfish, Ranks, matrices_with_ranks, ranks_of, steps_of
from meshwright.spec.plan import Design
from meshwright.techniques.low_rank import policy
from meshwright.techniques.low_rank.memory import Memory, Stage
from meshwright.train.events import Action, Event, Log, Replan, RollBack, Save, Saved, Started, StepDone

if TYPE_CHECKING:
    from meshwright.train.run import Run

_LOG = "low rank: "
_DENSE_WINDOWS = 4  # windows of the dense model that its trend is taken from


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weighed:
    """The ranks that pay, none where it does not, and why in words."""

    ranks: Ranks
    words: str

    @property
    def pays(self) -> bool:
        return bool(self.ranks)


class LowRankTraining:
    """Low rank training of one run, as `design.job.low_rank` says; `design` is of the dense model.

    Every rank decides alike: what is found of ranks and losses, and what is predicted, rank 0 tells the others. The
    dense state is saved before the switch, and stays while it may be gone back to. Learners, which are unlike within
    their rounds, decide at the edges of rounds, by what all of them go from.
    """

    name = "low_rank"

    def __init__(self, design: Design) -> None:
        spec = design.job.factoring
        assert spec is not None
        self._spec: LowRank = spec
        self._dense = replace(design, model=design.model.dense())
        self._total = design.job.total_steps
        self._found = candidates(self._dense, self._spec)
        self._window = policy.window(self._spec, total_steps=self._total)
        self._rewarm = steps_of(self._spec.rewarm, total_steps=self._total)
        self._memory = Memory()
        self._goes_back = False

    def attach(self, run: Run) -> None:
        self._run = run
        run.rate_scales.append(self._rate_scale)

    def react(self, event: Event) -> Iterable[Action]:
        if isinstance(event, Started):
            return tuple(self._begin(event.step))
        if isinstance(event, Saved) and self._memory.stage is Stage.DUE:
            return tuple(self._switch(event.step))
        return tuple(self._after(event)) if isinstance(event, StepDone) else ()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = codec.encode(self._memory)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._memory = codec.decode(Memory, state)
        if self._goes_back:
            self._goes_back = False
            self._memory.stay_dense()
        self._pin()

    def _begin(self, step: int) -> Iterator[Action]:
        """What a run that starts or goes on has to do first: ask whether there is any use in watching, and watch."""
        if self._memory.stage is Stage.DUE:
            yield from self._switch(step)
        if self._memory.stage is Stage.RETURNING:
            yield from self._return()
        if self._memory.stage is not Stage.WATCHING or self._memory.tracks:
            return
        least = self._spec.ratio if isinstance(self._spec, Pufferfish) else self._spec.least_ratio
        weighed = self._weigh(given_ranks(self._found, ratio=least))
        if not weighed.pays:
            yield self._decline(weighed)
        elif isinstance(self._spec, Cuttlefish):
            self._track(step)

    def _after(self, event: StepDone) -> Iterator[Action]:
        memory = self._memory
        if memory.stage in (Stage.WATCHING, Stage.GUARDED):
            memory.lose(event.loss, most=self._window * (1 if memory.stage is Stage.GUARDED else _DENSE_WINDOWS))
        if memory.stage is Stage.DUE and self._at_edge(event.step):
            yield from self._ask(event.step)
        elif memory.stage is Stage.WATCHING:
            yield from self._watch(event.step)
        elif memory.stage is Stage.GUARDED and event.step == memory.switched + self._rewarm + self._window:
            yield from self._compare(event.step)
        if memory.stage in (Stage.GUARDED, Stage.FACTORED) and self._is_stale(event.step):
            memory.balanced = event.step
            yield Replan(design=self._run.design)
            yield Log(text=f"{_LOG}factors are balanced anew after step {event.step}")

    def _watch(self, step: int) -> Iterator[Action]:
        """Ranks are tracked every interval until the switch is due and pays, or does not."""
        spec = self._spec
        if not self._at_edge(step):
            return
        if isinstance(spec, Cuttlefish) and self._is_time(step, interval=spec.interval):
            self._track(step)
            yield Log(values={"rank_share": policy.rank_share(self._found, self._memory.tracks)})
        if step >= self._total or not policy.is_due(step, spec, total_steps=self._total, tracks=self._memory.tracks):
            return
        if isinstance(spec, Pufferfish):
            ranks = given_ranks(self._found, ratio=spec.ratio)
        else:
            ranks = policy.found_ranks(self._found, self._memory.tracks, spec)
        weighed = self._weigh(ranks)
        if not weighed.pays:
            yield self._decline(weighed)
            return
        self._memory.ranks, self._memory.stage = dict(weighed.ranks), Stage.DUE
        yield self._say(weighed.words)
        yield from self._ask(step)

    def _ask(self, step: int) -> Iterator[Action]:
        """The dense state is saved first: what goes on from there makes the same switch."""
        self._pin(step)
        yield Save()

    def _weigh(self, ranks: Ranks) -> _Weighed:
        """Whether `ranks` pay, and those of them that do."""
        if not self._found:
            words = "no matrix of this model may have a rank: see low_rank.dense_layers and low_rank.least_dim"
            return _Weighed(ranks={}, words=words)
        if not ranks:
            return _Weighed(ranks={}, words="no matrix has settled at a rank whose factors are smaller than it")
        found = self._run.store.share(lambda: self._verdict(ranks))
        return _Weighed(ranks=ranks_of(found.design.model) if found.pays else {}, words=found.words)

    def _decline(self, weighed: _Weighed) -> Log:
        self._memory.stay_dense()
        return self._say(f"declined: {weighed.words}")

    def _verdict(self, ranks: Ranks) -> Verdict:
        return verdict(self._dense, self._found, ranks, gain=self._spec.gain)

    def _switch(self, step: int) -> Iterator[Action]:
        memory = self._memory
        design = replace(self._dense, model=self._dense.model.with_ranks(memory.ranks))
        memory.factor(step)
        self._pin()
        yield Replan(design=design)
        before, after = self._dense.model.parameters, design.model.parameters
        ranks = sorted(matrices_with_ranks(design.model).values())
        yield self._say(
            f"switched after step {step}: {len(ranks)} matrices have ranks from {ranks[0]} to {ranks[-1]}, "
            f"{before:,} parameters became {after:,}"
        )

    def _compare(self, step: int) -> Iterator[Action]:
        """After the re-warm-up the loss is where the dense model's would be, or the run goes back."""
        memory, tolerance = self._memory, self._spec.rollback
        before, after = memory.before, memory.losses
        memory.before, memory.losses = (), ()
        memory.stage = Stage.FACTORED
        if tolerance is None or step >= self._total or len(before) < 2:
            self._pin()
            return
        # Of learners it is the first one's losses that were saved with the run.
        found = self._run.store.share(
            lambda: policy.guard(before, after, switched=memory.switched, last=step, tolerance=tolerance)
        )
        words = f"the loss is {found.loss:.4f} by step {step}, where the dense trend is {found.expected:.4f}"
        if not found.broken:
            self._pin()
            yield self._say(f"{words}: the run stays low rank")
            return
        memory.stage = Stage.RETURNING
        self._pin()
        yield self._say(f"{words}: the run goes back to step {memory.switched} and stays dense")
        yield from self._return()

    def _return(self) -> Iterator[Action]:
        """The dense state of the switch, saved again as one that stays dense."""
        self._goes_back = True
        yield RollBack(to=self._memory.switched)
        yield Save()

    def _is_stale(self, step: int) -> bool:
        every, since = self._spec.refactorise_every, step - self._memory.balanced
        return bool(every) and since >= every and step < self._total and self._at_edge(step)

    def _rate_scale(self, step: int) -> float:
        memory = self._memory
        if memory.stage not in (Stage.GUARDED, Stage.FACTORED, Stage.RETURNING):
            return 1.0
        scale = policy.rate_factor(step, since=memory.switched, steps=self._rewarm)
        if memory.balanced > memory.switched:
            scale *= policy.rate_factor(step, since=memory.balanced, steps=self._spec.recovery_steps)
        return scale

    def _at_edge(self, step: int) -> bool:
        """After `step` all ranks may do something together: learners have ended a round."""
        outer = self._run.outer
        return outer is None or outer.pace.at_edge(step)

    def _is_time(self, step: int, *, interval: float) -> bool:
        """An interval has ended since ranks were tracked the last time."""
        steps = steps_of(interval, total_steps=self._total)
        return step // steps > self._memory.tracked // steps

    def _track(self, step: int) -> None:
        """One more stable rank of every matrix that may be factored, after `step`. Collective."""
        memory, run = self._memory, self._run
        names = {f"{one.key}.weight": one.key for one in self._found}
        ranks = stable_ranks(
            tuple(names),
            _watched(run),
            starts={f"{key}.weight": _vector(text) for key, text in memory.vectors.items()},
            group=run.learners.mesh.everyone,
            device=run.laid.device,
        )
        own = {key: (ranks[name].value, _text(ranks[name].vector)) for name, key in names.items()}
        found = own if run.outer is None else run.store.share(lambda: own)
        memory.tracked = step
        for key, (value, vector) in found.items():
            memory.tracks[key] = (*memory.tracks.get(key, ()), value)
            memory.vectors[key] = vector

    def _pin(self, step: int | None = None) -> None:
        """The dense checkpoint of the switch stays, while there is a way back to it."""
        if step is None and self._memory.stage in (Stage.GUARDED, Stage.RETURNING):
            step = self._memory.switched
        self._run.store.pinned = frozenset(() if step is None or self._spec.rollback is None else (step,))

    def _say(self, text: str) -> Log:
        """The line is in the log, and in the report of the run."""
        if self._run.observer is not None:
            self._run.observer.decided.append(text)
        return Log(text=f"{_LOG}{text}")


def _watched(run: Run) -> State:
    """The parameters whose ranks are tracked, in the layout of one learner: of learners what all of them go from, which
    no byte has to be sent for."""
    own = replace(run.design, plan=run.design.plan.of_learner())
    state = relocate.state_of(own, laid=run.laid, contents=Contents.PARAMETERS)
    if run.outer is None:
        return state
    anchors = {f"{PARAMETERS}{name}": x for name, x in run.outer.of_all(ANCHOR).items()}
    return replace(state, own=replace(state.own, tensors={**state.own.tensors, **anchors}))


def _text(vector: Tensor) -> str:
    return base64.b64encode(bytes(vector.view(torch.uint8).tolist())).decode()


def _vector(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.bfloat16)
