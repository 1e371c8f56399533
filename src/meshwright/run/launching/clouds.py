"""What SkyPilot and dstack have in common: names of accelerators, and the design as a file beside the document."""

from __future__ import annotations

import re

from meshwright.run.launching.shares import Share
from meshwright.spec.errors import ConfigError, Problem

DESIGN_AT = "/tmp/meshwright-design.json"


def accelerator_name(share: Share, *, place: str) -> tuple[str, str]:
    """The model and, where its name says it, the memory of the share's accelerators: `A100` and `80GB`.

    Raises ConfigError for devices whose names are nobody else's.
    """
    name = share.machine.device.name
    model, *rest = re.sub(r"^RTX-", "RTX", name).split("-")
    memory = next((word for word in rest if re.fullmatch(r"\d+GB", word)), "")
    if "GCD" in rest or not re.fullmatch(r"[A-Z]+\d+[A-Za-z0-9]*", model):
        what = f"{place} has no accelerator of the name {name!r}"
        fix = "name the device in the cluster file as `meshwright clusters` does, H100 or A100-80GB"
        raise ConfigError(Problem(what=what, where="cluster.groups.device.name", fix=fix))
    return model, memory


def design_name(job: str) -> str:
    """The file beside the document that holds the design."""
    return f"{job}.design.json"
