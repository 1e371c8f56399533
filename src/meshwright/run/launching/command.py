"""Command: what every node runs, in whatever place: its part of the plan."""

from __future__ import annotations

from pathlib import Path

NODE_MODULE = "meshwright.run.launching.node"


def node_command(
    run: Path,
    *,
    python: str,
    node: str,
    nodes: str,
    head: str,
    session: str,
    design: str = "",
    first_node: int = 0,
    stop_after: float | None = None,
    leash: bool = False,
) -> list[str]:
    """The words that start one node's part of the run.

    `node` and `nodes` are numbers, or names of variables that hold them there; `first_node` is added to the number.
    `head` is HOST:PORT of node 0, `session` tells this launch from any other, `design` is a file that begins the run.
    `stop_after` is seconds; on a `leash` it stops when its standard input ends.
    """
    words = [python, "-m", NODE_MODULE, str(run), "--node", node, "--nodes", nodes, "--head", head]
    words += ["--session", session]
    words += ["--first-node", str(first_node)] if first_node else []
    words += ["--design", design] if design else []
    words += ["--stop-after", f"{stop_after:g}"] if stop_after is not None else []
    return words + (["--leash"] if leash else [])
