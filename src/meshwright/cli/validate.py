"""`meshwright validate`: published runs replayed, and how far the predictions are off, source by source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def validate(
    path: Annotated[Path, typer.Argument(help="A table of published runs; docs/validate.md names its columns.")],
    predictions: Annotated[
        Path | None, typer.Option("--predictions", help="Write every row's prediction to this CSV file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Predict every run of a table with nothing fitted, and score the predictions source by source."""
    from meshwright import replay
    from meshwright.cli.output import console, note, print_json
    from meshwright.report import terminal_validation

    if predictions is not None:
        replay.check_writable(predictions, beside=path)
    found = replay.validate(path, progress=terminal_validation.Progress(note), processes=os.cpu_count() or 1)
    if predictions is not None:
        replay.write_predictions(found, predictions)
        note(f"predictions  {predictions}")
    if as_json:
        print_json(
            {
                "overall": found.overall,
                "sources": found.sources,
                "regimes": found.regimes,
                "reasons": found.reasons,
                "remarks": found.remarks,
            }
        )
    else:
        console().print(terminal_validation.validation(found))
