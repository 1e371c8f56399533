"""Incidents of a run in `RUN/incidents.jsonl`: a line where one begins, and one more where it ends."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from meshwright.spec.codec import decode, encode
from meshwright.spec.errors import ConfigError
from meshwright.spec.incident import Incident
from meshwright.spec.json_text import parse_json


def path_of(run_dir: Path) -> Path:
    return run_dir / "incidents.jsonl"


def keep(run_dir: Path, incident: Incident) -> None:
    """The incident is in the file as it is now. A file system that cannot take it loses this and nothing else."""
    with suppress(OSError), path_of(run_dir).open("a") as file:
        file.write(json.dumps(encode(incident)) + "\n")


def incidents_of(run_dir: Path) -> tuple[Incident, ...]:
    """Every incident of a run as it was told last, in the order in which they began; a line that a writer did not
    finish is left out."""
    found: dict[tuple[object, ...], Incident] = {}
    path = path_of(run_dir)
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError, ConfigError):
            told = decode(Incident, parse_json(line), str(path))
            key = (told.trouble, told.at, told.ranks, told.hosts)
            first = found.setdefault(key, told)
            found[key] = replace(first, ended=told.ended)
    return tuple(found.values())
