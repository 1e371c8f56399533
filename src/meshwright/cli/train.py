"""`meshwright train`: run a plan on this machine, or design one first; stop and resume at will."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshwright.run.choose import Chosen
    from meshwright.run.launching.ask import Ask
    from meshwright.run.outcome import Outcome
    from meshwright.run.screen import Screen
    from meshwright.spec.plan import Design


def train(
    plan: Annotated[Path | None, typer.Argument(help="A design from `meshwright plan --out`, or a run.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Without a plan: what to train.")] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", help="Without a plan: local, or local:4. [default: local]")
    ] = None,
    job: Annotated[Path | None, typer.Option("--job", "-j", help="A job file; see docs/job.md.")] = None,
    data: Annotated[list[Path] | None, typer.Option("--data", "-d", help="Text to train on. Repeatable.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", "-s", help="Set one field: job.batch_tokens=4Ki. Repeatable.")
    ] = None,
    run: Annotated[Path | None, typer.Option("--run", "-r", help="The run directory.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of --run.")] = False,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Train this many steps now.")] = None,
    stop_after: Annotated[
        str | None, typer.Option("--stop-after", help="Save and stop, with exit code 75, after so long: 55min, 20h.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine again first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as one JSON document.")] = False,
) -> int:
    """Train on this machine: a plan, or one designed now. Ctrl-C saves and ends with exit code 75."""
    from meshwright.cli.output import duration, note, print_json, print_wrapped
    from meshwright.run.choose import run_dir_of
    from meshwright.run.train import train as run_training

    stop_seconds = duration(stop_after, where="--stop-after")
    chosen = _chosen(
        plan=plan, model=model, cluster=cluster, job=job, data=data, sets=sets, run=run, resume=resume, steps=steps,
        measure=measure,
    )  # fmt: skip
    folder = run_dir_of(chosen.design, run=run, given=plan, resume=resume)
    for line in _before(chosen, folder):
        note(line)
    outcome = run_training(
        chosen.design,
        run_dir=folder,
        resume=resume,
        steps=steps,
        stop_after=stop_seconds,
        say=note,
        decision=chosen.decision,
        screen=_screen(),
    )
    if as_json:
        print_json(outcome)
    else:
        print_wrapped(_after(outcome))
    return int(outcome.exit_code)


def train_here(design: Design, ask: Ask, *, show: Callable[[str], None]) -> int:
    """As `meshwright train` of what is asked; the exit code. What the run came to is shown."""
    from meshwright import search
    from meshwright.cli.output import note
    from meshwright.run.train import train as run_training

    outcome = run_training(
        design,
        run_dir=ask.run,
        resume=ask.resume,
        stop_after=ask.time_seconds,
        say=note,
        decision=search.read_decision(Path(ask.plan), plan=design.plan),
        screen=_screen(),
    )
    for line in _after(outcome):
        show(line)
    return int(outcome.exit_code)


def _chosen(
    *,
    plan: Path | None,
    model: str | None,
    cluster: str | None,
    job: Path | None,
    data: list[Path] | None,
    sets: list[str] | None,
    run: Path | None,
    resume: bool,
    steps: int | None,
    measure: bool,
) -> Chosen:
    from meshwright import catalog, search
    from meshwright.cli.output import note, warn_of_idle
    from meshwright.run.choose import LOCAL, Chosen, choose, with_data, with_length
    from meshwright.search.fields import of_cluster, set_cluster
    from meshwright.spec.errors import ConfigError, Gathering, Problem
    from meshwright.spec.job import JobSpec

    given = plan or (run if resume and model is None else None)
    if given is not None:
        _refuse_what_it_has(plan, given, (model, cluster, job, data or None), measure=measure)
        design = catalog.load_design(given, sets=sets or ())
        warn_of_idle(design.job, None, sets=sets or ())
        return Chosen(design=design, decision=search.read_decision(given, plan=design.plan))
    if model is None:
        fix = "meshwright train PLAN.json, or --model NAME --data FILE; meshwright models lists the names"
        raise ConfigError(Problem(what="nothing to train is named", fix=fix))
    gathered = Gathering()
    named = LOCAL if cluster is None else cluster
    spec = gathered.attempt(lambda: catalog.load_model(model))
    machines = gathered.attempt(lambda: catalog.load_cluster(named))
    machine_sets = of_cluster(sets or ())
    job_sets = [each for each in sets or () if each not in machine_sets]
    loaded = gathered.attempt(lambda: catalog.load_job(str(job) if job else None, sets=job_sets))
    if spec is not None and machines is not None:
        asked_of = search.Question(model=spec, cluster=machines, job=loaded or JobSpec())
        gathered.attempt(lambda: set_cluster(asked_of, machine_sets))
    gathered.tell()
    assert loaded is not None
    asked = with_length(with_data(loaded, data or ()), steps=steps)
    warn_of_idle(asked, str(job) if job else None, sets=job_sets)
    return choose(model, cluster=named, job=asked, measure=measure, say=note, cluster_sets=machine_sets)


def _refuse_what_it_has(plan: Path | None, given: Path, said: tuple[object, ...], *, measure: bool) -> None:
    """Raises ConfigError where anything is `said` that the plan or the run `given` has, or no such run is there."""
    from meshwright.spec.errors import ConfigError, Problem

    problems = []
    if any(each is not None for each in said):
        fix = "leave those out, or leave the plan out to design another"
        if plan is None:
            fix = f"leave those out, or go on with another plan: train PLAN --run {shlex.quote(str(given))} --resume"
        what = "a plan has its model, cluster, job and data already"
        problems.append(Problem(what=what, where=str(given), fix=fix))
    if measure:
        fix = "leave it out; meshwright cluster measure is for plans to come"
        problems.append(Problem(what="a plan that is there stays as it is", where="--measure", fix=fix))
    if plan is None and not given.exists():
        fix = "--run names the directory of the run that is to go on; leave out --resume to begin one"
        problems.append(Problem(what="no such run", where=str(given), fix=fix))
    if problems:
        raise ConfigError(problems)


def _screen() -> Screen:
    """What is seen of the workers, as the command was asked to speak."""
    from meshwright.cli.manner import manner
    from meshwright.run.screen import Screen

    asked = manner()
    return Screen.QUIET if asked.quiet else Screen.VERBOSE if asked.verbose else Screen.NORMAL


def _before(chosen: Chosen, folder: Path) -> list[str]:
    """What is about to run and why."""
    from meshwright.spec.units import format_count

    design = chosen.design
    lines = [
        f"plan {design.plan.digest()}: {design.plan.describe()}",
        f"model {design.model.name}: {format_count(design.model.parameters)} parameters; run {folder}",
    ]
    return lines + [f"  {reason}" for reason in (chosen.decision.why if chosen.decision else ())]


def _after(outcome: Outcome) -> list[str]:
    """How it ended, predicted against measured, and what can be done with the run."""
    from meshwright import report
    from meshwright.spec.errors import ExitCode
    from meshwright.train.observe.incidents import incidents_of

    ended, lines = outcome.ended, list[str]()
    if outcome.measured is not None:
        lines += ["", *report.explain(outcome.run_dir).lines(ways=False)]
    lines += ["", f"step {ended.step} of {ended.total_steps} is done and saved in {outcome.run_dir}"]
    if ended.validation_loss is not None and ended.bits_per_byte is not None:
        figures = f"validation loss {ended.validation_loss:.4f}, bits per byte {ended.bits_per_byte:.4f}"
        lines += [f"{figures} after step {ended.validation_step}"]
    if outcome.goodput is not None:
        lines += report.goodput_lines(outcome.goodput)
    lines += [report.incident_lines(incident)[0] for incident in incidents_of(Path(outcome.run_dir))]
    if ended.step < ended.total_steps:
        lines += [f"go on:     {outcome.resume_command}"]
    if outcome.exit_code is ExitCode.OK:
        run = shlex.quote(str(outcome.run_dir))
        lines += [f"explain:   meshwright explain {run}", f"page:      meshwright report {run}"]
    return lines
