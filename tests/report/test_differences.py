"""Whatever two designs set differently is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.cli import main
from meshwright.report import terminal_why
from meshwright.report.compare import Pair
from meshwright.report.differences import differences
from meshwright.spec.compression import PowerSgd
from meshwright.spec.plan import Design, ExpertGrid, Plan, Training

NAMES = {"name", "schema", "model", "cluster", "start"}  # of files, and bounds that follow from the block before


@pytest.fixture(scope="module")
def design() -> Design:
    job = meshwright.JobSpec(
        batch_tokens=2**20, constraints=meshwright.Constraints(fix={"pipeline": 2, "schedule": "1f1b"})
    )
    return meshwright.design("llama-3.1-8b", "16xH100", job, top=1).design


def otherwise(value: Any) -> Any:
    """Another value of the same kind; none of a kind that has no other."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, Enum):
        members = list(type(value))
        return members[(members.index(value) + 1) % len(members)] if len(members) > 1 else None
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    return None


def changed(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """`value` with one setting of it otherwise, each in turn, with the path of that setting."""
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            if field.name not in NAMES:
                for inner, other in changed(getattr(value, field.name), f"{path}.{field.name}"):
                    yield inner, replace(value, **{field.name: other})
    elif isinstance(value, tuple) and value and is_dataclass(value[0]):
        for index, item in enumerate(value):
            for inner, other in changed(item, f"{path}[{index}]"):
                yield inner, (*value[:index], other, *value[index + 1 :])
    elif (other := otherwise(value)) is not None:
        yield path, other


def test_every_setting_of_a_plan_that_is_otherwise_is_told(design: Design) -> None:
    compressed = replace(design.plan.gradients, compression=PowerSgd(rank=4))
    plan = replace(design.plan, experts=ExpertGrid(expert=2), gradients=compressed)
    tried = dict(changed(plan))
    some = {
        ".gradients.rounds.every",
        ".gradients.compression.rank",
        ".experts.dispatch",
        ".stages[1].groups[0].training",
    }
    assert some <= set(tried)
    silent = [path for path, other in tried.items() if not told(design, plan, other)]
    assert not silent


def told(design: Design, one: Plan, other: Plan) -> dict[str, tuple[str, str]]:
    return differences(replace(design, plan=one), replace(design, plan=other))


def test_every_setting_of_a_job_that_plans_do_not_say_is_told(design: Design) -> None:
    of_plans = {".sequence_length", ".batch_tokens", ".precision"}
    tried = {path: job for path, job in changed(design.job) if path not in of_plans}
    assert len(tried) > 40
    assert not [path for path, job in tried.items() if not differences(design, replace(design, job=job))]


def test_blocks_that_differ_are_told_run_by_run(design: Design) -> None:
    first, last = design.plan.stages
    (group,) = last.groups
    frozen = replace(group, stop=group.stop - 1)
    rest = replace(group, start=group.stop - 1, shards=2, training=Training.FROZEN)
    other = replace(design.plan, stages=(first, replace(last, groups=(frozen, rest))))
    assert told(design, design.plan, other) == {
        "training": ("all", "all in 0 to 32, frozen in 33"),
        "shards": ("-", "- in 0 to 32, 2 in 33"),
    }


def test_a_design_and_itself_do_not_differ_and_models_of_one_name_do(design: Design) -> None:
    assert differences(design, design) == {}
    longer = replace(design, model=replace(design.model, max_positions=design.model.max_positions * 2))
    assert differences(design, longer) == {"model": ("llama-3.1-8b", "llama-3.1-8b, with other figures")}


def test_plans_that_differ_in_what_they_train_alone_are_not_called_the_same(
    design: Design, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, last = design.plan.stages
    (group,) = first.groups
    frozen = replace(group, stop=5, training=Training.FROZEN), replace(group, start=5)
    other = replace(design.plan, stages=(replace(first, groups=frozen), last))
    (tmp_path / "a.json").write_text(design.to_json())
    (tmp_path / "b.json").write_text(replace(design, plan=other).to_json())
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    shown = capsys.readouterr().out
    assert "the same" not in shown
    assert "frozen in 0 to 4, all in 5 to 33" in shown


@pytest.mark.parametrize(
    ("change", "shown"),
    [(0.0, "0"), (1e-4, "0"), (-3e-4, "0"), (-6e-4, "-0.1 %"), (0.0005, "+0.1 %"), (0.25, "+25.0 %")],
)
def test_a_change_that_shows_as_none_has_no_sign(change: float, shown: str) -> None:
    assert terminal_why._change(change) == shown


def test_rows_of_a_comparison_add_up_to_its_sum() -> None:
    """What is small beside the larger of the two is one row."""
    pairs = [Pair(name=f"cause {index}", one=each, other=2e-3) for index, each in enumerate((70.0, 1e-3, 2e-3, 3e-3))]
    shown = terminal_why._pairs(pairs, "a", "b", show=str, sign=str, what="where")
    names, first, second, _ = ([str(cell) for cell in column.cells] for column in shown.columns)
    assert names == ["cause 0", "the rest", "sum"]
    for cells in (first, second):
        *rows, total = map(float, cells)
        assert sum(rows) == pytest.approx(total)
