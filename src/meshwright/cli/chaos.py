"""`meshwright chaos`: do faults to a run and show what it lost by them, or simulate them on a fleet."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from meshwright.cost.foresee import Foreseen
    from meshwright.spec.chaos import Chaos
    from meshwright.spec.faults import Fault, FaultKind
    from meshwright.spec.plan import Design

Many = list[str] | None
_WHEN = "Repeatable."


def chaos(
    plan: Annotated[Path, typer.Argument(help="A design from `meshwright plan --out`, or a run to go on with.")],
    run: Annotated[Path | None, typer.Option("--run", "-r", help="The run directory; a run's own without.")] = None,
    sets: Annotated[Many, typer.Option("--set", "-s", help=f"Set one field: job.seed=1. {_WHEN}")] = None,
    kill: Annotated[Many, typer.Option("--kill", help=f"rank=2@step=40, or rank=all@save. {_WHEN}")] = None,
    hang: Annotated[Many, typer.Option("--hang", help=f"rank=1,seconds=5@step=40. {_WHEN}")] = None,
    slow: Annotated[Many, typer.Option("--slow", help=f"rank=1,factor=1.5,steps=20@step=40. {_WHEN}")] = None,
    corrupt: Annotated[Many, typer.Option("--corrupt", help=f"part=tensors@step=40. {_WHEN}")] = None,
    disk_full: Annotated[Many, typer.Option("--disk-full", help=f"@save, or seconds=5@step=40. {_WHEN}")] = None,
    partition: Annotated[Many, typer.Option("--partition", help=f"seconds=5@step=40; needs root. {_WHEN}")] = None,
    preempt: Annotated[Many, typer.Option("--preempt", help=f"SIGTERM: @seconds=30, or @start. {_WHEN}")] = None,
    faults: Annotated[int, typer.Option("--faults", min=0, help="So many random faults more.")] = 0,
    every: Annotated[
        float | None, typer.Option("--every", help="Mean seconds of training between random faults. [default: 10]")
    ] = None,
    mix: Annotated[str, typer.Option("--mix", help="Which faults are random: llama3 or even.")] = "llama3",
    seed: Annotated[int, typer.Option("--seed", help="The same seed draws the same faults.")] = 0,
    against: Annotated[
        Path | None, typer.Option("--against", help="The undisturbed run. [default: RUN-undisturbed]")
    ] = None,
    reference: Annotated[
        bool | None,
        typer.Option("--reference/--no-reference", help="Compare with an undisturbed run. [default: reference]"),
    ] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Run nothing: simulate a fleet under the mix.")] = False,
    devices: Annotated[int | None, typer.Option("--devices", help="Simulated devices. [default: the plan's]")] = None,
    days: Annotated[float | None, typer.Option("--days", help="Simulated days. [default: 54]")] = None,
    spares: Annotated[int | None, typer.Option("--spares", help="Simulated spare nodes. [default: the best]")] = None,
    repair_hours: Annotated[
        float | None, typer.Option("--repair-hours", help="Until a simulated node is back. [default: 24]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Do faults to a run, start it again as a person would, and show that nothing was lost; or simulate a fleet."""
    from meshwright.spec.errors import ExitCode
    from meshwright.spec.faults import FaultKind

    said = dict(zip(FaultKind, (kill, hang, slow, corrupt, disk_full, partition, preempt), strict=True))
    drawn = _Drawn(faults=faults, every_seconds=10.0 if every is None else every, mix=mix, seed=seed)
    if simulate:
        _refuse_faults(said, faults)
        _refuse_training(
            {
                "--run": run,
                "--every": every,
                "--against": against,
                f"--{'' if reference else 'no-'}reference": reference,
            }
        )
        _show_fleet(
            _foresee(plan, drawn, sets=sets or (), devices=devices, days=days, spares=spares, hours=repair_hours),
            as_json=as_json,
        )
        return int(ExitCode.OK)
    _refuse_fleet({"--devices": devices, "--days": days, "--spares": spares, "--repair-hours": repair_hours})
    found = _train(plan, run, said, drawn, sets=sets or (), against=against, reference=reference is not False)
    _show(found, as_json=as_json)
    return int(ExitCode.OK if found.is_sound else ExitCode.NO_PLAN)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """Random faults as they are asked for."""

    faults: int
    every_seconds: float
    mix: str
    seed: int


def _train(
    plan: Path,
    run: Path | None,
    said: Mapping[FaultKind, Many],
    drawn: _Drawn,
    *,
    sets: Sequence[str],
    against: Path | None,
    reference: bool,
) -> Chaos:
    from meshwright import catalog
    from meshwright.cli.output import note, warn_of_idle
    from meshwright.run.chaos.chaos import chaos as train_under_faults
    from meshwright.run.chaos.record import read_chaos
    from meshwright.run.choose import default_run_dir
    from meshwright.spec.errors import ConfigError, Problem

    if against is not None and not reference:
        raise ConfigError(Problem(what="a run to compare with, and none", where="--against", fix="leave one out"))
    design = catalog.load_design(plan, sets=sets)
    faults = _faults(design, said, drawn)
    folder = run or (plan if plan.is_dir() else default_run_dir(design))
    if not faults and (folder != plan or read_chaos(folder) is None):
        raise ConfigError(Problem(what="no fault is asked for", fix="--kill rank=0@step=10, or --faults 10"))
    warn_of_idle(design.job, None, sets=sets)
    if not design.job.checkpoint.on_the_way:
        note("nothing is saved on the way: every start begins at step 0; job.checkpoint.every_steps says how often")
    beside = against or folder.with_name(f"{folder.name}-undisturbed")
    against = beside if reference else None
    return train_under_faults(plan, run_dir=folder, faults=faults, against=against, sets=sets, say=note)


