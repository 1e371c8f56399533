"""The files of a run directory that are one JSON value: written whole or not at all, read with clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright.spec import codec
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.json_text import parse_json
from meshwright.spec.plan import Design


def write_json(path: Path, value: Any) -> None:
    """`path` holds `value` as JSON; a reader never sees a part of it."""
    fresh = path.with_name(f"{path.name}.partial")
    fresh.write_text(json.dumps(codec.encode(value), indent=1) + "\n")
    fresh.replace(path)


def read_json(path: Path) -> Any:
    """The JSON value of a file. Raises ConfigError when there is none."""
    try:
        return parse_json(path.read_text())
    except FileNotFoundError:
        raise ConfigError(Problem(what="there is no such file", where=str(path))) from None
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(what="this file cannot be read", where=str(path), why=str(error))) from None


def design_of_run(run_dir: Path) -> Design:
    """That of the run in a folder. Raises ConfigError where it is none, and with every problem of it."""
    path = run_dir / "design.json"
    if not path.is_file():
        fix = "name the folder that a run wrote"
        raise ConfigError(Problem(what="not a run directory", where=str(run_dir), why="it has no design.json", fix=fix))
    return load_design(path)


def load_design(path: Path) -> Design:
    """The Design of a file. Raises ConfigError with every problem of it."""
    return codec.decode(Design, read_json(path), str(path))
