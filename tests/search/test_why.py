"""Why the best plan is best, in words: what is ranked behind and for what, and figures that say something."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from meshwright import search
from meshwright.search import decide, explain
from meshwright.search.alternatives import Alternatives
from meshwright.search.decide import explored
from meshwright.search.laid_out import best_of, best_refined
from meshwright.spec.job import Objective
from meshwright.spec.units import format_percent, format_seconds
from tests.search import search_samples as samples

MODEL = samples.model(layers=10, layer=samples.dense_layer(hidden=2048), vocab=2048)
BOX = samples.cluster(samples.nodes(devices_per_node=8, of=samples.device(memory_bytes=16 * 2**30)))


def test_a_shorter_step_that_is_ranked_behind_is_told_with_its_figures() -> None:
    """Beside the best of another value, which takes more time, one of that value that is shorter and less sure."""
    found = explored(MODEL, BOX, samples.job())
    chosen, report = best_refined(found, 10)[0][0]
    taken: list[decide.Entry] = []

    def best(asked: Sequence[Alternatives]) -> list[explain.Answer]:
        entries = best_of(found, asked)
        taken.extend(entry for entry in entries if entry is not None)
        return [(entry, True) for entry in entries]

    plain = explain.why([(chosen, report)], found, best=best)
    made = next(design for design, other in taken if other.step_seconds > report.step_seconds)
    short = replace(report.step, seconds=0.5 * report.step.seconds)
    ranked = [(chosen, report), (made, replace(report, step=short, error_band=(0.5, 4.0)))]
    told = explain.why(ranked, found, best=best)
    steps = f"takes {format_seconds(short.seconds)} a step, not {format_seconds(report.step_seconds)}, but 19 of 20"
    assert not any("; another with " in line for line in plain)
    assert any("more time" in line and "; another with " in line and steps in line for line in told)


def test_figures_that_read_alike_are_not_told_as_another() -> None:
    found = search.design(MODEL, BOX, samples.job()).report
    report, longer = (
        replace(found, step=replace(found.step, seconds=seconds), error_band=(0.9, 1.0)) for seconds in (20.0, 20.02)
    )
    behind = partial(explain.ranked_behind, report, objective=Objective.TIME)
    assert behind(longer) == "19 of 20 of its steps stay under a time that is 0.1 % longer"
    chance = format_percent(report.fit_probability or 0.0)
    assert behind(report) == f"19 of 20 of its steps stay under 20.0 s too, and it fits with {chance} too"


def test_one_device_has_no_other_order_of_passes() -> None:
    decision = search.design(samples.model(layers=2), samples.cluster(samples.nodes(devices_per_node=1)), samples.job())
    assert not any("breadth-first" in line for line in decision.why)


def test_plans_that_were_refused_before_they_were_priced_are_counted_apart() -> None:
    found = explored(MODEL, BOX, samples.job())
    (plain,), (apart,) = (
        explain.rejected_for_memory(found.table, replace(found.prices, fits=~found.prices.finite), hopeless=count)
        for count in (0, 7)
    )
    assert apart.count == plain.count + 7
    assert "not priced" not in plain.example
    assert "7 of these hold too much at the least, and were not priced" in apart.example


def test_a_line_that_grows_manifold_has_both_ends_in_times() -> None:
    report = search.design(MODEL, BOX, samples.job()).report
    lines = tuple(replace(line, seconds=10.0 * line.seconds) for line in report.step.lines)
    longer = replace(report, step=replace(report.step, seconds=10.0 * report.step.seconds, lines=lines))
    design = search.design(MODEL, BOX, samples.job()).design
    told = explain.compared(design, report, design, longer, head="this")
    assert re.search(r"this would take 10\.0 times the time: .+ \d\.\d\d to [\d.]+ times this step", told)


def test_a_line_that_another_makes_up_for_is_told_beside_it() -> None:
    found = search.design(MODEL, BOX, samples.job())
    report, names = found.report, ("backward", "forward")

    def longer(changes: dict[str, float]) -> str:
        lines = tuple(
            replace(line, seconds=line.seconds + changes.get(line.name, 0.0) * report.step_seconds)
            for line in report.step.lines
        )
        total = (1.0 + sum(changes.values())) * report.step_seconds
        other = replace(report, step=replace(report.step, seconds=total, lines=lines))
        return explain.compared(found.design, report, found.design, other, head="this")

    assert set(names) <= {line.name for line in report.step.lines}
    told = longer({"backward": 0.2, "forward": -0.15})
    assert re.search(r": backward .* of this step, against forward .* % to .* % of it$", told)
    assert "against" not in longer({"backward": 0.2, "forward": -0.05})
