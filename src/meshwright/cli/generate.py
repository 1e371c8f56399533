"""`meshwright generate`: text from the newest checkpoint of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def generate(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What the text begins with.")] = "",
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, help="How many tokens to write at most.")] = 200,
    temperature: Annotated[float, typer.Option("--temperature", "-t", min=0.0, help="0: the likeliest.")] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Choose among so many tokens; 0: all.")] = 50,
    seed: Annotated[int, typer.Option("--seed", help="The same seed writes the same text.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write text with the model of a run; the run keeps it for its page."""
    from meshwright.cli.output import print_json, tell
    from meshwright.run.generate import generate as write

    found = write(run, prompt, tokens=tokens, temperature=temperature, top_k=top_k or None, seed=seed)
    for line in found.lines():
        tell(line)
    if as_json:
        document = {"run": str(run), "prompt": prompt, "text": found.text}
        print_json({**document, "step": found.step, "passed_over": found.passed_over})
    else:
        print(found.text)
