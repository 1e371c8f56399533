"""Run: everything one worker trains with, and the steps, evaluations and checkpoints it makes of it."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright.cost.holdings import Contents
from meshwright.data import Corpus, Loader
from meshwright.parallel import Laid
from meshwright.parallel.outer import Learners, OuterSync, loaded, saved, state_of
from meshwright.parallel.relocate import State
from meshwright.spec.errors import ConfigError, Problem, WorkerFailed
from meshwright.spec.plan import Design
from meshwright.spec.report import LineName
from meshwright.train.agree import Agreed, Told, agree
from meshwright.train.checkpoint import Checkpoint, Store, of_checkpoint
from meshwright.train.elastic import Membership, copy_state
from meshwright.train.evaluate import validate
from meshwright.train.events import (
    Action,
    CopyState,
    Ending,
    Evaluate,
    Evaluated,
    Event,
    Examine,
    Log,
    ProbeLinks,
    Reactor,
    Replan,
    Replay,
    RollBack,
    Save,
    Saved,
    Skip,
    Started,
    StepDone,
    StepSpoilt,
    Stopping,
    Verify,
)
from meshwright.train.feed import Feed
from meshwright.train.fingerprints import verified
from meshwright.train.inquiries import Inquiries
from meshwright.train.known import Known
from meshwright.train.learning_rate import learning_rate
from meshwright.train.ledger import Ledger
from meshwright.train.loss_scale import LossScale, computed
from meshwright.train.observe.collective_log import CollectiveLog
from meshwright.train.observe.observer import Observer
from meshwright.train.observe.profile import Profiler
from meshwright.train.observe.spans import SpanFile
from meshwright.train.observe.whereabouts import Marker, Section
from meshwright.train.replan import lay_again, replan
from meshwright.train.replay import replayed
from meshwright.train.rounds import RoundFile, leave_out, meet
from meshwright.train.spikes import Usual
from meshwright.train.state import TrainState
from meshwright.train.technique import Technique


@dataclass(slots=True, kw_only=True)
class Run:
    """One worker's run. `stop_asked` says whether this process was asked to stop; `observer` is for rank 0 alone.

    `rate_scales` are of techniques: what the learning rate of a step, 0 being the first, is multiplied by. `log` is of
    collectives and `inquiries` are what is asked about ranks and links, where they are watched; `rounds` are kept where
    learners may miss some.
    """

    design: Design
    state: TrainState
    laid: Laid
    learners: Learners
    outer: OuterSync | None
    optimizer: torch.optim.Optimizer
    corpus: Corpus
    feed: Feed
    loader: Loader
    store: Store
    profiler: Profiler
    spans: SpanFile
    marker: Marker
    stop_asked: Callable[[], bool]
    memory_bytes: Callable[[], float]
    usual: Usual
    loss_scale: LossScale = field(default_factory=LossScale)
    reactors: tuple[Reactor, ...] = ()
    techniques: tuple[Technique, ...] = ()
    observer: Observer | None = None
    membership: Membership | None = None
    rate_scales: list[Callable[[int], float]] = field(default_factory=list)
    pending: dict[str, float] = field(default_factory=dict)
    asked: bool = False
    changing: bool = False
    dropped_in_a_row: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    clock: float = field(default_factory=time.perf_counter)
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=33))
    log: CollectiveLog | None = None
    inquiries: Inquiries | None = None
    rounds: RoundFile | None = None

    def start(self) -> Started:
        self.clock = time.perf_counter()
        total_steps = self.design.job.total_steps
        started = Started(step=self.state.step, total_steps=total_steps, passed_over=self.store.spoilt)
        change = self.membership.change if self.membership is not None else None
        return started if change is None else replace(started, why=change.why, lost=change.lost)

    def step(self) -> StepDone | StepSpoilt:
        """One optimizer step on the next global batch; the loss is of the parameters before it.

        Its seconds run from the end of the step before, evaluations and checkpoints left out, on the slowest rank.
        Where the loss or the norm is not finite, or the batch has no target, the step is not done and all that lasts is
        as it was; where there are learners, that of one drops its own update, and all hear of it when they meet.
        """
        number = self.state.step + 1
        if self.log is not None:
            self.log.begin_step(number)
        rate = self._learning_rate()
        with self._observed(number):
            with self.profiler.section(LineName.INPUT):
                self.marker.mark(step=number, section=Section.INPUT)
                rows = next(self.loader)
                batch = self.feed.tensors(rows)
            known = computed(self, batch, number=number)
            with self.profiler.section(LineName.OPTIMIZER):
                self.marker.mark(step=number, section=Section.OPTIMIZER)
                if known.sound:
                    for group in self.optimizer.param_groups:
                        group["lr"] = rate
                    self.optimizer.step()
            met = None if self.outer is None else meet(self, self.outer, number, known=known)
        self.marker.mark(step=number, section=Section.AGREE)
        if not known.sound and self.outer is None:
            return self._spoilt(number, known)
        agreed = self._agree(self.laid.expert_load())
        plan = self.design.plan
        self.state.advance(sequences=plan.sequences, tokens=plan.read_tokens)
        self.ledger.note(rows.fingerprint, dropped=0 if known.sound else self.feed.rows)
        self.usual.note(loss=known.loss, norm=known.norm)
        if met is not None and met.round is not None:
            leave_out(self, met.round)
        if met is not None and met.spoilt:
            return self._spoilt(self.state.step + 1, replace(known, loss=math.nan))
        return StepDone(
            step=self.state.step,
            tokens=self.state.tokens,
            loss=known.loss,
            grad_norm=known.norm,
            learning_rate=rate,
            seconds=agreed.seconds,
            memory_bytes=agreed.memory_bytes,
            input_seconds=agreed.input_seconds,
            stop_asked=agreed.stop if self.outer is None else met is not None and met.stop,
            change_asked=agreed.change if self.outer is None else met is not None and met.change,
            together=self.outer is None or self.outer.told_at == self.state.step,
            expert_load=agreed.load,
            ranks=agreed.ranks,
        )

    def react(self, event: Event) -> Iterable[Action]:
        """What the policies and techniques answer, in order; rank 0 has shown and kept the event by then."""
        if self.observer is not None:
            self.observer.see(event, extra=self.pending)
        if isinstance(event, StepDone):
            self.pending.clear()
        return [action for reactor in self.reactors for action in reactor.react(event)]

    def perform(self, action: Action) -> Event | None:
        """The action is done; what it brought about."""
        followed: Event | None = None
        if isinstance(action, Evaluate):
            followed = self._evaluate()
        elif isinstance(action, Save):
            followed = self._save()
        elif isinstance(action, Verify):
            followed = verified(self)
        elif isinstance(action, Replay):
            followed = replayed(self, action)
        elif isinstance(action, CopyState):
            copy_state(self)
        elif isinstance(action, Skip):
            self._skip_to(self.state.consumed + self.design.plan.sequences)
        elif isinstance(action, RollBack):
            self._roll_back(to=action.to)
        elif isinstance(action, Replan):
            replan(self, action.design)
            self.clock = time.perf_counter()
        elif isinstance(action, Examine | ProbeLinks):
            assert self.inquiries is not None, "who is watched can be asked"
            followed = self.inquiries.answer(action)
        else:
            assert isinstance(action, Log), f"no run performs {action!r}"
            self.pending.update(action.values)
            if action.text and self.observer is not None:
                self.observer.say(action.text)
        if self.observer is not None:
            self.observer.did(action, step=self.state.step)
        if followed is not None:
            self.clock = time.perf_counter()
        return followed

    def restore(self, checkpoint: Checkpoint, *, past: int | None = None) -> None:
        """The run stands where `checkpoint` stands; its data goes on from sequence `past` where that is given."""
        design = of_checkpoint(self.design, checkpoint)
        if design is not self.design:
            lay_again(self, design)
        outer, state = self.outer, self.laid_state()
        if outer is None:
            saved = self.store.load(checkpoint, state)
        elif outer.goes_on_from(checkpoint.manifest.state.get("learners")):
            saved = self.store.load(checkpoint, loaded(state, outer, step=checkpoint.step))
            outer.settle()
        else:
            saved = self.store.load(checkpoint, state)
            outer.begin(checkpoint.step)
        self.stand(saved, past=past)

    def stand(self, progress: Mapping[str, Any], *, past: int | None = None) -> None:
        """All but tensors is as `progress` tells; its data goes on from sequence `past` where that is given."""
        self.state.load(progress)
        self.usual.load(progress.get("usual", {}))
        self.loss_scale.load(progress.get("loss_scale", {}))
        for technique in self.techniques:
            technique.load_state_dict(progress["techniques"].get(technique.name, {}))
        self.ledger = Ledger.of(progress.get("ledger"), consumed=self.state.consumed)
        if past is not None:
            self._skip_to(past)
        self.loader.close()
        self.loader = self.feed.loader(self.corpus, consumed=self.state.consumed)

    def progress(self) -> dict[str, Any]:
        """All but tensors of where the run stands; what ranks have read is gathered before."""
        return {
            **self.state.to_dict(),
            "ledger": self.ledger.to_dict(),
            "usual": self.usual.to_dict(),
            "loss_scale": self.loss_scale.to_dict(),
            "techniques": {technique.name: technique.state_dict() for technique in self.techniques},
            "learners": {} if self.outer is None else self.outer.told(),
        }

    def start_from(self, folder: Path) -> None:
        """The run stands at step 0 with the weights of a Hugging Face folder."""
        self.store.start(
            folder, state_of(self.design, learners=self.learners, laid=self.laid, contents=Contents.PARAMETERS)
        )
        if self.outer is not None:
            self.outer.begin(0)

    def stop(self, ending: Ending) -> Stopping:
        return Stopping(step=self.state.step, ending=ending)

    def close(self) -> None:
        """Every checkpoint that was begun is committed, and no thread of the run is left."""
        self.store.close()
        self.loader.close()

    def laid_state(self) -> State:
        """All that a plan lays: what is saved, loaded and moved."""
        return state_of(self.design, learners=self.learners, laid=self.laid, optimizer=self.optimizer)

    def _learning_rate(self) -> float:
        """That of the next step, as the job has it and as techniques scale it."""
        step, job = self.state.step, self.design.job
        peak = job.optimizer.learning_rate
        rate = learning_rate(step, shape=job.learning_rate, peak=peak, total_steps=job.total_steps)
        return rate * math.prod(scale(step) for scale in self.rate_scales)

    def _skip_to(self, past: int) -> None:
        self.ledger.skip(self.state.consumed, past)
        self.state.consumed = past

    def _roll_back(self, *, to: int | None) -> None:
        self.marker.mark(step=self.state.step, section=Section.RESTORE)
        if to is not None:
            self.restore(self.store.of_step(to))
        elif self.store.newest(partial(self.restore, past=self.state.consumed + self.design.plan.sequences)) is None:
            raise ConfigError(self.store.skipped or (Problem(what="there is no checkpoint to roll back to"),))
        self.clock = time.perf_counter()

    def _spoilt(self, number: int, known: Known) -> StepSpoilt:
        if self.outer is None:
            self.laid.undo()
        state_finite = self._is_finite()
        agreed = self._agree(None)
        return StepSpoilt(
            step=number,
            loss=known.loss,
            grad_norm=known.norm,
            num_targets=known.num_targets,
            state_finite=state_finite,
            unusual=known.unusual,
            stop_asked=agreed.stop,
        )

    def _evaluate(self) -> Evaluated | None:
        if self.corpus.validation is None:
            return None
        self.marker.mark(step=self.state.step, section=Section.EVALUATE)
        tokens = self.design.job.evaluation.tokens
        with nullcontext() if self.outer is None else self.outer.as_one():
            judge = self.laid if self.outer is None else self.outer
            found = validate(
                judge, held_out=self.corpus.validation, feed=self.feed, tokens=tokens, beat=self.marker.beat
            )
        return Evaluated(
            step=self.state.step,
            tokens=self.state.tokens,
            loss=found.loss,
            bits_per_byte=found.bits_per_byte,
            num_sequences=found.num_sequences,
            seconds=found.seconds,
        )

    def _is_finite(self) -> bool:
        return self.laid.is_finite() if self.outer is None else self.outer.is_finite()

    def _unsaved(self) -> Problem:
        newest = self.store.committed()
        kept = "no checkpoint was saved before" if newest is None else f"step {newest.step} is saved"
        return Problem(
            what=f"parameters are not finite after step {self.state.step}, and are not saved",
            where=f"step {self.state.step}",
            why=f"the step's update was too large, though its loss and gradients are numbers; {kept}",
            fix="a lower learning rate, or clip the gradient norm",
        )

    def _save(self) -> Saved:
        self.marker.mark(step=self.state.step, section=Section.SAVE)
        if not self._is_finite():
            raise WorkerFailed(self._unsaved())
        if self.outer is not None:
            self.outer.check(self.state.step)
            self.loss_scale.meet(self.outer, device=self.feed.device)
        self.ledger.gather(self.learners, self.outer, device=self.feed.device)
        state = self.laid_state() if self.outer is None else saved(self.laid_state(), self.outer)
        pace = statistics.median(self.paces) if self.paces else 0.0
        took = self.store.save(state, step=self.state.step, progress=self.progress(), step_seconds=pace)
        return Saved(
            step=self.state.step,
            seconds=took.stall_seconds,
            write_seconds=took.write_seconds,
            step_seconds=took.step_seconds,
        )

    @contextmanager
    def _observed(self, number: int) -> Iterator[None]:
        self.spans.begin(number)
        with self.profiler.step(number):
            yield
        self.spans.end()

    def known(self, loss: torch.Tensor, norm: torch.Tensor, num_targets: torch.Tensor | int) -> Known:
        """Read from the device in one transfer."""
        values = (loss, norm, torch.as_tensor(num_targets, device=loss.device))
        found = torch.stack([value.detach().to(torch.float64).reshape(()) for value in values]).tolist()
        unusual = self.usual.unusual(loss=found[0], norm=found[1])
        return Known(loss=found[0], norm=found[1], num_targets=int(found[2]), unusual=unusual)

    def _agree(self, load: torch.Tensor | None) -> Agreed:
        """What all ranks of a learner know after a step."""
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        whole, waited = self.log.step_seconds() if self.log is not None else (None, 0.0)
        mine = Told(
            stop=self.stop_asked(),
            change=self.membership is not None and self.membership.change_asked(),
            memory_bytes=self.memory_bytes(),
            seconds=seconds,
            input_seconds=self.profiler.seconds_in(LineName.INPUT),
            whole_seconds=whole,
            waited_seconds=waited,
            writing=self.store.writing,
        )
        agreed = agree(mine, load, group=self.learners.mesh.everyone, device=self.feed.device)
        self.asked, self.changing = agreed.stop, agreed.change
        self.paces.append(agreed.seconds)
        return agreed
