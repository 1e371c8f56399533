"""The command line: one file a command, no logic; see docs/commands.md."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` (the process's own when None) name; returns its exit code."""
    from meshwright.cli.app import run

    return run(arguments)
