"""train: check everything, launch local workers, and say how the run ended. The parent of every local run."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright import cost, data, search
from meshwright.run import preflight
from meshwright.run.claim import claimed
from meshwright.run.environment import environment
from meshwright.run.files import load_design, write_json
from meshwright.run.machine import cache_root, this_machine
from meshwright.run.outcome import Ended, Outcome, ended_path, read_ended, read_report
from meshwright.run.resume import going_on, is_done, nothing_left
from meshwright.run.screen import Screen
from meshwright.spec.errors import ConfigError, ExitCode, Problem, WorkerFailed
from meshwright.spec.goodput import Mark, Moment
from meshwright.spec.job import Interval
from meshwright.spec.paths import expanded
from meshwright.spec.plan import Design
from meshwright.spec.report import Report
from meshwright.spec.units import format_bytes
from meshwright.train.events import Ending
from meshwright.train.interval import predicted_costs
from meshwright.train.observe.timekeeper import first_line, goodput_of, note
from meshwright.train.observe.timekeeper import launched as launched_mark

if TYPE_CHECKING:
    from meshwright.run.launch import Launched

Say = Callable[[str], None]
_PROGRESS_SECONDS = 5.0


def train(
    design: Design,
    *,
    run_dir: Path | str,
    resume: bool = False,
    steps: int | None = None,
    stop_after: float | None = None,
    say: Say | None = None,
    decision: search.Decision | None = None,
    screen: Screen = Screen.NORMAL,
) -> Outcome:
    """The run in `run_dir` is trained to its end, or for `steps` more steps, or until a signal or for `stop_after`
    seconds from now, both of which save it; how it ended.

    A run that goes on (`resume`) may have another plan and another length, and keeps the order of its data; where no
    step is left to train, its folder stays as it is. `say` is
    given the lines a person should see before the workers write their own; None writes them to standard error. The
    run keeps `decision`, which chose the design, beside it. `screen` says what is seen of the workers.

    Raises before anything starts: ConfigError, NoPlanFits or EnvironmentUnfit with every problem found. Raises
    WorkerFailed with the first failing rank's own error when workers fail; checkpoints that were complete stay.
    """
    say, began, folder = say or _to_stderr, time.time(), expanded(run_dir)
    design = with_absolute_paths(design)
    preflight.check_design(design)
    preflight.check_run_dir(design, run_dir=folder, resume=resume)
    if resume:
        if done := nothing_left(folder, design):
            return _as_it_was(folder, done, design, say=say)
        for line in going_on(folder, design):
            say(line)
    predicted = cost.predict(design)
    if design.job.checkpoint.interval is Interval.GOODPUT:
        predicted_costs(predicted)
    preflight.check_machine(design, predicted=predicted, run_dir=folder)
    if steps is not None and steps < 1:
        raise ConfigError(Problem(what=f"{steps} steps", where="--steps", fix="ask for at least one"))
    corpus = data.prepare(
        design.job.data,
        sequence_length=design.plan.sequence_length,
        seed=design.job.seed,
        cache=cache_root() / "data",
        progress=progress_lines(say),
    )
    preflight.check_corpus(design, corpus, run_dir=folder)
    arguments = [] if steps is None else ["--steps", str(steps)]
    arguments += [] if stop_after is None else ["--stop-at", str(began + stop_after)]
    with claimed(folder, end=end_workers) as claim:
        write_design(design, folder, predicted=predicted, decision=decision)
        _write_surroundings(design, corpus, folder)
        note(folder, launched_mark(folder, plan=design.plan.digest(), at=began))
        try:
            launched = _launched(design, folder, arguments=arguments, say=say, screen=screen)
            outcome = _outcome(design, folder, predicted=predicted, launched=launched)
        except BaseException as error:
            if claim.lost is None:
                note(folder, Mark(what=Moment.ENDED, at=time.time(), why=first_line(error)))
            raise
        note(folder, outcome.ended.mark(at=time.time()))
    return replace(outcome, goodput=goodput_of(folder))


def end_workers() -> None:
    """No worker of this process is left, nor started again."""
    from meshwright.run.launch import end_at_once

    end_at_once()


def _launched(design: Design, run_dir: Path, *, arguments: Sequence[str], say: Say, screen: Screen) -> Launched:
    """How the workers ended, under one agent, or each under its own where ranks may be lost."""
    from meshwright.run.elastic.launch import launch_elastic
    from meshwright.run.launch import launch

    if design.job.elastic.by_torchft:
        from meshwright.run.torchft.launch import launch_replicas

        return launch_replicas(design, run_dir, arguments=arguments, say=say, screen=screen)
    if design.job.elastic.on:
        return launch_elastic(design, run_dir, arguments=arguments, say=say, screen=screen)
    ranks = [design.plan.rank_on(device) for device in range(design.plan.world_size)]
    patience = design.job.peer_timeout_seconds
    return launch(run_dir, ranks=ranks, arguments=arguments, say=say, screen=screen, patience_seconds=patience)


def with_absolute_paths(design: Design) -> Design:
    """The design with its data named from the root, so that it means the same wherever it is resumed."""
    spec = design.job.data
    sources = tuple(replace(source, path=str(expanded(source.path).absolute())) for source in spec.sources)
    tokenizer = expanded(spec.tokenizer)
    name = str(tokenizer.absolute()) if tokenizer.is_file() else spec.tokenizer
    start = design.job.start
    job = replace(design.job, start=str(expanded(start).absolute()) if start else "")
    return replace(design, job=replace(job, data=replace(spec, sources=sources, tokenizer=name)))


def write_design(design: Design, run_dir: Path, *, predicted: Report, decision: search.Decision | None) -> None:
    """`run_dir` has what workers read of a run that is begun, or goes on, by `design`; how it ended before is gone."""
    run_dir.mkdir(parents=True, exist_ok=True)
    ended_path(run_dir).unlink(missing_ok=True)
    for left in ("collectives", "stacks"):
        shutil.rmtree(run_dir / left, ignore_errors=True)
    _forget_another_plan(design, run_dir)
    write_json(run_dir / "design.json", design)
    write_json(run_dir / "predicted.json", predicted)
    if decision is not None:
        write_json(run_dir / "decision.json", decision)


def _write_surroundings(design: Design, corpus: data.Corpus, run_dir: Path) -> None:
    """What the run is trained on: the machine, and the text with its tokenizer."""
    write_json(run_dir / "environment.json", environment(design))
    write_json(
        run_dir / "corpus.json",
        {
            "digest": corpus.digest,
            "documents": corpus.num_documents,
            "text_bytes": corpus.text_bytes,
            "tokens": corpus.train.num_tokens,
            "vocab": corpus.tokenizer.vocab,
        },
    )
    (run_dir / "tokenizer.json").write_text(corpus.tokenizer.to_json(), encoding="utf-8")


def _forget_another_plan(design: Design, run_dir: Path) -> None:
    """What was decided and measured of a plan that this run was on before is gone."""
    path = run_dir / "design.json"
    if not path.is_file() or load_design(path).plan == design.plan:
        return
    for name in ("decision.json", "measured.json"):
        (run_dir / name).unlink(missing_ok=True)
    shutil.rmtree(run_dir / "spans", ignore_errors=True)


def _outcome(design: Design, run_dir: Path, *, predicted: Report, launched: Launched) -> Outcome:
    if launched.killed:
        raise _interrupted(run_dir)
    if launched.failures:
        raise failure_of(design, run_dir, predicted=predicted, launched=launched)
    remove_empty_logs(run_dir / "logs")
    ended = read_ended(run_dir)
    if ended is None:
        raise WorkerFailed(Problem(what="the workers ended and did not say how", where=str(run_dir)))
    measured = read_report(run_dir / "measured.json")
    return Outcome(run_dir=str(run_dir), plan=design.plan.digest(), ended=ended, predicted=predicted, measured=measured)


def _as_it_was(run_dir: Path, ended: Ended, asked: Design, *, say: Say) -> Outcome:
    """What the run in `run_dir`, which has no step left of what is `asked`, came to by the design that trained it."""
    say(str(is_done(run_dir, asked)))
    design = load_design(run_dir / "design.json")
    return Outcome(
        run_dir=str(run_dir),
        plan=design.plan.digest(),
        ended=replace(ended, ending=Ending.FINISHED, total_steps=asked.job.total_steps),
        predicted=read_report(run_dir / "predicted.json") or cost.predict(design),
        measured=read_report(run_dir / "measured.json"),
        goodput=goodput_of(run_dir),
    )


def failure_of(design: Design, run_dir: Path, *, predicted: Report, launched: Launched) -> WorkerFailed:
    """What the first of this machine's workers to fail says of it."""
    from meshwright.run import failure
    from meshwright.train.observe.inquest import inquest, stood_in
    from meshwright.train.observe.whereabouts import last_seen

    failures = failure.read(launched.failures, ended=launched.ended)
    if launched.asked_to_stop and failure.are_asked(failures):
        return _asked_too_early(run_dir)
    if not run_dir.is_dir():
        return _moved_away(run_dir)
    seen = {rank: last_seen(run_dir, rank) for rank in launched.failures}
    found = (*inquest(run_dir).sentences, *stood_in(run_dir, [each.rank for each in launched.stood]))
    return failure.told(
        failures,
        predicted_bytes=predicted.peak_bytes,
        machine_bytes=this_machine().memory_bytes,
        num_ranks=design.plan.world_size,
        last_seen={rank: at for rank, at in seen.items() if at and at.process == launched.failures[rank].pid},
        found=tuple(dict.fromkeys(found)),
        missing=launched.missing,
        stood=launched.stood,
    )


