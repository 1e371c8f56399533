"""chaos: a run under faults from its start to its end, and what it lost by them, which is nothing where all is well."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from meshwright import catalog
from meshwright.cost.predict import predict
from meshwright.lab.fabric import Namespace
from meshwright.run.chaos.compare import compare
from meshwright.run.chaos.record import read_chaos, write_chaos
from meshwright.run.chaos.supervise import Supervisor, Trial
from meshwright.run.claim import check_free
from meshwright.run.files import load_design
from meshwright.run.machine import cache_root
from meshwright.run.outcome import is_finished
from meshwright.run.preflight import check_design, check_machine, check_run_dir, job_problems
from meshwright.run.signals import interrupted_by_signals
from meshwright.run.train import with_absolute_paths
from meshwright.spec.chaos import Chaos, Curve
from meshwright.spec.errors import ConfigError, MeshwrightError, Problem, WorkerFailed
from meshwright.spec.faults import Fault, FaultKind
from meshwright.spec.paths import expanded
from meshwright.spec.plan import Design
from meshwright.train.checkpoint.find import newest
from meshwright.train.observe.timekeeper import goodput_of

Say = Callable[[str], None]


def chaos(
    plan: Path, *, run_dir: Path, faults: Sequence[Fault], against: Path | None, say: Say, sets: Sequence[str] = ()
) -> Chaos:
    """The design at `plan`, or the run that is there, with `sets` in force, is trained in `run_dir` to its end under
    `faults`.

    It is started again whenever it ends as a person would start it again. `against` is a run of the same design that
    nothing is done to, trained after it unless it is there; None compares with nothing. What is found is in
    `RUN/chaos.json`, what launches said under `RUN/chaos`. A run that has a `chaos.json` is gone on with without
    `faults`: those that have not come yet still come.

    Faults are those that `check_faults` lets pass. Raises ConfigError where `run_dir` holds another run, or `against`
    does, where the run goes on already, where faults were done to it before and more are asked for, where the moment of
    one is over; and as `train` does where no launch could begin the job on this machine.
    """
    folder, given = expanded(run_dir).absolute(), expanded(plan).absolute()
    if (folder / "design.json").is_file() and given != folder:
        fix = f"meshwright chaos {shlex.quote(str(folder))} goes on with it; --run names another directory"
        raise ConfigError(Problem(what="this directory holds a run already", where=str(folder), fix=fix))
    check_free(folder)
    earlier = read_chaos(folder) if given == folder else None
    if earlier is not None and faults:
        fix = "without a fault it goes on with what was asked for then"
        raise ConfigError(Problem(what="chaos was done to this run before", where=str(folder), fix=fix))
    _check_moments(folder, faults)
    design = catalog.load_design(given, sets=sets)
    if not is_finished(folder):
        _check_launch(design, folder)
    with interrupted_by_signals():
        trial = _tried(given, folder, faults, earlier, design=design, sets=sets, say=say)
        found = _found(folder, trial, plan=design.plan.digest(), curve=earlier.curve if earlier else None, say=say)
        if against is not None and not trial.gave_up:
            write_chaos(folder, replace(found, interrupted=True))
            curve = compare(folder, _undisturbed(folder, expanded(against).absolute(), say=say))
            found = replace(found, curve=curve)
        write_chaos(folder, found)
    return found


def _check_launch(design: Design, folder: Path) -> None:
    """Raises as the first launch would refuse the job, its plan, this machine or the directory, before anything is
    done."""
    if problems := job_problems(design.job, model_vocab=design.model.vocab):
        raise ConfigError(problems)
    asked = with_absolute_paths(design)
    check_design(asked)
    check_run_dir(asked, run_dir=folder, resume=(folder / "design.json").is_file())
    check_machine(asked, predicted=predict(asked), run_dir=folder)


def _check_moments(run_dir: Path, faults: Sequence[Fault]) -> None:
    """Raises ConfigError with every fault whose moment is over in the run that is there."""
    if faults and is_finished(run_dir):
        fix = "--run names another directory"
        raise ConfigError(Problem(what="the run is finished, and no fault can come", where=str(run_dir), fix=fix))
    whole = newest(run_dir / "checkpoints").checkpoint
    done = 0 if whole is None else whole.step
    over = [fault for fault in faults if 0 < fault.moment.step <= done]
    if over:
        what, fix = f"the run goes on from step {done:,}, and that moment is over", "a later step"
        raise ConfigError([Problem(what=what, where=f"--{fault}", fix=fix) for fault in over])


def _tried(
    plan: Path,
    folder: Path,
    faults: Sequence[Fault],
    earlier: Chaos | None,
    *,
    design: Design,
    sets: Sequence[str],
    say: Say,
) -> Trial:
    """What became of the run, which is in its `chaos.json` however this ends."""
    asked = faults if earlier is None else earlier.missed
    with ExitStack() as stack:
        network = None
        if any(fault.kind is FaultKind.PARTITION for fault in asked):
            network = Namespace.make()
            stack.callback(network.end)
        supervisor = Supervisor(
            folder,
            lambda goes_on: _command(plan, folder, goes_on=goes_on, sets=sets),
            asked,
            design.plan.world_size,
            folder / "chaos",
            say,
            network,
            earlier,
        )
        try:
            return supervisor.settle() if is_finished(folder) else supervisor.run()
        finally:
            if (folder / "design.json").is_file():
                curve = earlier.curve if earlier else None
                write_chaos(folder, _unread(folder, supervisor.so_far(), plan=design.plan.digest(), curve=curve))


def _command(plan: Path, run_dir: Path, *, goes_on: bool, sets: Sequence[str] = ()) -> list[str]:
    given = ["--resume"] if goes_on else [str(plan)]
    words = [word for entry in sets for word in ("--set", entry)]
    return [sys.executable, "-m", "meshwright", "train", *given, "--run", str(run_dir), *words]


def _undisturbed(run_dir: Path, against: Path, *, say: Say) -> Path:
    """`against` is a run of the same design that has ended, trained now where it is not there."""
    known = against / "design.json"
    if known.is_file() and load_design(known) != load_design(run_dir / "design.json"):
        fix = "--against names another directory; one that is not there is trained"
        raise ConfigError(Problem(what="this run is of another design", where=str(against), fix=fix))
    if is_finished(against):
        return against
    say(f"training the same design undisturbed in {against}")
    trial = Supervisor(
        against,
        lambda goes_on: _command(run_dir / "design.json", against, goes_on=goes_on),
        (),
        0,
        against / "chaos",
        say,
    ).run()
    if trial.gave_up:
        raise WorkerFailed(Problem(what=f"the undisturbed run failed: {trial.gave_up}", where=str(against)))
    return against


def _found(run_dir: Path, trial: Trial, *, plan: str, curve: Curve | None, say: Say) -> Chaos:
    from meshwright.run.audit import audit

    read, problems = 0, tuple[Problem, ...]()
    try:
        audited = audit(run_dir, cache=cache_root() / "data", say=say)
        read, problems = audited.read, audited.problems
    except MeshwrightError as error:
        problems = error.problems
    unread = _unread(run_dir, trial, plan=plan, curve=curve)
    return replace(unread, goodput=goodput_of(run_dir), read=read, problems=problems, interrupted=False)


def _unread(run_dir: Path, trial: Trial, *, plan: str, curve: Curve | None) -> Chaos:
    """What became of the faults, before anybody looked at what the run lost by them."""
    return Chaos(
        run=str(run_dir),
        plan=plan,
        struck=trial.struck,
        missed=trial.missed,
        launches=trial.launches,
        wall_seconds=trial.seconds,
        undisturbed_seconds=trial.undisturbed_seconds,
        undisturbed_steps=trial.undisturbed_steps,
        gave_up=trial.gave_up,
        goodput=None,
        read=0,
        problems=(),
        curve=curve,
        interrupted=True,
    )
