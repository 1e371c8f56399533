"""What the run of a learner does where learners meet; when rounds that some may miss need all, and who came to them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.parallel.outer import Learners, Met, OuterSync, Round
from meshwright.spec.job import NonFinite
from meshwright.spec.plan import Design
from meshwright.train.known import Known

if TYPE_CHECKING:
    from meshwright.train.run import Run


def needs_all(design: Design, *, pause_at: int | None) -> Callable[[int, int], bool]:
    """Whether all learners do something together after one of the steps from the first to the last: they evaluate,
    save or compare their parameters, or the run ends or pauses."""
    job = design.job
    often = [n for n in (job.evaluation.every_steps, job.checkpoint.every_steps, job.verify.every_steps) if n]
    ends = [step for step in (job.total_steps, pause_at) if step is not None]

    def needed(first: int, last: int) -> bool:
        return any(last // every * every >= first for every in often) or any(first <= step <= last for step in ends)

    return needed


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFile:
    """Appends the rounds in which a learner met to `RUN/rounds/learner-00000.jsonl`, each as all that met know it."""

    path: Path
    learner: int
    learners: int

    @classmethod
    def of(cls, run_dir: Path, learners: Learners) -> RoundFile:
        path = run_dir / "rounds" / f"learner-{learners.index:05d}.jsonl"
        return cls(path=path, learner=learners.index, learners=learners.count)

    def note(self, found: Round, *, step: int) -> None:
        """`found` ended at `step`."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **found.to_dict()}) + "\n")

    def lines(self, found: Round, *, step: int) -> Iterator[str]:
        """Who missed the round that ended at `step`, and who was late and takes what all go from."""
        missing = [str(each) for each in range(self.learners) if each not in found.arrivals]
        if missing:
            names = f"learner{'s' * (len(missing) > 1)} {', '.join(missing)}"
            yield f"step {step}  {len(found.members)} of {self.learners} learners met, without {names}"
        for each in found.members:
            late = found.late(each)
            if late:
                steps, weight = found.arrivals[each].steps, (1.0 + late) ** -0.5
                rounds = f"round{'s' * (late > 1)}"
                learnt = f"what it learnt in {steps} steps counts {weight:.2f} each"
                yield f"step {step}  learner {each} comes {late} {rounds} late: {learnt}, and it takes the newer state"


def meet(run: Run, outer: OuterSync, number: int, *, known: Known) -> Met | None:
    """What learners told each other after step `number`, where they did; what that step gave is `known`, and is undone
    where it is not sound."""
    run.dropped_in_a_row = 0 if known.sound else run.dropped_in_a_row + 1
    if not known.sound:
        run.laid.undo()
    spec = run.design.job.non_finite
    borne = spec.policy is NonFinite.SKIP and run.dropped_in_a_row <= spec.most_in_a_row
    spoilt = not known.sound and not borne
    met = outer.after_step(number, stop=run.asked, change=run.changing, spoilt=spoilt)
    if outer.quorum is not None and met is not None and run.log is not None:
        # Who speaks for its learner waits for others where no collective is, and is not slow for that.
        run.log.held(time.perf_counter() - outer.quorum.waited_seconds)
    if met is not None and met.changed is not None and run.observer is not None:
        every = met.changed.every
        run.observer.say(f"learners meet every {every} steps from here on, as what they send takes now")
        run.observer.note({"round_steps": every}, step=number)
    return met


def leave_out(run: Run, found: Round) -> None:
    """The run stands where round `found` ended; of steps until there that this learner has not done its share is
    dropped."""
    assert run.outer is not None
    assert run.rounds is not None
    plan, ended = run.design.plan, run.outer.told_at
    while run.state.step < ended:
        rows = next(run.loader)
        run.ledger.note(rows.fingerprint, dropped=run.feed.rows)
        run.state.advance(sequences=plan.batch, tokens=plan.batch_tokens)
    if run.learners.mesh.rank == 0:
        run.rounds.note(found, step=ended)
    if run.observer is not None:
        for line in run.rounds.lines(found, step=ended):
            run.observer.say(line)
