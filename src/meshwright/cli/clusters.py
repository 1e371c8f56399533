"""`meshwright clusters`: the clusters that are known by name, or one of them with the source of every number."""

from __future__ import annotations

from typing import Annotated

import typer


def clusters(
    name: Annotated[
        str | None,
        typer.Argument(help="A cluster's name, 64xH100, 8xH100+8xA100, or a file; all names when left out."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the clusters known by name, or show one with the source of every number."""
    from meshwright import catalog
    from meshwright.cli.output import console, print_json
    from meshwright.run.machine import cache_root

    if name is None:
        known = catalog.clusters()
        if as_json:
            print_json(known)
            return
        from meshwright.report import terminal_specs

        console().print(terminal_specs.names(known))
        return
    cluster = catalog.load_cluster(name, cache=cache_root())
    if as_json:
        print_json(cluster)
        return
    from meshwright.report import terminal_specs

    console().print(terminal_specs.cluster(cluster))
