"""Ask: where a plan is to be started and what is asked of that place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from meshwright.spec.errors import ConfigError, Problem

PORT = 29500
RESTARTS = 3


class Place(StrEnum):
    LOCAL = "local"
    SSH = "ssh"
    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    SKYPILOT = "skypilot"
    DSTACK = "dstack"

    @property
    def is_far(self) -> bool:
        """Whether its machines may see no file of this one."""
        return self in (Place.KUBERNETES, Place.SKYPILOT, Place.DSTACK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is asked of `place`; None is not asked. `run` is the run directory as the nodes see it.

    `time_seconds` is how long it may take, `grace_seconds` how long before its end, or after the word that the machines
    are wanted back, the state is saved. `volume` is a name and the folder where it is mounted. `extra` are options of
    SLURM's. `plan` is the design's file and `sets` the fields of it that are set otherwise; `resume` goes on with the
    run that is in the directory.
    """

    place: Place
    run: Path
    plan: str = ""
    sets: tuple[str, ...] = ()
    resume: bool = False
    time_seconds: float | None = None
    grace_seconds: float | None = None
    python: str | None = None
    hosts: tuple[str, ...] | None = None
    address: str | None = None
    partition: str | None = None
    account: str | None = None
    extra: tuple[str, ...] | None = None
    image: str | None = None
    volume: str | None = None
    namespace: str | None = None
    restarts: int | None = None

    @property
    def name(self) -> str:
        """What a job is called after its run: small letters, digits and hyphens, at most 30."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.run.name.lower()).strip("-")[:30].strip("-")
        return plain if plain[:1].isalpha() else f"run-{plain}".strip("-")

    @property
    def mount(self) -> tuple[str, str]:
        """The volume's name and its folder. Raises ConfigError where it is not both, or the run is not in it."""
        name, _, folder = (self.volume or "").partition(":")
        if not name or not folder.startswith("/"):
            what = "no volume is named" if self.volume is None else f"{self.volume!r} is no volume and folder"
            why = "the run is kept where every node sees it"
            raise ConfigError(Problem(what=what, where="--volume", why=why, fix="write --volume NAME:/folder"))
        if PurePosixPath(folder) not in PurePosixPath(self.run).parents:
            fix = f"--run {folder.rstrip('/')}/{self.run.name}"
            raise ConfigError(
                Problem(what=f"{self.run} is not in the volume's folder {folder}", where="--run", fix=fix)
            )
        return name, folder


_OF: Mapping[str, tuple[Place, ...]] = MappingProxyType(
    {
        "time_seconds": (Place.LOCAL, Place.SSH, Place.SLURM, Place.DSTACK),
        "grace_seconds": (Place.SLURM, Place.KUBERNETES, Place.DSTACK),
        "python": (Place.SSH, Place.SLURM, Place.KUBERNETES, Place.SKYPILOT, Place.DSTACK),
        "hosts": (Place.SSH,),
        "address": (Place.SSH,),
        "partition": (Place.SLURM,),
        "account": (Place.SLURM,),
        "extra": (Place.SLURM,),
        "image": (Place.KUBERNETES, Place.SKYPILOT, Place.DSTACK),
        "volume": (Place.KUBERNETES, Place.SKYPILOT, Place.DSTACK),
        "namespace": (Place.KUBERNETES,),
        "restarts": (Place.KUBERNETES, Place.SKYPILOT),
    }
)
_OPTIONS = {"time_seconds": "--time", "grace_seconds": "--grace", "extra": "--scheduler"}
_NEEDED: Mapping[str, str] = MappingProxyType(
    {
        "hosts": "write --hosts ONE,TWO, one for each node of the plan, in its order",
        "image": "write --image NAME of one that has python, torch and meshwright",
        "volume": "write --volume NAME:/folder, which every node mounts and the run is kept in",
    }
)


def check(ask: Ask) -> None:
    """What is asked is of its place, and what the place needs is asked. Raises ConfigError with each problem."""
    problems = []
    for field, places in _OF.items():
        option, given = _OPTIONS.get(field, f"--{field}"), getattr(ask, field) is not None
        if given and ask.place not in places:
            whose = " and ".join(f"--on {place}" for place in places)
            problems.append(Problem(what=f"--on {ask.place} has no use of it", where=option, fix=f"it is of {whose}"))
        elif not given and field in _NEEDED and ask.place in places:
            problems.append(Problem(what=f"--on {ask.place} needs it", where=option, fix=_NEEDED[field]))
    if ask.place.is_far and not ask.run.is_absolute():
        why = "the machines do not see this folder"
        fix = "name it from the root, as they see it"
        problems.append(Problem(what=f"{ask.run} is not from the root", where="--run", why=why, fix=fix))
    if problems:
        raise ConfigError(problems)


def check_start(ask: Ask, *, submit: bool, follow: bool) -> None:
    """The place can be started from here, and followed, if that is asked. Raises ConfigError where it cannot."""
    if submit and ask.place.is_far:
        what = f"--on {ask.place} is not started from here"
        raise ConfigError(Problem(what=what, where="--submit", fix="--out FILE writes it for the place's own command"))
    if follow and not (submit and ask.place is Place.SLURM):
        what = "only a job that is handed to SLURM is followed"
        fix = "leave it out: over ssh and here the command stays until the end" if submit else "add --submit"
        raise ConfigError(Problem(what=what, where="--follow", fix=fix))
