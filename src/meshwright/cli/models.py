"""`meshwright models`: the models that are known by name, or one of them in full."""

from __future__ import annotations

from typing import Annotated

import typer


def models(
    name: Annotated[
        str | None, typer.Argument(help="A model's name or its config.json; all names when left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the models known by name, or show one with its parameters and blocks."""
    from meshwright import catalog
    from meshwright.cli.output import console, print_json

    if name is None:
        known = catalog.models()
        if as_json:
            print_json(known)
            return
        from meshwright.report import terminal_specs

        console().print(terminal_specs.names(known))
        return
    model = catalog.load_model(name)
    if as_json:
        print_json(model)
        return
    from meshwright.report import terminal_specs

    console().print(terminal_specs.model(model))
