"""What if: one or two figures taken through values, the job designed anew at each, and where the decision flips."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from meshwright.search import vary
from meshwright.search.candidate import TIE, Candidate, candidate, ordered_by
from meshwright.search.check import ANSWERS, check
from meshwright.search.constraints import Value
from meshwright.search.decide import Best
from meshwright.search.fields import Field, field_problems, find_field, with_field
from meshwright.search.rules import Scope
from meshwright.search.settings import differing
from meshwright.search.vary import Progress, Question
from meshwright.spec.codec import read_number
from meshwright.spec.errors import ConfigError, Gathering, Problem
from meshwright.spec.job import Objective
from meshwright.spec.plan import Design, Plan
from meshwright.spec.units import Measure, NotRead, format_bytes, format_count, format_seconds, parse_measure

Place = tuple[int, ...]
MOST_POINTS = 200
FORMS = "write PATH=1,2,4, PATH=10GB/s..100GB/s:4 or PATH=1..64*2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A field and the values it is taken through, with the words they are shown by."""

    field: Field
    values: tuple[Any, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What becomes of the plan on the way from the point before along `path`, where that has the value `before`.

    `changed` maps columns to their values there and here. `kept` is how much longer the step of the plan there would
    take here, as a share; None where it is not legal here or does not fit. The decision flips where anything changed
    that is no tie.
    """

    path: str
    before: str
    changed: dict[str, tuple[Value, Value]]
    kept: float | None = None

    @property
    def flips(self) -> bool:
        return bool(self.changed) and (self.kept is None or self.kept > TIE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One combination of values: the best plan's figures, or why there is none.

    `moves` come here along every path, from the last point before that has a plan; none along a path on which this is
    the first. `scaling` is tokens/s of each device over that of the first point that has a plan and the same value of
    the other path.
    """

    labels: tuple[str, ...]
    best: Candidate | None
    devices: int
    moves: tuple[Move, ...] = ()
    scaling: float | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def flips(self) -> bool:
        return any(move.flips for move in self.moves)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Points in the order of their values, the last path varying fastest; `ordered_by` as in a Decision."""

    paths: tuple[str, ...]
    points: tuple[Point, ...]
    objective: Objective
    ordered_by: str


def sweep(asked: Question, over: Sequence[str], *, progress: Progress = vary.silent) -> Sweep:
    """The best plan at every value of one path (`PATH=1,2,4`), or at every pair of two.

    Raises ConfigError, before anything is priced, for paths, values and forms that are wrong. A value at which
    nothing is legal or fits is a point without a plan.
    """
    axes = read_axes(asked, over)
    places = list(product(*(range(len(axis.values)) for axis in axes)))
    points: list[Point] = []
    made: dict[Place, Best] = {}
    for done, place in enumerate(places):
        labels = (axis.labels[index] for axis, index in zip(axes, place, strict=True))
        progress(done, len(places), ", ".join(labels))
        points.append(_point(asked, axes, place, made=made))
    progress(len(places), len(places))
    return Sweep(
        paths=tuple(axis.field.written for axis in axes),
        points=_scaled(points),
        objective=asked.job.objective,
        ordered_by=ordered_by(found.design for found in made.values()) if made else "",
    )


def _point(asked: Question, axes: Sequence[Axis], place: Place, *, made: dict[Place, Best]) -> Point:
    """The point at `place`, whose best plan is added to those that are `made`."""
    labels = tuple(axis.labels[index] for axis, index in zip(axes, place, strict=True))
    changed = asked
    try:
        for axis, index in zip(axes, place, strict=True):
            changed = with_field(changed, axis.field, axis.values[index])
        found = vary.best(changed)
    except ConfigError as error:
        found = error.problems
    devices = changed.cluster.num_devices
    if not isinstance(found, Best):
        return Point(labels=labels, best=None, devices=devices, problems=found)
    made[place] = found
    best = candidate(found.design, found.report)
    return Point(labels=labels, best=best, devices=best.plan.world_size, moves=tuple(_moves(axes, place, made)))


def _moves(axes: Sequence[Axis], place: Place, made: Mapping[Place, Best]) -> Iterator[Move]:
    """One along every axis, from the last point before that has a plan."""
    for number, axis in enumerate(axes):
        earlier = [(*place[:number], index, *place[number + 1 :]) for index in reversed(range(place[number]))]
        if (there := next((each for each in earlier if each in made), None)) is None:
            continue
        changed = _changed(made[there].design, made[place].design, axes)
        kept = _kept(made[there].design.plan, made[place]) if changed else None
        yield Move(path=axis.field.written, before=axis.labels[there[number]], changed=changed, kept=kept)


def _kept(plan: Plan, found: Best) -> float | None:
    """What staying with `plan` would cost where `found` is best."""
    held = replace(found.design, plan=plan)
    if check(held, scopes=ANSWERS | {Scope.MEMORY}):
        return None
    return vary.repriced(held, held.cluster).step_seconds / found.report.step_seconds - 1.0


def _changed(before: Design, here: Design, axes: Sequence[Axis]) -> dict[str, tuple[Value, Value]]:
    """Columns that the search chose otherwise: not those that are swept, nor the number of devices that there are."""
    given = {axis.field.path.removeprefix("job.constraints.fix.") for axis in axes}
    if before.cluster.num_devices != here.cluster.num_devices:
        given.add("devices")
    found = differing(before.plan, here.plan)
    return {column: pair for column, pair in found.items() if column not in given}


def _scaled(points: Sequence[Point]) -> tuple[Point, ...]:
    """With scaling efficiency where points differ in their devices."""
    planned = [point for point in points if point.best]
    if len({point.devices for point in planned}) < 2:
        return tuple(points)
    units: dict[tuple[str, ...], float] = {}
    found = []
    for point in points:
        if point.best:
            each = point.best.tokens_per_second / point.devices
            unit = units.setdefault(_beside_devices(point, planned), each)
            point = replace(point, scaling=each / unit)
        found.append(point)
    return tuple(found)


def _beside_devices(point: Point, planned: Sequence[Point]) -> tuple[str, ...]:
    """The labels of a point but that of the path that sets the number of devices."""
    for axis in range(len(point.labels)):
        if len({(other.labels[axis], other.devices) for other in planned}) == len(
            {other.labels[axis] for other in planned}
        ):
            return point.labels[:axis] + point.labels[axis + 1 :]
    return ()


def read_axes(asked: Question, over: Sequence[str]) -> tuple[Axis, ...]:
    """The axes that `over` names: one, or two that are crossed. Raises ConfigError with all that is wrong with them."""
    gathered = Gathering()
    read = [gathered.attempt(partial(read_axis, asked, text)) for text in over]
    axes = [axis for axis in read if axis is not None]
    problems = gathered.problems
    if not 1 <= len(over) <= 2:
        problems.append(Problem(where="--sweep", what=f"{len(over)} paths are swept", fix="sweep one, or cross two"))
    elif len(axes) == 2 and axes[0].field.path == axes[1].field.path:
        problems.append(Problem(where="--sweep", what=f"{axes[0].field.written} is swept twice", fix="name it once"))
    count = math.prod(len(axis.values) for axis in axes)
    if count > MOST_POINTS:
        problems.append(Problem(where="--sweep", what=f"more than {MOST_POINTS} designs", fix="ask for fewer values"))
    gathered.tell()
    return tuple(axes)


def read_axis(asked: Question, text: str) -> Axis:
    """`PATH=V1,V2`, `PATH=LOW..HIGH:COUNT` (even steps) or `PATH=LOW..HIGH*FACTOR`. Raises ConfigError."""
    written, equals, values = (part.strip() for part in text.partition("="))
    if not equals or not values:
        raise ConfigError(Problem(where=f"--sweep {text}", what="names no values", fix=FORMS))
    field = find_field(asked, written)
    if ".." in values:
        numbers = _range(text, values, field)
        labels = tuple(shown(field.path, number) for number in numbers)
        _check_values(asked, field, numbers)
        return Axis(field=field, values=numbers, labels=labels)
    labels = tuple(value.strip() for value in values.split(","))
    if len(set(labels)) < len(labels) or not all(labels):
        raise ConfigError(Problem(where=f"--sweep {text}", what="a value is empty or named twice", fix=FORMS))
    _check_values(asked, field, labels)
    return Axis(field=field, values=labels, labels=labels)


def _check_values(asked: Question, field: Field, values: Sequence[Any]) -> None:
    """Raises ConfigError with every value that the field itself cannot have, whatever the rest of the question."""
    problems = [problem for value in values for problem in field_problems(asked, field, value)]
    if problems:
        raise ConfigError(problems)


def _range(text: str, values: str, field: Field) -> tuple[float | int, ...]:
    mark = next((mark for mark in ":*" if mark in values), None)
    ends, _, step = values.partition(mark or ":")
    low_text, _, high_text = ends.partition("..")
    try:
        low, high = (read_number(end, whole=field.is_whole, where=field.path) for end in (low_text, high_text))
        by = parse_measure(step, Measure.PLAIN) if mark else 0.0
    except NotRead as error:
        raise ConfigError(Problem(where=f"--sweep {text}", what=error.what, fix=error.fix or FORMS)) from None
    if mark is None:
        fix = f"write {text}:4 for four values, or {text}*2 to double"
        raise ConfigError(Problem(where=f"--sweep {text}", what="the range has no steps", fix=fix))
    if not low < high or (mark == ":" and (by < 2 or not by.is_integer())) or (mark == "*" and (by <= 1 or low <= 0)):
        what = "a range goes up, by 2 values or more, or from above 0 by a factor above 1"
        raise ConfigError(Problem(where=f"--sweep {text}", what=what, fix=FORMS))
    if mark == ":":
        count = min(int(by), MOST_POINTS + 1)
        found = [low + (high - low) * index / (count - 1) for index in range(count)]
    else:
        found = _grown(low, high, by=by, whole=field.is_whole)
    if field.is_whole:
        return tuple(dict.fromkeys(round(number) for number in found))
    return tuple(found)


def _grown(low: float, high: float, *, by: float, whole: bool) -> list[float]:
    """`low`, and what it comes to each time that it grows by a factor, up to `high`: MOST_POINTS + 1 at the most.

    Of `whole` numbers each is there once: steps that round to the one before are passed over.
    """
    last, index = int(math.log(high / low) / math.log(by) + 1e-9), 0
    found: dict[float, None] = {}
    while index <= last and len(found) <= MOST_POINTS:
        number = low * by**index
        found[round(number) if whole else number] = None
        index += 1
        if whole:
            index = max(index, math.ceil(math.log((round(number) + 0.5) / low) / math.log(by)))
    return list(found)


def shown(path: str, number: float) -> str:
    """A number as its field is usually written: `400 GB/s`, `80 GiB`, `5.00 us`, `1,024`."""
    name = path.rsplit(".", maxsplit=1)[-1]
    if name.endswith("bandwidth"):
        return f"{format_count(number).replace(' B', ' G')}B/s"
    if name.endswith("_bytes"):
        return format_bytes(number)
    if name.endswith("_seconds"):
        return format_seconds(number)
    return f"{number:,}" if isinstance(number, int) else f"{number:.6g}"
