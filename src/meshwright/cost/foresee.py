"""What a plan's run would come to on a fleet that fails as published ones do: simulated, with when to save and how many
spares to hold."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.catalog.failure_mix import Mix
from meshwright.cost.faults import RETURN_SECONDS, SEEDS, SLOW_SECONDS, Advice, Fleet, Saves, advise, troubles_of
from meshwright.cost.goodput import RESTART_SECONDS, save
from meshwright.cost.predict import predict
from meshwright.spec.cluster import MOST_DEVICES
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.plan import Design
from meshwright.spec.units import format_seconds

LLAMA3_DAYS = 54.0
REPAIR_HOURS = RETURN_SECONDS / 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """`devices` for `days`, which fail once in `seconds_between_failures` in the way of `mix`: what is simulated of
    them. `closed_form` is the useful share by Daly's formula, in which all failures are alike and nodes never lack."""

    devices: int
    days: float
    mix: str
    source: str
    seconds_between_failures: float
    closed_form: float
    advice: Advice
    assumed: tuple[str, ...]
    schema: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """All of a design that a simulation reads; `hours_between_failures` are of its `devices` together, the seconds of
    its checkpoint and of a restart as in an Outlook."""

    step_seconds: float
    stall_seconds: float
    write_seconds: float
    restart_seconds: float
    hours_between_failures: float
    devices: int
    devices_per_node: int
    every_steps: int
    peer_timeout_seconds: float


def what_is_read(design: Design) -> Read:
    """What a simulation of the design reads of it. Raises ConfigError where nobody says how often its devices fail."""
    predicted = predict(design)
    outlook = predicted.outlook
    if outlook is None or not outlook.hours_between_failures:
        fix = "plan with --set cluster.groups.0.device.hours_between_failures=50000"
        raise ConfigError(Problem(what="how often these devices fail is not known", where="cluster", fix=fix))
    return Read(
        step_seconds=predicted.step_seconds,
        stall_seconds=outlook.stall_seconds,
        write_seconds=outlook.write_seconds,
        restart_seconds=outlook.restart_seconds,
        hours_between_failures=outlook.hours_between_failures,
        devices=design.plan.world_size,
        devices_per_node=design.cluster.groups[0].devices_per_node,
        every_steps=design.job.checkpoint.every_steps,
        peer_timeout_seconds=design.job.peer_timeout_seconds,
    )


def foresee(
    design: Design,
    *,
    mix: Mix,
    devices: int | None = None,
    days: float = LLAMA3_DAYS,
    spares: int | None = None,
    repair_hours: float = REPAIR_HOURS,
    seed: int = 0,
    seeds: int = SEEDS,
) -> Foreseen:
    """The step, the checkpoint and the failure rate of a device are those of the design; `devices` are those of its
    plan where they are not said. Raises ConfigError where nobody says how often the devices fail, and for numbers that
    mean nothing."""
    read = what_is_read(design)
    _check(devices=devices, days=days, spares=spares, repair_hours=repair_hours, seed=seed)
    count = devices or read.devices
    between = 3600.0 * read.hours_between_failures * read.devices / count
    best = save(
        step_seconds=read.step_seconds,
        stall_seconds=read.stall_seconds,
        write_seconds=read.write_seconds,
        restart_seconds=read.restart_seconds,
        seconds_between_failures=between,
        every_steps=read.every_steps,
    )
    load_seconds = read.restart_seconds - RESTART_SECONDS
    nodes = math.ceil(count / read.devices_per_node)
    advice = advise(
        Fleet(nodes=nodes, seconds_between_failures=between, return_seconds=3600.0 * repair_hours),
        Saves(
            every_seconds=best.every_seconds,
            stall_seconds=read.stall_seconds,
            write_seconds=read.write_seconds,
        ),
        troubles_of(mix, peer_timeout_seconds=read.peer_timeout_seconds, load_seconds=load_seconds),
        seconds=86400.0 * days,
        spares=spares,
        seeds=seeds,
        seed=seed,
    )
    return Foreseen(
        devices=count,
        days=days,
        mix=mix.name,
        source=mix.source,
        seconds_between_failures=between,
        closed_form=best.goodput,
        advice=advice,
        assumed=_assumed(repair_hours),
    )


def _check(*, devices: int | None, days: float, spares: int | None, repair_hours: float, seed: int) -> None:
    problems = []
    if devices is not None and not 1 <= devices <= MOST_DEVICES:
        what = f"{devices:,} devices cannot be simulated"
        problems.append(Problem(what=what, where="--devices", fix=f"from 1 to {MOST_DEVICES:,}"))
    if not 0.01 <= days <= 3650.0:
        problems.append(Problem(what=f"{days:g} days cannot be simulated", where="--days", fix="from 0.01 to 3650"))
    if spares is not None and spares < 0:
        problems.append(Problem(what=f"{spares} spares are fewer than none", where="--spares", fix="0, or more"))
    if not 0.0 <= repair_hours <= 8760.0:
        what = f"{repair_hours:g} hours are no time for a repair"
        problems.append(Problem(what=what, where="--repair-hours", fix="from 0 to 8760"))
    if seed < 0:
        problems.append(Problem(what=f"{seed} is below 0", where="--seed", fix="0, or more"))
    if problems:
        raise ConfigError(problems)


def _assumed(repair_hours: float) -> tuple[str, ...]:
    return (
        f"a failure is found and the run restarted in {format_seconds(RESTART_SECONDS)} and a read of the checkpoint; "
        "what hangs, after job.peer_timeout_seconds more",
        f"a broken node is back after {format_seconds(3600.0 * repair_hours)}",
        f"a slow node is found when it has cost {format_seconds(SLOW_SECONDS)}",
        "a checkpoint stalls and is written as long as of the plan's own devices",
    )
