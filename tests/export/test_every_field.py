"""Every field of a job, a model and a plan is carried, refused or named as lost: a walk over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

import pytest

from meshwright.export import Exported, NotExpressible, Peer, export
from meshwright.spec.compression import TopK
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.job import (
    CheckpointSpec,
    Decay,
    ElasticSpec,
    EvaluationSpec,
    LearningRate,
    NonFinite,
    NonFiniteSpec,
    Spike,
    SpikeSpec,
    VerifySpec,
)
from meshwright.spec.low_rank import Pufferfish
from meshwright.spec.parts import FeedForward, Norm
from meshwright.spec.plan import Design, ExpertGrid, Sharding
from meshwright.spec.positions import Rotary, RotaryScaling
from tests.export.plans import design

MEGATRON, TITAN, DEEPSPEED = Peer.MEGATRON_LM, Peer.TORCHTITAN, Peer.DEEPSPEED
MODELS = [
    *((peer, "llama-3.1-8b") for peer in Peer),
    (MEGATRON, "gpt-39b"),
    (DEEPSPEED, "gpt-39b"),
    (TITAN, "qwen3-30b-a3b"),
    (MEGATRON, "mixtral-8x7b"),
    (DEEPSPEED, "mixtral-8x7b"),
    (MEGATRON, "deepseek-v3"),
]
_TEXT = "text and its tokenizer, which every export leaves to the user by name"
_SEARCH = "what the search may choose: the plan says what it chose"
_NAME = "a name, and no part of what is trained"
_TAG = "the tag of a type, whose other values are other types"
# Fields whose change changes nothing that is trained, by pattern, and why.
IDLE = {
    "job.name": _NAME,
    "job.sequence_length": _SEARCH,
    "job.learning_rate.warmup_fraction": "warmup_steps are said here",
    "*.schema": _NAME,
    "*.kind=tag": _TAG,
    "job.data.sources": _TEXT,
    "job.data.tokenizer": _TEXT,
    "job.data.validation_fraction": _TEXT,
    "job.data.cache": _TEXT,
    "job.precision": _SEARCH,
    "job.other_precisions": _SEARCH,
    "job.synchronize.*": _SEARCH,
    "job.skip.*": "refused where the plan has a pipeline, and of no effect without one",
    "job.objective": _SEARCH,
    "job.constraints.*": _SEARCH,
    "job.low_rank.*": "of a job that becomes low rank, which is refused",
    "model.source": _NAME,
    "model.name": _NAME,
    "model.max_positions": "how long the sequences were that it was trained with; the job says how long they are",
    "model.*.width": "the embedding says the width of all parts",
    "model.head.vocab": "the embedding says it",
    "model.layers.mixer.rotary.scaling.gain": "of yarn alone",
    "model.layers.transform.routing.chosen_groups": "of the groups there are",
    "plan.model": _NAME,
    "plan.cluster": _NAME,
    "plan.gradients.rounds.*": "of learners, who are refused",
    "plan.exchange.*": "of context ranks, which this plan has none of",
    "plan.schedule.kind": "one stage is 1f1b, whatever it is called",
    "plan.schedule.table": "of the kind `table`, which is refused",
    "plan.groups.tensor": "its axis says it, and the rules of plans that they are equal",
    "plan.groups.shards": "fewer than the axis has are refused; more are no plan",
    "plan.experts": "a grid of experts, where the model has some, is walked; where it has none it changes nothing",
}


IDLE_OF = {DEEPSPEED: ("job.learning_rate.decay_fraction",)}  # of wsd, which it refuses
PARTS = ("layers", "axes", "stages")  # left out of the whole, and walked by themselves
# What may be where nothing is.
ABSENT = (
    Norm(width=4096),
    Rotary(dims=128),
    RotaryScaling(kind="linear", factor=2.0),
    FeedForward(width=4096, hidden=1024, norm=Norm(width=4096)),
    TopK(),
    ExpertGrid(expert=2),
)


def entry(model: str, peer: Peer) -> Design:
    """A design of `model` whose job asks for everything that a trainer may lack, so that no field is without effect."""
    experts = ExpertGrid(expert=2) if model in ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3") else None
    decay = Decay.COSINE if peer is DEEPSPEED else Decay.WSD
    found = design(model, sharding=Sharding.GRADIENTS, experts=experts, decay=decay)
    job = replace(
        found.job,
        checkpoint=CheckpointSpec(every_steps=50, keep=3, keep_every_steps=100),
        elastic=ElasticSpec(min_ranks=4),
        non_finite=NonFiniteSpec(policy=NonFinite.SKIP),
        spike=SpikeSpec(policy=Spike.SKIP),
        verify=VerifySpec(every_steps=100),
        evaluation=EvaluationSpec(every_steps=500),
        learning_rate=LearningRate(decay=decay, warmup_steps=10, warmup_fraction=0.0),
    )
    alike = (found.model.layers[-1],) * len(found.model.layers)
    return replace(found, job=job, model=replace(found.model, layers=alike))


def others(value: Any) -> Iterator[Any]:
    """Other values of the same sort; of what is absent, what may be there."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, StrEnum):
        yield from (kind for kind in type(value) if kind is not value)
    elif isinstance(value, (int, float)):
        yield from (value + 1, value * 2 or 0.25)
    elif isinstance(value, str):
        yield "other"
    elif value is None:
        yield from (1, 0.5, *ABSENT)
    elif value == ():
        yield ("other",)


