"""All that two designs set differently, in words where there are some, else by the path in their files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from enum import Enum
from itertools import groupby
from typing import Any

from meshwright.search.constraints import columns_of
from meshwright.search.settings import devices_words
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.codec import encode
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import BlockGroup, Design, Plan
from meshwright.spec.stage_words import rank_order_words, size_words

_SILENT = "-"
_ENDS = ("start", "stop")  # of a run of blocks
_CALLED = {"sharding": "zero"}  # as columns of plans are
_TOLD_BY_PLANS = {"name", "schema", "sequence_length", "batch_tokens", "precision", "compile"}  # of what jobs say


def differences(one: Design, other: Design) -> dict[str, tuple[str, str]]:
    """What differs, with the values of both; nothing where the two are the same design but for its name."""
    ours, theirs = _described(one), _described(other)
    ours["model"], theirs["model"] = _models(one.model, other.model)
    ours["cluster"], theirs["cluster"] = _machines(one.cluster, other.cluster)
    return {
        name: (ours.get(name, _SILENT), theirs.get(name, _SILENT))
        for name in dict.fromkeys(("model", "cluster", *ours, *theirs))
        if ours.get(name) != theirs.get(name)
    }


def _models(one: ModelSpec, other: ModelSpec) -> tuple[str, str]:
    same = one == other or one.name != other.name
    return one.name, other.name if same else f"{other.name}, with other figures"


def _machines(one: ClusterSpec, other: ClusterSpec) -> tuple[str, str]:
    """The names of both; where one name stands for unlike machines, what tells them apart."""
    if one == other or one.name != other.name:
        return one.name, other.name
    if one.origin is not other.origin:
        return f"{one.name}, {one.origin.value}", f"{other.name}, {other.origin.value}"
    return one.name, f"{other.name}, with other figures"


def _described(design: Design) -> dict[str, str]:
    plan, job = design.plan, encode(design.job)
    untold = {"data"} if plan.experts else {"data", "expert", "expert_tensor"}
    columns = {name: value for name, value in columns_of(plan).items() if name not in untold}
    axes = " ".join(axis.name.value for axis in plan.axes if axis.size > 1)
    return {
        "batch": f"{plan.read_tokens:,} tokens",
        "sequence length": f"{plan.sequence_length:,}",
        "compile": design.job.compile.value,
        **{name.replace("_", " "): _word(value) for name, value in columns.items()},
        **_of_blocks(plan),
        "axes, outermost first": "usual" if plan.has_usual_order else axes,
        "devices of the ranks": devices_words(plan),
        "microbatches": _word(plan.schedule.microbatches),
        "blocks of the stages": size_words([stage.stop - stage.start for stage in plan.stages]),
        "stages lie on": rank_order_words([stage.rank for stage in plan.stages]),
        **dict(_leaves(_rest(plan))),
        **dict(_leaves({name: value for name, value in job.items() if name not in _TOLD_BY_PLANS}, under="job.")),
    }


def _of_blocks(plan: Plan) -> dict[str, str]:
    """Every setting of the blocks: of all, or run by run where they differ: `full in 0 to 11, none in 12 to 33`."""
    names = [field.name for field in fields(BlockGroup) if field.name not in _ENDS]
    return {_CALLED.get(name, name.replace("_", " ")): _runs(plan, name) for name in names}


def _runs(plan: Plan, name: str) -> str:
    runs = [(value, list(groups)) for value, groups in groupby(plan.groups, key=lambda group: getattr(group, name))]
    if len(runs) == 1:
        return _word(runs[0][0])
    return ", ".join(f"{_word(value)} in {_blocks(groups[0].start, groups[-1].stop)}" for value, groups in runs)


def _blocks(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start} to {stop - 1}"


def _rest(plan: Plan) -> dict[str, Any]:
    """What neither columns nor blocks tell of `plan`, as its file says it."""
    said = encode(plan)
    kept = {name: said[name] for name in ("gradients", "tensor_grid", "empty_rows")}
    kept["schedule"] = {name: said["schedule"][name] for name in ("table", "paths")}
    return kept | ({"experts": {"dispatch": said["experts"]["dispatch"]}} if plan.experts else {})


def _leaves(value: Mapping[str, Any], *, under: str = "") -> Iterator[tuple[str, str]]:
    """Every value that is not a table, by its path."""
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _leaves(item, under=f"{under}{name}.")
        else:
            yield f"{under}{name}", _word(item)


def _word(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return _SILENT if value is None else str(value)
