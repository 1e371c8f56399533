"""`meshwright version`: what is installed."""

from __future__ import annotations

from typing import Annotated

import typer


def version(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the versions of meshwright, Python and what it stands on."""
    import platform
    from importlib import metadata

    from meshwright import __version__
    from meshwright.cli.output import print_json

    found = {"meshwright": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "typer", "rich"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    if as_json:
        print_json(found)
        return
    for name, number in found.items():
        print(f"{name:<11} {number}")
