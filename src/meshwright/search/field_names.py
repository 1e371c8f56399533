"""What a path that names no number was meant to be: which numbers can be swept or set, the nearest first."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.search.constraints import COLUMNS
from meshwright.spec.errors import Problem
from meshwright.spec.job import full_name

FIX = "job.constraints.fix."
OF_JOB = ("job.sequence_length", "job.batch_tokens", "job.total_tokens", "job.checkpoint.every_steps")
USUAL = "cluster.nodes, cluster.inter.bandwidth, cluster.memory, cluster.peak.bf16, job.batch_tokens, job.fix.tensor"
NEAR = 0.6  # the least likeness of two names, of 1
WHOLE = ("cluster", "model", "job", "cluster.name", "model.name", "job.name")


def no_number(written: str, path: str, *, names: Sequence[str], documents: Mapping[str, Any], option: str) -> Problem:
    """Why `written`, in full `path`, is no number, and what to write: `names` are the paths that are known, and
    `documents` the cluster and the job as JSON."""
    own = [name for name in names if option == "--sweep" or name.startswith("cluster.")]
    where, usual = f"{option} {written}", f"name a number, such as {_usual(option)}"
    whole = written if written in WHOLE else written.split(".")[0] if written.startswith("model.") else ""
    if whole:
        noun = whole.split(".")[0]
        what = f"one number is {'swept' if option == '--sweep' else 'set'}, not {noun}s as a whole"
        fix = f"{usual}; or plan each {noun} with --out and meshwright compare two of the files"
        return Problem(where=where, what=what, fix=fix)
    column = full_name(path.rsplit(".", 1)[-1])
    if column in COLUMNS and option == "--sweep":
        return Problem(where=where, what="names no number of the cluster or the job", fix=_meant([f"{FIX}{column}"]))
    found = _at(documents, path)
    inside = [name for name in own if name.startswith(f"{path}.")]
    if isinstance(found, (Mapping, list)) and inside:
        return Problem(where=where, what="is a table, not a number", fix=f"name one of it: {', '.join(inside[:6])}")
    if found is not None:
        what = "is not a number that plans depend on"
        return Problem(where=where, what=what, fix=usual)
    if lacked := _lacked(documents, path):
        return Problem(where=where, what=f"there is no {lacked} here", fix=usual)
    near = nearest_paths(written, own)
    what = "names no number of the cluster or the job" if option == "--sweep" else "names no number of the cluster"
    return Problem(where=where, what=what, fix=_meant(near) if near else usual)


def nearest_paths(written: str, names: Sequence[str]) -> list[str]:
    """At most three of `names`: those that end as `written` does, else those that are spelt nearly so."""
    last = written.rsplit(".", 1)[-1]
    likeness = {name: _likeness(written, last, name) for name in names}
    near = [name for name in sorted(names, key=lambda name: -likeness[name]) if likeness[name] >= NEAR]
    return near[:3]


def _likeness(written: str, last: str, name: str) -> float:
    """Of the last words and of the whole, each as much; a last word that is the same is near enough alone."""
    ending = difflib.SequenceMatcher(None, last.lower(), name.rsplit(".", 1)[-1]).ratio()
    whole = difflib.SequenceMatcher(None, written.lower(), name).ratio()
    return max((ending + whole) / 2, NEAR if ending == 1.0 else 0.0, ending - 0.2 if "." not in written else 0.0)


def _meant(near: Sequence[str]) -> str:
    return f"did you mean {' or '.join(near)}?"


def _usual(option: str) -> str:
    return USUAL if option == "--sweep" else USUAL.partition(", job.")[0]


def _at(documents: Mapping[str, Any], path: str) -> Any:
    """What the documents have at `path`; None where there is nothing."""
    value: Any = documents
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def _lacked(documents: Mapping[str, Any], path: str) -> str:
    """The table around `path` that these documents leave out, as a cluster of one site its wide_area; empty if none."""
    keys = path.split(".")
    tables = (".".join(keys[:count]) for count in range(1, len(keys)))
    return next((table for table in tables if _is_left_out(documents, table)), "")


def _is_left_out(documents: Mapping[str, Any], path: str) -> bool:
    around, _, last = path.rpartition(".")
    table = _at(documents, around) if around else documents
    return isinstance(table, Mapping) and last in table and table[last] is None