def leaves(value: Any, path: str, put: Callable[[Any], Any]) -> Iterator[tuple[str, list[Callable[[], Any]]]]:
    """The path of every leaf under `value`, and what makes the whole with another in its place."""
    for field in fields(value):
        old, name = getattr(value, field.name), f"{path}.{field.name}"

        def set_to(new: Any, name: str = field.name) -> Any:
            return put(replace(value, **{name: new}))

        if is_dataclass(old):
            yield from leaves(old, name, set_to)
        elif old == () and field.name in PARTS:
            continue
        elif field.name == "kind" and not isinstance(old, StrEnum):
            yield f"{name}=tag", []
        else:
            yield name, [lambda new=new, set_to=set_to: set_to(new) for new in others(old)]


def of_design(whole: Design) -> Iterator[tuple[str, list[Callable[[], Any]]]]:
    """The leaves of its job, of its model, all of whose layers are the first, and of its plan, of one stage."""
    model, plan = whole.model, whole.plan
    stage, group = plan.stages[0], plan.stages[0].groups[0]
    yield from leaves(whole.job, "job", lambda new: replace(whole, job=new))
    bare, layer = replace(model, layers=()), model.layers[0]
    yield from leaves(bare, "model", lambda new: replace(whole, model=replace(new, layers=model.layers)))
    yield from leaves(
        layer, "model.layers", lambda new: replace(whole, model=replace(model, layers=(new,) * len(model.layers)))
    )
    bare_plan = replace(plan, stages=(), axes=())
    yield from leaves(
        bare_plan, "plan", lambda new: replace(whole, plan=replace(new, stages=plan.stages, axes=plan.axes))
    )
    yield from leaves(
        group, "plan.groups", lambda new: replace(whole, plan=replace(plan, stages=(replace(stage, groups=(new,)),)))
    )


def is_told(make: Callable[[], Any], usual: Exported, peer: Peer) -> bool:
    """Whether the export of what `make` makes is another one or none, or there is no such design."""
    try:
        found = export(make(), to=peer)
    except MeshwrightError:
        return True
    except (ValueError, TypeError, AttributeError, AssertionError):
        return False
    return (found.text, found.lines) != (usual.text, usual.lines)


@pytest.mark.parametrize(("peer", "model"), MODELS)
def test_every_field_is_carried_refused_or_named_as_lost(peer: Peer, model: str) -> None:
    whole = entry(model, peer)
    usual = export(whole, to=peer)
    unsaid = []
    for path, makes in of_design(whole):
        if not any(fnmatchcase(path, pattern) for pattern in (*IDLE, *IDLE_OF.get(peer, ()))) and not any(
            is_told(make, usual, peer) for make in makes
        ):
            unsaid.append(path)
    assert unsaid == []


def test_a_job_that_becomes_low_rank_is_refused() -> None:
    whole = entry("llama-3.1-8b", MEGATRON)
    for job, words in (
        (replace(whole.job, low_rank=Pufferfish()), "cannot say factors"),
        (replace(whole.job, techniques=("mine",)), "cannot say the techniques mine"),
    ):
        with pytest.raises(NotExpressible, match=words):
            export(replace(whole, job=job), to=MEGATRON)
