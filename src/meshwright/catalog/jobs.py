"""Jobs and designs from files, and the commented template of a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.catalog import documents
from meshwright.catalog.ranges import checked_design, checked_job
from meshwright.spec.job import JobSpec
from meshwright.spec.plan import Design


def load_job(path: str | Path | None, *, sets: Sequence[str] = ()) -> JobSpec:
    """The job in the file `path` (all defaults when None), with every `key=value` of `sets` in force.

    Raises ConfigError with every problem at once, each with its file and line or the set it comes from.
    """
    document = documents.EMPTY if path is None else documents.read(path)
    return documents.decode(JobSpec, document, section="job", sets=sets, check=checked_job)


def load_design(path: str | Path, *, sets: Sequence[str] = ()) -> Design:
    """The design in `path`: a design.json, or the folder of a run that holds one; `job.seed=1` of `sets` in force."""
    file = Path(path)
    document = documents.read(file / "design.json" if file.is_dir() else path)
    return documents.decode(Design, document, section="design", sets=sets, check=checked_design)
