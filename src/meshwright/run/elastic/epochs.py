"""Epochs of a run as they are kept in its directory: one line for each time that its ranks changed."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

from meshwright.run.elastic.board import Epoch
from meshwright.spec import codec
from meshwright.spec.json_text import parse_json

_BESIDE = ("at", "ranks", "plan")


def epochs_path(run_dir: Path) -> Path:
    """Who trained, by which design, why, and from where on."""
    return run_dir / "elastic" / "epochs.jsonl"


def write(run_dir: Path, epoch: Epoch, *, plan: str) -> None:
    path = epochs_path(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    row = {"at": time.time(), "ranks": len(epoch.members), "plan": plan, **codec.encode(epoch)}
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def plans_of(run_dir: Path) -> set[str]:
    """Digests of all plans that a run was on, in any launch; a line that a writer did not finish is left out."""
    path, found = epochs_path(run_dir), set[str]()
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError, KeyError, TypeError):
            found.add(str(parse_json(line)["plan"]))
    return found


def of_this_launch(run_dir: Path) -> list[Epoch]:
    """Those of the newest launch, in order."""
    rows = [json.loads(line) for line in epochs_path(run_dir).read_text().splitlines()]
    first = max(index for index, row in enumerate(rows) if row["number"] == 0)
    kept = [{name: value for name, value in row.items() if name not in _BESIDE} for row in rows[first:]]
    return [codec.decode(Epoch, row, str(epochs_path(run_dir))) for row in kept]
