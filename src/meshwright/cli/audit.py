"""`meshwright audit`: whether a run has read every sequence of its data exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from meshwright.run.audit import Audit, Stored


def audit(
    run: Annotated[Path, typer.Argument(help="The directory of a run, gone on with as often as it may be.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Prove from a run's directory that every sequence was read exactly once, and that its checkpoints are whole."""
    from meshwright.cli.output import note, print_json, print_wrapped
    from meshwright.run.audit import audit as examine
    from meshwright.run.machine import cache_root
    from meshwright.spec.errors import ExitCode

    found = examine(run, cache=cache_root() / "data", say=note)
    if as_json:
        print_json({"read": found.read, **{name: getattr(found, name) for name in found.__slots__}})
    else:
        print_wrapped(_lines(found))
    return int(ExitCode.NO_PLAN if found.problems else ExitCode.OK)


def _lines(found: Audit) -> list[str]:
    from meshwright.spec.units import format_bytes

    lines = [f"{found.run}: the checkpoint of step {found.step:,}"]
    lines += [f"  NOT PROVEN  {problem}" for problem in found.problems]
    if not found.problems:
        lines.append(f"  proven  each of {found.read:,} sequences was read exactly once: fingerprint {found.sums[0]}")
    lines.append(
        f"  proven  {format_bytes(found.cache_bytes)} of tokenised text have the checksums they were written with"
    )
    for each in found.passes:
        whole = f"{each.whole:,} times whole, and " if each.whole else ""
        lines.append(f"  {each.source}: {whole}{each.begun:,} of {each.windows:,} sequences of a pass")
    if found.since:
        lines.append(f"  not known  {found.since:,} sequences before were read when nothing was kept of it")
    for name in found.missing:
        lines.append(
            f"  not known  {name} is gone: whether the text and its tokenizer are those that the run began with"
        )
    for start, stop in found.skipped:
        why = "passed over after a loss that was no number or leapt, or a batch without targets"
        lines.append(f"  skipped  {start:,} to {stop - 1:,}: {why}")
    if found.dropped:
        lines.append(f"  dropped  {found.dropped:,} sequences, of steps that a learner undid")
    lines.append(f"  whole checkpoints  {', '.join(_told(each) for each in found.stored)}")
    lines += [f"  unfit  {problem}" for problem in found.unfit]
    return [*lines, *(f"  passed over  on from step {each.begun:,}: {each.line}" for each in found.passed_over)]


def _told(stored: Stored) -> str:
    from meshwright.spec.units import format_bytes

    common = f", {format_bytes(stored.referred_bytes)} in common with earlier ones" if stored.referred_bytes else ""
    return f"{stored.step:,} ({format_bytes(stored.written_bytes)} written{common})"
