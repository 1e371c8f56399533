"""What a run ran on: versions, host and command, kept beside its numbers."""

from __future__ import annotations

import platform
import sys
from datetime import UTC, datetime

from meshwright.run.machine import installed, this_machine
from meshwright.spec.plan import Design
from meshwright.spec.secrets import words_without_secrets


def environment(design: Design) -> dict[str, object]:
    """Versions, host and command of this run: what someone needs to understand its numbers."""
    import torch

    machine = this_machine()
    return {
        "command": words_without_secrets(sys.argv),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in ("meshwright", "torch", "numpy", "tokenizers")},
        "processor": machine.processor,
        "cores": machine.cores,
        "memory_bytes": machine.memory_bytes,
        "accelerators": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "plan": design.plan.digest(),
    }
