"""Jobs and designs from files, and the commented template of a job."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.catalog import documents
from meshwright.catalog.idle import idle
from meshwright.catalog.overrides import set_path
from meshwright.catalog.ranges import checked_design, checked_job, number_problems
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError, Gathering, Problem
from meshwright.spec.job import Automatic, Constraints, JobSpec, Switch
from meshwright.spec.optimizer import OptimizerSpec
from meshwright.spec.paths import expanded
from meshwright.spec.plan import Design
from meshwright.spec.units import format_tokens

AGAIN = "write the plan again with meshwright plan --out"
_TOKENIZERS = (".json", ".tiktoken")  # endings of files; any other word is a tokenizer's name
PLANNED = ("sequence_length", "batch_tokens", "total_tokens", "precision", "objective")


def load_job(path: str | Path | None, *, sets: Sequence[str] = ()) -> JobSpec:
    """The job in the file `path` (all defaults when None), with every `key=value` of `sets` in force.

    Paths that the file says are relative to its folder, those of `sets` to the working directory. Raises ConfigError
    with every problem at once, each with its file and line or the set it comes from; a precision that is said and
    another one that is fixed are one.
    """
    document = documents.EMPTY if path is None else _rooted(documents.read(path), Path(path).parent)
    paths = tuple(set_path(entry, section="job") for entry in sets)
    whole = Gathering()
    whole.attempt(lambda: _refuse_models(paths))
    sets = [entry for entry, path in zip(sets, paths, strict=True) if not _is_of_model(path)]

    def check(job: JobSpec) -> JobSpec:
        gathered = Gathering()
        if "precision" in paths or "precision" in document.values:
            said = documents.place_of("precision", document, sets=paths)
            gathered.attempt(lambda: _check_precision(job, said=said))
        gathered.attempt(lambda: checked_job(job))
        gathered.tell()
        return job

    found = whole.attempt(
        lambda: documents.decode(JobSpec, document, section="job", sets=sets, check=check, each=number_problems)
    )
    whole.tell()
    assert found is not None
    return found


def _is_of_model(path: str) -> bool:
    return re.match(r"model(?![\w-])", path) is not None


def _refuse_models(paths: Sequence[str]) -> None:
    """Raises ConfigError for every path of --set that names a field of a model."""
    what, why = "names a model, not a field of the job or the cluster", "--model says which model it is"
    fix = "meshwright models NAME --json prints a file to change; name that with --model"
    if found := [path for path in paths if _is_of_model(path)]:
        raise ConfigError(Problem(where=f"--set {path}", what=what, why=why, fix=fix) for path in found)


def _rooted(document: documents.Document, folder: Path) -> documents.Document:
    """The job of `document` with its files named from where it lies."""

    def named(entry: Any, key: str) -> Any:
        said = entry.get(key) if isinstance(entry, Mapping) else None
        if not isinstance(said, str) or not said or (key == "tokenizer" and not said.endswith(_TOKENIZERS)):
            return entry
        return {**entry, key: str(folder / expanded(said))}

    values = dict(named(document.values, "start"))
    data = named(values.get("data"), "tokenizer")
    if isinstance(data, Mapping) and isinstance(data.get("sources"), list):
        data = {**data, "sources": [named(source, "path") for source in data["sources"]]}
    return replace(document, values={**values, "data": data} if "data" in values else values)


def _check_precision(job: JobSpec, *, said: str) -> None:
    """Raises ConfigError where the job fixes a precision other than those that it allows, which it says at `said`."""
    if isinstance(job.precision, Automatic):
        return
    fixed = job.constraints.fix.get("precision")
    allowed = [kind.value for kind in (job.precision, *job.other_precisions)]
    if fixed in (None, *allowed) or fixed not in tuple(Precision):
        return
    what = f"{fixed} is fixed, and {said} says {job.precision.value}"
    fix = "drop one of the two, or say the same in both"
    raise ConfigError(Problem(where="constraints.fix.precision", what=what, fix=fix))


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """Fields of a job that a plan depends on, with their values as a person reads them: those asked for, the others."""

    asked: Mapping[str, str]
    defaults: Mapping[str, str]


def job_origins(job: JobSpec, path: str | Path | None, *, sets: Sequence[str] = ()) -> Origins:
    """Which fields of `job`, loaded from `path` and `sets`, were said there, and which are defaults."""
    said = set(documents.EMPTY.values if path is None else documents.read(path).values)
    said |= {set_path(entry, section="job") for entry in sets}
    fixed = job.constraints.fix
    figures = {name: getattr(job, name) for name in PLANNED if name in said or name not in fixed}
    words = {name: format_tokens(value) if isinstance(value, int) else str(value) for name, value in figures.items()}
    asked = {name: text for name, text in words.items() if name in said}
    asked |= {f"constraints.fix.{name}": str(value) for name, value in fixed.items()}
    others = ", ".join(kind.value for kind in job.other_precisions)
    limits = {name: getattr(job.constraints, name) for name in ("devices", "order", "slowdown")}
    usual = Constraints()
    asked |= {"other_precisions": others} if others else {}
    asked |= {"compile": job.compile.value} if job.compile is not Switch.OFF else {}
    asked |= {f"constraints.{name}": str(value) for name, value in limits.items() if value != getattr(usual, name)}
    asked |= {"constraints.forbid": ", ".join(job.constraints.forbid)} if job.constraints.forbid else {}
    kept = {name: getattr(job.optimizer, name, None) for name in ("kind", "state", "master")}
    asked |= {
        f"optimizer.{name}": str(value)
        for name, value in kept.items()
        if value != getattr(OptimizerSpec(), name) and value is not None
    }
    return Origins(asked=asked, defaults={name: text for name, text in words.items() if name not in said})


def job_remarks(job: JobSpec, path: str | Path | None, *, sets: Sequence[str] = ()) -> tuple[Problem, ...]:
    """What `job`, loaded from `path` and `sets` or held by a design, says that does nothing, each where it is said."""
    document = documents.EMPTY if path is None else documents.read(path)
    paths = tuple(set_path(entry, section="job") for entry in sets)
    found = [(problem, documents.place_of(problem.where, document, sets=paths)) for problem in idle(job)]
    return tuple(replace(each, where=f"job.{place}" if place == each.where else place) for each, place in found)


def load_design(path: str | Path, *, sets: Sequence[str] = ()) -> Design:
    """The design in `path`: a design.json, or the folder of a run that holds one; `job.seed=1` of `sets` in force.

    Raises ConfigError with every problem, each with its file and line and what to do.
    """
    file = Path(path)
    try:
        document = documents.read(file / "design.json" if file.is_dir() else path)
        return documents.decode(Design, document, section="design", sets=sets, check=checked_design)
    except ConfigError as error:
        raise ConfigError(
            problem if problem.fix or problem.where.startswith("--set") else replace(problem, fix=AGAIN)
            for problem in error.problems
        ) from None
