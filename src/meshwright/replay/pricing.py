"""Predictions of published runs: of one whose source leaves something unsaid, and of many that are alike at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from meshwright import cost
from meshwright.replay.express import Expressed
from meshwright.replay.runs import Run
from meshwright.spec.errors import ConfigError
from meshwright.spec.plan import BlockGroup, Design, Offload, Recompute
from meshwright.spec.report import Report

_UNLIKELY = 0.1  # to fit: memory is seldom so far off
_MOST = 256  # rows priced at once
_ALIKE = ("gpu", "n_gpus", "model", "layers", "hidden", "seq", "framework", "flash", "extra", "source_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A design that the run may have been, with its prediction."""

    design: Design
    report: Report


def priced(expressed: Expressed) -> Priced:
    """Of one run that is not told in full: its authors will have tried some designs and kept the fastest that fits.

    What hardly fits as it is told was another one, with less in memory. Raises ConfigError where no cost is known of
    the design as it is told.
    """
    found = priced_all([expressed])[0]
    if isinstance(found, ConfigError):
        raise found
    return found


def priced_all(expressed: Sequence[Expressed]) -> list[Priced | ConfigError]:
    """As `priced` of each, an error in the place of what cannot be priced; those that are alike are priced together."""
    told = _each([(one.design, *one.others) for one in expressed])
    unfit = [index for index, found in enumerate(told) if not any(map(_may_fit, _known(found)))]
    smaller = _each([expressed[index].smaller for index in unfit])
    for index, found in zip(unfit, smaller, strict=True):
        told[index] = [*told[index], *_known(found)]
    return [found[0] if isinstance(found[0], ConfigError) else _kept(_known(found)) for found in told]


def taken(expressed: Expressed, found: Design) -> tuple[str, ...]:
    """What the design that was kept has of what was open, in words; nothing where the source said it all."""
    plan, group = found.plan, found.plan.first_group
    if not expressed.others and not expressed.smaller:
        return ()
    words = [f"microbatches of {plan.microbatch}"]
    words += [f"{plan.schedule.chunks} stages on a rank"] if plan.schedule.chunks > 1 else []
    words += [f"{group.recompute.value} recompute" if group.recompute is not Recompute.NONE else "no recompute"]
    blocks = plan.groups[-1].stop
    again, every = (
        sum(_layers(part, blocks) for part in plan.groups if part.recompute in kinds)
        for kinds in ((Recompute.FULL,), tuple(Recompute))
    )
    words[-1] += f" of {again} of {every} layers" if 0 < again < every else ""
    words += ["activations in the host's memory"] if group.offload is Offload.ACTIVATIONS else []
    return (f"so taken: {', '.join(words)}",)


def _layers(part: BlockGroup, blocks: int) -> int:
    """Those of `part` between the embedding and the head of so many blocks."""
    return min(part.stop, blocks - 1) - max(part.start, 1)


def in_alike_parts(runs: Sequence[Run], processes: int = 1) -> list[list[int]]:
    """Places of `runs`, in parts of rows that name one model on one cluster, or several such: as many parts for each
    of the processes, of as many rows."""
    order = sorted(range(len(runs)), key=lambda place: [runs[place].text(name) for name in _ALIKE])
    parts = processes * math.ceil(len(order) / (_MOST * processes))
    places = iter(order)
    return [part for _ in range(parts) if (part := list(islice(places, math.ceil(len(order) / parts))))]


def _kept(found: Sequence[Priced]) -> Priced:
    return min(found, key=lambda one: (not one.report.fits, not _may_fit(one), one.report.step_seconds))


def _may_fit(one: Priced) -> bool:
    return (one.report.fit_probability or 0.0) >= _UNLIKELY


def _known(found: Sequence[Priced | ConfigError]) -> list[Priced]:
    return [one for one in found if isinstance(one, Priced)]


def _each(groups: Sequence[Sequence[Design]]) -> list[list[Priced | ConfigError]]:
    """Every design of every group, priced together where nothing is unknown of any."""
    flat = [design for group in groups for design in group]
    try:
        reports: Sequence[Report | ConfigError] = cost.predict_all(flat)
    except ConfigError:
        reports = [_alone(design) for design in flat]
    each = iter(
        report if isinstance(report, ConfigError) else Priced(design=design, report=report)
        for design, report in zip(flat, reports, strict=True)
    )
    return [list(islice(each, len(group))) for group in groups]


def _alone(design: Design) -> Report | ConfigError:
    try:
        return cost.predict(design)
    except ConfigError as error:
        return error
