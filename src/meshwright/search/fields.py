"""Fields of a cluster and a job by path, as a person names them: `cluster.inter.bandwidth`, `job.batch_tokens`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from meshwright.catalog.overrides import parse_value
from meshwright.catalog.ranges import checked_job
from meshwright.catalog.shorthand import checked
from meshwright.search.constraints import COLUMNS, limits
from meshwright.search.field_names import FIX, OF_JOB, no_number
from meshwright.search.vary import Question, carried
from meshwright.spec import codec
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import ConfigError, Gathering, Problem
from meshwright.spec.job import Constraints, JobSpec, full_name

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "cluster.inter": "cluster.nic",
        "cluster.intra": "cluster.inside",
        "cluster.wide": "cluster.wide_area",
        "cluster.nodes": "cluster.num_nodes",
        "cluster.memory": "cluster.device.memory_bytes",
        "cluster.peak": "cluster.device.peak_flops",
        "cluster.device.peak": "cluster.device.peak_flops",
        "job.batch": "job.batch_tokens",
        "job.sequence": "job.sequence_length",
        "job.fix": "job.constraints.fix",
    }
)
_OPTIONAL = ("price_per_hour", "hours_between_failures", "watts")  # numbers that may be set where a machine has none
_UNSWEPT = ("schema", "seed", "cluster.fits", "attention_rates", "sources")


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field that a sweep may set: its path as written and in full, and the value it has (None where unset)."""

    written: str
    path: str
    value: Any

    @property
    def is_whole(self) -> bool:
        return isinstance(self.value, int)


def of_cluster(entries: Sequence[str]) -> list[str]:
    """Those of `entries` that set a field of the cluster."""
    return [entry for entry in entries if re.match(r"\s*cluster\s*[.=]", entry)]


def set_cluster(asked: Question, entries: Sequence[str]) -> Question:
    """The question with every `cluster.path=value` of `entries` in force, which the cluster's name then says.

    Raises ConfigError with every path that names no number and every value that no machine has.
    """
    gathered = Gathering()
    for entry in entries:
        asked = gathered.attempt(partial(_set_cluster, asked, entry)) or asked
    gathered.tell()
    return asked


def _set_cluster(asked: Question, entry: str) -> Question:
    written, _, value = (part.strip() for part in entry.partition("="))
    changed = with_field(asked, find_field(asked, written, option="--set"), value, option="--set")
    joined = ", " if " with " in asked.cluster.name else " with "
    name = f"{asked.cluster.name}{joined}{written.removeprefix('cluster.')}={value}"
    said = f"{asked.cluster.source}; but {written} = {value}, which was set" if asked.cluster.source else ""
    return replace(changed, cluster=replace(changed.cluster, name=name, source=said))


def find_field(asked: Question, written: str, *, option: str = "--sweep") -> Field:
    """The field that `written` names. A field of `cluster` is one of every group of nodes.

    Raises ConfigError, at `option`, with the nearest paths for one that is not there or is not a number.
    """
    path = _full(written)
    known = dict(_numbers(asked))
    if path.startswith(FIX):
        column = full_name(path.removeprefix(FIX))
        if column not in COLUMNS:
            what = f"{column!r} is not a column of a plan"
            raise ConfigError(Problem(where=f"{option} {written}", what=what, fix=codec.nearest(column, COLUMNS)))
        return Field(written=written, path=f"{FIX}{column}", value=asked.job.constraints.fix.get(column))
    if path in known:
        return Field(written=written, path=path, value=known[path])
    names = [*known, *(f"{FIX}{column}" for column in COLUMNS), *(name for name in ALIASES if ALIASES[name] in known)]
    names += [
        f"{alias}{name.removeprefix(full)}"
        for alias, full in ALIASES.items()
        for name in known
        if name.startswith(f"{full}.")
    ]
    raise ConfigError(no_number(written, path, names=names, documents=_documents(asked), option=option))