def _asked_too_early(run_dir: Path) -> WorkerFailed:
    """A worker that was asked to stop before it could hear it."""
    what, fix = "it was asked to stop before it had begun to train, and saved nothing new", "--resume goes on"
    error = WorkerFailed(Problem(what=what, where=str(run_dir), fix=fix))
    error.exit_code = ExitCode.SAVED
    return error


def _moved_away(run_dir: Path) -> WorkerFailed:
    """Nothing more could be written, nor why."""
    fix = "put it back, and --resume goes on; or --resume with --run and where it is now"
    error = WorkerFailed(Problem(what="the directory of the run is gone", where=str(run_dir), fix=fix))
    error.exit_code = ExitCode.ENVIRONMENT
    return error


def _interrupted(run_dir: Path) -> WorkerFailed:
    error = WorkerFailed(
        Problem(what="stopped at once", where=str(run_dir), fix="--resume goes on from the last complete checkpoint")
    )
    error.exit_code = ExitCode.INTERRUPTED
    return error


def remove_empty_logs(logs: Path) -> None:
    """Logs of workers that wrote nothing are gone."""
    for attempt in logs.iterdir() if logs.is_dir() else ():
        if attempt.is_dir() and not any(path.is_file() and path.stat().st_size for path in attempt.rglob("*")):
            shutil.rmtree(attempt, ignore_errors=True)
    if logs.is_dir() and not any(logs.iterdir()):
        logs.rmdir()


def progress_lines(say: Say) -> data.Progress:
    """Says what is prepared when it begins, and how far it is every few seconds."""
    told: dict[str, float] = {}

    def progress(what: str, done: float, total: float) -> None:
        now = time.monotonic()
        if now - told.get(what, -math.inf) >= _PROGRESS_SECONDS:
            say(f"{what}: {format_bytes(done)} of {format_bytes(total)}")
            told[what] = now

    return progress


def _to_stderr(line: str) -> None:
    """The line is on standard error, unless nobody reads it any more: that is no reason to stop training."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
