"""The decision kept beside its design, so that whoever is given the design finds what it was chosen from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.search.candidate import Decision
from meshwright.spec import codec
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.plan import Plan


def decision_path(design: Path) -> Path:
    """`plan.decision.json` for the design `plan.json`; `RUN/decision.json` for a run directory."""
    return design / "decision.json" if design.is_dir() else design.with_suffix(".decision.json")


def decision_document(design: Path, *, plan: Plan) -> Mapping[str, Any] | None:
    """The JSON of the decision that chose `plan`, beside the design at `design`.

    None when there is none or it is of another plan, which a design written over it later leaves behind. Raises
    ConfigError when it cannot be read.
    """
    path = decision_path(design)
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fix = "delete it, or write the plan again with meshwright plan --out"
        raise ConfigError(Problem(what="cannot be read as JSON", where=str(path), why=str(error), fix=fix)) from None
    chosen = document.get("design") if isinstance(document, dict) else None
    if not isinstance(chosen, dict) or chosen.get("plan") != codec.encode(plan):
        return None
    return dict(document)


def read_decision(design: Path, *, plan: Plan) -> Decision | None:
    """As `decision_document`, as a value. Raises ConfigError with every problem of the file."""
    document = decision_document(design, plan=plan)
    return None if document is None else codec.decode(Decision, document, str(decision_path(design)))
