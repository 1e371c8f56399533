"""SkyPilot: a plan as a task for `sky jobs launch`, which begins again on other machines when these are taken away.

Fields are those of SkyPilot's own schema of tasks (docs.skypilot.co/en/latest/reference/yaml-spec.html).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from meshwright.run.launching.ask import PORT, RESTARTS, Ask
from meshwright.run.launching.clouds import DESIGN_AT, accelerator_name, design_name
from meshwright.run.launching.command import node_command
from meshwright.run.launching.shares import Share, check_alike
from meshwright.run.launching.yaml_text import yaml_text
from meshwright.spec.errors import ExitCode

_HEAD, _SESSION = f'"$head:{PORT}"', '"$SKYPILOT_TASK_ID"'
# Of two names for one GPU with more memory and less, SkyPilot's plain one has less.
_PLAIN = {("A100", "40GB"): "A100", ("V100", "16GB"): "V100", ("H100", "80GB"): "H100"}


def task(ask: Ask, *, found: Sequence[Share]) -> str:
    """The document. Raises ConfigError where nodes are unlike or their devices are not known by name."""
    return yaml_text(document(ask, found=found))


def document(ask: Ask, *, found: Sequence[Share]) -> dict[str, Any]:
    """As `task`, of plain values."""
    share = check_alike(tuple(found), place=ask.place)
    volume, folder = ask.mount
    restarts = RESTARTS if ask.restarts is None else ask.restarts
    recovery = {"max_restarts_on_errors": restarts, "recover_on_exit_codes": [int(ExitCode.SAVED)]}
    return {
        "name": ask.name,
        "num_nodes": len(found),
        "resources": {
            **_machine(share),
            **_network(share, nodes=len(found)),
            "image_id": f"docker:{ask.image}",
            "job_recovery": recovery,
        },
        "file_mounts": {DESIGN_AT: f"./{design_name(ask.name)}"},
        "volumes": {folder: volume},
        "run": _run(ask),
    }


def _machine(share: Share) -> dict[str, Any]:
    if not share.accelerator:
        return {"cpus": f"{share.cores}+", "memory": f"{-(-share.memory_bytes // 2**30)}+"}
    model, memory = accelerator_name(share, place="SkyPilot")
    name = _PLAIN.get((model, memory), f"{model}-{memory}" if memory else model)
    return {"accelerators": f"{name}:{share.count}"}


def _network(share: Share, *, nodes: int) -> dict[str, Any]:
    """The fast adapters that a plan on several nodes of accelerators is priced on."""
    return {"network_tier": "best"} if share.accelerator and nodes > 1 else {}


def _run(ask: Ask) -> str:
    words = node_command(
        ask.run,
        python=ask.python or "python",
        node="SKYPILOT_NODE_RANK",
        nodes="SKYPILOT_NUM_NODES",
        head=_HEAD,
        session=_SESSION,
        design=DESIGN_AT,
    )
    command = " ".join(word if word in (_HEAD, _SESSION) else shlex.quote(word) for word in words)
    return f'head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\nexec {command}\n'