def _faults(design: Design, said: Mapping[FaultKind, Many], drawn: _Drawn) -> tuple[Fault, ...]:
    """Those that were said and those that are drawn. Raises ConfigError with all that is wrong with any of them."""
    from functools import partial

    from meshwright.catalog.failure_mix import load_mix
    from meshwright.lab.fabric import unfit
    from meshwright.run.chaos.soak import draw
    from meshwright.spec.errors import Gathering
    from meshwright.spec.faults import check_faults, read_fault

    gathered = Gathering()
    read = [gathered.attempt(partial(read_fault, kind, text)) for kind, texts in said.items() for text in texts or ()]
    mix = gathered.attempt(lambda: load_mix(drawn.mix))
    gathered.tell()
    assert mix is not None
    found, uncut = [fault for fault in read if fault is not None], unfit()
    if drawn.faults:
        found += draw(
            mix,
            faults=drawn.faults,
            seed=drawn.seed,
            ranks=design.plan.world_size,
            every_seconds=drawn.every_seconds,
            patience_seconds=design.job.peer_timeout_seconds,
            can_cut=not uncut,
        )
    job = design.job
    check_faults(found, ranks=design.plan.world_size, steps=job.total_steps, kept=job.checkpoint.keep, can_cut=uncut)
    return tuple(found)


def _show(found: Chaos, *, as_json: bool) -> None:
    from meshwright.cli.output import console, note, print_json
    from meshwright.report import terminal_chaos

    if as_json:
        print_json(found.told())
        return
    for view in terminal_chaos.chaos(found):
        console().print(view)
    if (Path(found.run) / "design.json").is_file():
        note(f"page: meshwright report {shlex.quote(found.run)}")


def _refuse_faults(said: Mapping[FaultKind, Many], faults: int) -> None:
    from meshwright.spec.errors import ConfigError, Problem

    if faults or any(said.values()):
        fix = "leave the faults out: --mix says which are simulated, and the cluster how often"
        raise ConfigError(Problem(what="a simulation is of a mix, not of faults one by one", fix=fix))


def _refuse_training(said: Mapping[str, object]) -> None:
    _refuse(said, what="is of a run that is trained", fix="leave it out, or --simulate")


def _refuse_fleet(said: Mapping[str, object]) -> None:
    _refuse(said, what="is of a simulated fleet", fix="leave it out, or simulate a fleet with --simulate")


def _refuse(said: Mapping[str, object], *, what: str, fix: str) -> None:
    """Raises ConfigError with every option that was given."""
    from meshwright.spec.errors import ConfigError, Problem

    if given := [option for option, value in said.items() if value is not None]:
        raise ConfigError([Problem(what=what, where=option, fix=fix) for option in given])


def _foresee(
    plan: Path,
    drawn: _Drawn,
    *,
    sets: Sequence[str],
    devices: int | None,
    days: float | None,
    spares: int | None,
    hours: float | None,
) -> Foreseen:
    from meshwright import catalog, search
    from meshwright.catalog.failure_mix import load_mix
    from meshwright.cost.foresee import LLAMA3_DAYS, REPAIR_HOURS, foresee
    from meshwright.spec.errors import ConfigError

    design, mix = catalog.load_design(plan, sets=sets), load_mix(drawn.mix)
    if problems := search.check_answer(design, scopes=frozenset({search.Scope.PLAN})):
        raise ConfigError(problems)
    _warn_of_unread(plan, design, sets=sets)
    return foresee(
        design,
        mix=mix,
        devices=devices,
        days=LLAMA3_DAYS if days is None else days,
        spares=spares,
        repair_hours=REPAIR_HOURS if hours is None else hours,
        seed=drawn.seed,
    )


def _warn_of_unread(plan: Path, design: Design, *, sets: Sequence[str]) -> None:
    """Warns of what the job says that does nothing, and of each of `sets` that the simulation would be the same
    without."""
    from meshwright import catalog
    from meshwright.cli.output import tell, warn_of_idle
    from meshwright.cost.foresee import what_is_read
    from meshwright.spec.errors import ConfigError, Problem

    warn_of_idle(design.job, None, sets=sets)
    read = what_is_read(design)
    for place, entry in enumerate(sets):
        try:
            without = catalog.load_design(plan, sets=[*sets[:place], *sets[place + 1 :]])
            unread = what_is_read(without) == read
        except ConfigError:
            continue  # the others rest on it
        if unread:
            what = "changes nothing of the step, its checkpoints and failures, of which a simulation is"
            tell(f"warning: {Problem(what=what, where=f'--set {entry}', fix='leave it out')}")


def _show_fleet(found: Foreseen, *, as_json: bool) -> None:
    from meshwright.cli.output import console, print_json
    from meshwright.report import terminal_chaos

    if as_json:
        print_json(found)
        return
    for view in terminal_chaos.foreseen(found):
        console().print(view)
