"""A plan from its degrees alone, for a module that no ModelSpec describes."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import TypeVar

from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError, Gathering, Problem
from meshwright.spec.plan import Axis, AxisName, BlockGroup, Plan, Recompute, Schedule, Sharding, Stage
from meshwright.spec.synchronize import GradientSync

E = TypeVar("E", bound=StrEnum)


def plan_of_degrees(
    *,
    replicate: int = 1,
    shard: int = 1,
    tensor: int = 1,
    sharding: Sharding | str | None = None,
    recompute: Recompute | str = Recompute.NONE,
    precision: Precision | str = Precision.BF16,
    gradients: Precision | str = Precision.FP32,
    microbatches: int = 1,
) -> Plan:
    """replicate x shard x tensor ranks, tensor varying fastest; all blocks alike, whatever their number.

    `sharding` is zero3 where `shard` is more than 1 unless another is named. Raises ConfigError, with all that is wrong
    at once, for a degree that is no whole number from 1 on or a word that is none of the choices.
    """
    sizes = {AxisName.REPLICATE: replicate, AxisName.SHARD: shard, AxisName.TENSOR: tensor}
    counts = {**{name.value: size for name, size in sizes.items()}, "microbatches": microbatches}
    gathered = Gathering()
    gathered.problems += [
        Problem(what=f"{size!r} is no whole number from 1 on", where=name, fix="use 1")
        for name, size in counts.items()
        if not isinstance(size, int) or isinstance(size, bool) or size < 1
    ]
    words = {"recompute": (Recompute, recompute), "precision": (Precision, precision)}
    words |= {"gradients": (Precision, gradients)} | ({} if sharding is None else {"sharding": (Sharding, sharding)})
    for where, (kind, word) in words.items():
        gathered.attempt(partial(_choice, kind, word, where=where))
    gathered.tell()
    usual = Sharding.PARAMETERS if shard > 1 else Sharding.NONE
    group = BlockGroup(
        start=0,
        stop=1,
        tensor=tensor,
        sharding=usual if sharding is None else _choice(Sharding, sharding, where="sharding"),
        recompute=_choice(Recompute, recompute, where="recompute"),
        precision=_choice(Precision, precision, where="precision"),
    )
    return Plan(
        model="a module",
        cluster="the processes that run",
        axes=tuple(Axis(name=name, size=size) for name, size in sizes.items()),
        stages=(Stage(rank=0, groups=(group,)),),
        schedule=Schedule(microbatches=microbatches),
        sequence_length=1,
        microbatch=1,
        gradients=GradientSync(precision=_choice(Precision, gradients, where="gradients")),
    )


def _choice(kind: type[E], word: str, *, where: str) -> E:
    try:
        return kind(word)
    except ValueError:
        choices = ", ".join(kind)
        raise ConfigError(Problem(what=f"{word!r} is not a choice", where=where, fix=f"use {choices}")) from None
