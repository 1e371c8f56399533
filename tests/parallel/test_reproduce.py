"""A failing draw shrinks to the smallest that fails, and is told in one line that fails too."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import cache
from itertools import permutations

import pytest

from meshwright.spec.plan import AxisName, Sharding
from tests.parallel import drawing, draws, planted_cases, reproduce
from tests.parallel.draws import Draw
from tests.support.pool import Pool

SHARDED = [kind.value for kind in Sharding if kind is not Sharding.NONE]
# What a draw has that fails, and all that is left of it: more of one is refused, or is no simpler.
PLANTED: dict[str, tuple[Callable[[Draw], bool], tuple[Draw, ...]]] = {
    "sequence parallel": (
        lambda draw: draw.sequence_parallel,
        (Draw(axes=(("tensor", 2),), sequence_parallel=True),),
    ),
    "zero2": (
        lambda draw: draw.sharding == "zero2",
        tuple(Draw(axes=((axis, 2),), sharding="zero2") for axis in ("shard", "context")),
    ),
    "recompute in a pipeline": (
        lambda draw: draw.size(AxisName.PIPELINE) > 1 and "full" in draw.recompute,
        tuple(
            Draw(axes=(("pipeline", 2),), bounds=(2,), recompute=("full",), schedule=kind) for kind in ("1f1b", "gpipe")
        ),
    ),
    "clipping beside masks": (
        lambda draw: draw.clip_norm is not None and draw.masks == "some",
        (Draw(clip_norm=0.5, masks="some"),),
    ),
    "a second step of parameters in groups": (
        lambda draw: draw.steps > 1 and draw.groups != "none",
        tuple(Draw(steps=2, groups=name) for name in draws.GROUPS if name != "none"),
    ),
    "empty rows": (
        lambda draw: draw.empty_rows > 0,
        (
            Draw(axes=(("replicate", 2),), microbatches=2, empty_rows=1),
            *(Draw(axes=(("shard", 2),), microbatches=2, empty_rows=1, sharding=kind) for kind in SHARDED),
        ),
    ),
    "other devices of tensor ranks": (
        lambda draw: bool(draw.placement) and draw.size(AxisName.TENSOR) > 1,
        (Draw(axes=(("tensor", 2),), placement=(1, 0)),),
    ),
    "unlike blocks in the host's memory": (
        lambda draw: {"optimizer", "activations"} <= set(draw.offloads),
        tuple(Draw(offloads=kinds) for kinds in permutations(("none", "optimizer", "activations"))),
    ),
    "a layer of latent attention before experts": (
        lambda draw: any(kind.startswith("mixture after latent") for kind in draw.kinds),
        tuple(Draw(kinds=(f"mixture after latent {kind}",)) for kind in ("window", "prefix")),
    ),
    "a tied head after learned positions": (
        lambda draw: draw.tied and draw.positions,
        (Draw(tied=True, positions=True),),
    ),
    "another length": (lambda draw: draw.length == 24, (Draw(length=24),)),
}


@cache
def drawn() -> list[Draw]:
    return drawing.legal(60, seed=11)


@pytest.mark.parametrize("name", PLANTED)
def test_what_has_nothing_to_do_with_a_failure_is_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fails, smallest = PLANTED[name]

    def failure(_pool: Pool, draw: Draw, **_kwargs: object) -> AssertionError | None:
        return AssertionError(str(draw)) if fails(draw) else None

    monkeypatch.setattr(reproduce, "_failure", failure)
    failing = [draw for draw in drawn() if fails(draw)]
    assert len(failing) > 2
    for draw in failing:
        found, told = reproduce.shrink(Pool(), draw, AssertionError(str(draw)))
        assert found in smallest
        assert str(told) == str(found)


@pytest.mark.slow
def test_a_wrong_scale_is_told_in_one_line_that_fails_too(pool: Pool) -> None:
    draw = min((draw for draw in drawn() if draw.sequence_parallel), key=lambda draw: (draw.ranks, draw.layers))
    reproduce.check(pool, draw)
    with pytest.raises(AssertionError) as caught:
        reproduce.check(pool, draw, rank=planted_cases.wrongly_scaled)
    line, *_ = str(caught.value).splitlines()
    command, arguments = shlex.split(line)[:3], shlex.split(line)[3:]
    assert command == ["python", "-m", reproduce.__name__]
    assert draws.read(*arguments) in PLANTED["sequence parallel"][1]
    with pytest.raises(AssertionError, match=r"loss .*, not "):
        reproduce.main(arguments, rank=planted_cases.wrongly_scaled)
    reproduce.main(arguments)