def _documents(asked: Question) -> Mapping[str, Any]:
    """The cluster, with the fields of its first group beside its own, and the job, as JSON."""
    cluster = codec.encode(asked.cluster)
    return {"cluster": {**cluster["groups"][0], **cluster}, "job": codec.encode(asked.job)}


def _full(written: str) -> str:
    path = written if written.split(".")[0] in ("cluster", "job") else f"job.{written}"
    for alias, full in ALIASES.items():
        if path == alias or path.startswith(f"{alias}."):
            return full + path.removeprefix(alias)
    return re.sub(r"^cluster\.groups\.(\d+)\.", r"cluster.groups[\1].", path)


def _numbers(asked: Question) -> Iterator[tuple[str, Any]]:
    """Every number that a plan depends on by its full path; those of node groups once, by the first group's value."""
    cluster = codec.encode(asked.cluster)
    groups = cluster.pop("groups")
    yield from _leaves(cluster, "cluster")
    yield from _leaves(groups[0], "cluster")
    for index, group in enumerate(groups):
        yield from _leaves(group, f"cluster.groups[{index}]")
    yield from (leaf for leaf in _leaves(codec.encode(asked.job), "job") if leaf[0] in OF_JOB)


def _leaves(document: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if name in _UNSWEPT:
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}.{name}")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}.{name}", value
        elif value is None and name in _OPTIONAL:
            yield f"{prefix}.{name}", None


def with_field(asked: Question, field: Field, value: Any, *, option: str = "--sweep") -> Question:
    """The question with the field at `value`: a number, or text as a person writes it (`100GB/s`, `4Mi`).

    Raises ConfigError where the question cannot be asked so.
    """
    try:
        return _changed(asked, field, value)
    except ConfigError as error:
        where = f"{option} {field.written}={value}"
        raise ConfigError(replace(problem, where=where) for problem in error.problems[:1]) from None


def field_problems(asked: Question, field: Field, value: Any) -> tuple[Problem, ...]:
    """Why the field can never have `value`; () where it can, or where another field of the question stands against it.

    Numbers that decoding alone would round (a count of 1.5) are told too.
    """
    where = f"--sweep {field.written}={value}"
    try:
        changed = _changed(asked, field, value)
        if field.path.startswith(FIX):
            limits(Constraints(fix={(name := field.path.removeprefix(FIX)): changed.job.constraints.fix[name]}))
    except ConfigError as error:
        own = [problem for problem in error.problems if _is_of(problem.where, field.path)]
        return tuple(dict.fromkeys(replace(problem, where=where) for problem in own))
    return ()


def _is_of(where: str, path: str) -> bool:
    """Whether a problem at `where` is of the field: `job.` is left out by some checks, and groups are numbered."""
    place = re.sub(r"groups\[\d+\]\.", "", where)
    return place.removeprefix("job.").removeprefix("cluster.") in (path, path.split(".", 1)[1])


def _changed(asked: Question, field: Field, value: Any) -> Question:
    section, _, rest = field.path.partition(".")
    keys = rest.split(".")
    if section == "job":
        document = codec.encode(asked.job)
        _put(document, keys, parse_value(value) if isinstance(value, str) else value)
        return replace(asked, job=checked_job(codec.decode(JobSpec, document, "job")))
    document = codec.encode(asked.cluster)
    for target in _targets(document, keys):
        _put(target, keys[1:] if keys[0].startswith("groups[") else keys, value)
    changed = checked(codec.decode(ClusterSpec, document, "cluster"))
    return replace(asked, cluster=carried(asked.cluster, changed))


def _targets(document: dict[str, Any], keys: list[str]) -> list[dict[str, Any]]:
    """The tables that hold `keys`: the cluster itself, one of its groups, or all of them."""
    if keys[0].startswith("groups["):
        return [document["groups"][int(keys[0].removeprefix("groups[").removesuffix("]"))]]
    return [document] if keys[0] in document else list(document["groups"])


def _put(document: dict[str, Any], keys: list[str], value: Any) -> None:
    table = document
    for key in keys[:-1]:
        table = table[key]
    table[keys[-1]] = value
