"""`RUN/chaos.json`: what was done to a run and what became of it, kept so that chaos which was interrupted goes on."""

from __future__ import annotations

from pathlib import Path

from meshwright.run.files import read_json, write_json
from meshwright.spec import codec
from meshwright.spec.chaos import Chaos


def write_chaos(run_dir: Path, found: Chaos) -> None:
    write_json(_path(run_dir), found.told())


def read_chaos(run_dir: Path) -> Chaos | None:
    """What was written of this run, None where nothing was. Raises ConfigError where it cannot be read."""
    path = _path(run_dir)
    if not path.is_file():
        return None
    value = read_json(path)
    if isinstance(value, dict):
        value.pop("sound", None)
    return codec.decode(Chaos, value, str(path))


def _path(run_dir: Path) -> Path:
    return run_dir / "chaos.json"
