"""`meshwright convert`: weights of a Hugging Face folder into a run, and of a run into such a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert(
    source: Annotated[Path, typer.Argument(help="A Hugging Face folder, or a run directory.")],
    target: Annotated[Path, typer.Argument(help="Where the run, or the Hugging Face folder, is written.")],
    plan: Annotated[
        Path | None, typer.Option("--plan", "-p", help="Into a run: its design; a plan for one device without.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Out of a run: a config.json of its model to write beside it.")
    ] = None,
    rest: Annotated[
        Path | None,
        typer.Option("--rest", help="Out of a run: a folder of its model, for towers, indexers and further layers."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Out of a run: bf16, fp16 or fp32; that of the config, else bf16.")
    ] = None,
    shard_size: Annotated[
        str | None, typer.Option("--shard-size", help="Out of a run: the most bytes of a file; 5GB without.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare logits with transformers; 3 where they differ.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as one JSON document.")] = False,
) -> None:
    """Convert weights between Hugging Face folders and runs, one tensor in memory at a time."""
    from meshwright.cli.output import note, print_json, print_plain
    from meshwright.run import convert as work
    from meshwright.run.train import progress_lines
    from meshwright.spec.errors import ConfigError, Problem

    progress = progress_lines(note)
    if work.is_huggingface(source):
        odd = [("--config", config), ("--rest", rest), ("--dtype", dtype), ("--shard-size", shard_size)]
        problems = [
            Problem(what="is for weights out of a run", where=name, fix="leave it out")
            for name, value in odd
            if value is not None
        ]
        if problems:
            raise ConfigError(problems)
        found = work.to_run(source, target, plan=plan, check=verify, progress=progress)
    else:
        if plan is not None:
            raise ConfigError(Problem(what="is for weights into a run", where="--plan", fix="leave it out"))
        found = work.to_huggingface(
            source, target, config=config, rest=rest, dtype=dtype, shard_bytes=work.shard_bytes_of(shard_size or "5GB"),
            check=verify, progress=progress,
        )  # fmt: skip
    if as_json:
        print_json(found)
    else:
        for line in found.lines():
            print_plain(line)
