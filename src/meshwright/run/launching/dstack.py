"""dstack: a plan as a task for `dstack apply`, which is submitted again when it saved its state or lost a machine.

Fields are those of dstack's own models of tasks and profiles (dstack.ai/docs/reference/dstack.yml/task).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from meshwright.run.launching.ask import PORT, Ask
from meshwright.run.launching.clouds import DESIGN_AT, accelerator_name, design_name
from meshwright.run.launching.command import node_command
from meshwright.run.launching.shares import Share, check_alike
from meshwright.run.launching.yaml_text import yaml_text

_SHARED_GB = 4  # for a worker
_HEAD, _SESSION = f'"$DSTACK_MASTER_NODE_IP:{PORT}"', '"$DSTACK_RUN_NAME"'


def task(ask: Ask, *, found: Sequence[Share], grace: int) -> str:
    """The document. Raises ConfigError where nodes are unlike or their devices are not known by name."""
    return yaml_text(document(ask, found=found, grace=grace))


def document(ask: Ask, *, found: Sequence[Share], grace: int) -> dict[str, Any]:
    """As `task`, of plain values. A run that reaches `max_duration` is not submitted again, so it saves before."""
    share = check_alike(tuple(found), place=ask.place)
    volume, folder = ask.mount
    words = node_command(
        ask.run,
        python=ask.python or "python",
        node="DSTACK_NODE_RANK",
        nodes="DSTACK_NODES_NUM",
        head=_HEAD,
        session=_SESSION,
        design=DESIGN_AT,
        stop_after=None if ask.time_seconds is None else ask.time_seconds - grace,
    )
    command = " ".join(word if word in (_HEAD, _SESSION) else shlex.quote(word) for word in words)
    limit = {} if ask.time_seconds is None else {"max_duration": f"{int(ask.time_seconds)}s"}
    return {
        "type": "task",
        "name": ask.name,
        "nodes": len(found),
        "image": ask.image,
        "files": [f"./{design_name(ask.name)}:{DESIGN_AT}"],
        "commands": [command],
        "volumes": [{"name": volume, "path": folder}],
        "resources": _resources(share),
        "retry": {"on_events": ["no-capacity", "interruption", "error"]},
        **limit,
        "stop_duration": f"{grace}s",
    }


def _resources(share: Share) -> dict[str, Any]:
    """With room in /dev/shm, of which a container has 64 MB unless asked: NCCL and loaders of text meet there."""
    shared = {"shm_size": f"{_SHARED_GB * share.count}GB"}
    if not share.accelerator:
        return {"cpu": f"{share.cores}..", "memory": f"{-(-share.memory_bytes // 2**30)}GB..", **shared}
    return {"gpu": ":".join([*filter(None, accelerator_name(share, place="dstack")), str(share.count)]), **shared}


def volume_notes(ask: Ask, *, nodes: int) -> tuple[str, ...]:
    """What has to be so for all nodes to see the run."""
    if nodes == 1:
        return ()
    volume, folder = ask.mount
    return (
        f"all {nodes} nodes mount the volume {volume}, and most of dstack's network volumes are disks that one machine"
        f" can have: where yours is, mount a shared file system on the hosts and write `- HOST-FOLDER:{folder}` under"
        " volumes",
    )
