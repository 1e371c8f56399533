"""Rules of elastic runs under torchft: what its replicas, which meet in every step and know nothing more of each other,
cannot be asked for."""

from __future__ import annotations

import re

from meshwright.search.rules import Rule, Scope
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import Problem
from meshwright.spec.job import ElasticBackend, NonFinite, Spike
from meshwright.spec.parts import Mixture
from meshwright.spec.plan import Design

_OWN = 'choose elastic.backend = "own"'
_WHERE = "job.elastic.backend"
_ADDRESS = re.compile(r"http://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}/?")


def is_elastic(design: Design) -> Problem | None:
    """Who chooses a backend has an elastic run."""
    spec = design.job.elastic
    if spec.backend is not ElasticBackend.TORCHFT or spec.on:
        return None
    fix = "choose how many ranks have to be left in job.elastic.min_ranks, or leave the backend out"
    return Problem(where=_WHERE, what="torchft is chosen for a run that ends with the first lost rank", fix=fix)


def has_lighthouse(design: Design) -> Problem | None:
    """A lighthouse is one of torchft's, and is named as torchft names it."""
    spec = design.job.elastic
    if not spec.lighthouse or (spec.by_torchft and _ADDRESS.fullmatch(spec.lighthouse)):
        return None
    where = "job.elastic.lighthouse"
    if spec.backend is not ElasticBackend.TORCHFT:
        fix = 'choose elastic.backend = "torchft", or leave the lighthouse out'
        return Problem(where=where, what="a lighthouse is given and nobody would ask it", fix=fix)
    fix = "name it as http://HOST:PORT, or leave it out: the run starts one"
    return Problem(where=where, what=f"{spec.lighthouse!r} is not where a lighthouse is", fix=fix)


def of_replicas(design: Design) -> Problem | None:
    """Replicas hold the whole model, each on one rank or in shards, and are lost whole: one is left."""
    plan, fewest = design.plan, design.job.elastic.min_ranks
    if not design.job.elastic.by_torchft:
        return None
    inside = {"pipeline": plan.pipeline, "tensor": plan.tensor, "context": plan.context}
    divided = [f"{name} {size}" for name, size in inside.items() if size > 1]
    if divided or plan.experts is not None:
        what = f"torchft keeps replicas of one rank or of shards, and the plan has {', '.join(divided) or 'experts'}"
        return Problem(where=_WHERE, what=what, fix=f"choose a plan of replicas and shards alone, or {_OWN}")
    if plan.replicate == 1:
        what = "torchft loses and keeps whole replicas, and the plan has one"
        return Problem(where=_WHERE, what=what, fix=f"choose a plan of several (constraints.fix.replicate), or {_OWN}")
    each = plan.world_size // plan.replicate
    if fewest > plan.world_size - each:
        what = f"replicas of {each} ranks are lost whole, and {fewest} of {plan.world_size} ranks are needed"
        fix = f"choose 1 to {plan.world_size - each}"
        return Problem(where="job.elastic.min_ranks", what=what, fix=fix)
    return None


def meet_plainly(design: Design) -> Problem | None:
    """Gradients of replicas are summed as they are, in every step: that is what torchft does."""
    gradients = design.plan.gradients
    if not design.job.elastic.by_torchft:
        return None
    if any(group.precision is Precision.FP16 for group in design.plan.groups):
        what = "replicas under torchft do not agree on how losses are scaled, which fp16 needs"
        return Problem(where="plan.stages", what=what, fix=f"choose fp32 or bf16, or {_OWN}")
    if gradients.word == "every_step":
        return None
    what = f"replicas meet by {gradients.word}, and torchft sums their whole gradients in every step"
    return Problem(where="plan.gradients", what=what, fix=f"choose every_step without compression, or {_OWN}")


def of_dense_layers(design: Design) -> Problem | None:
    """Nothing but gradients is balanced over all ranks, as routers of experts are."""
    mixed = any(isinstance(layer.transform, Mixture) for layer in design.model.layers)
    if not design.job.elastic.by_torchft or not mixed:
        return None
    what = "routers balance their experts over all ranks, which replicas under torchft do not ask"
    return Problem(where=_WHERE, what=what, fix=f"choose a model without experts, or {_OWN}")


def without_techniques(design: Design) -> Problem | None:
    """A technique may lay the model anew in the middle of a run, as one; replicas do not agree on that."""
    named = design.job.techniques
    if not design.job.elastic.by_torchft or not named:
        return None
    what = f"replicas under torchft do not agree on what {', '.join(named)} does on the way"
    return Problem(where="job.techniques", what=what, fix=f"leave it out, or {_OWN}")


def nothing_undone(design: Design) -> Problem | None:
    """Replicas that roll back, or look for rot in each other, would do so each by itself."""
    job = design.job
    if not job.elastic.by_torchft:
        return None
    for where, asked in (
        ("job.non_finite.policy", job.non_finite.policy is NonFinite.ROLL_BACK),
        ("job.spike.policy", job.spike.policy is Spike.ROLL_BACK),
    ):
        if asked:
            what = "replicas under torchft do not roll back as one"
            return Problem(where=where, what=what, fix=f'choose "stop" or "skip", or {_OWN}')
    if job.verify.every_steps:
        what = "replicas under torchft do not compare what they hold"
        return Problem(where="job.verify.every_steps", what=what, fix=f"choose 0, or {_OWN}")
    return None


def on_one_node(design: Design) -> Problem | None:
    """One launcher starts all replicas, and starts again what was lost."""
    groups = design.cluster.groups
    first = groups[0].devices_per_node
    if not design.job.elastic.by_torchft or design.plan.world_size <= first:
        return None
    what = "replicas under torchft on several nodes can be predicted and not trained yet"
    why = f"the plan has {design.plan.world_size} ranks, and a node has {first} devices"
    return Problem(where=_WHERE, what=what, why=why, fix=f"choose a plan for one node, or {_OWN}")


TORCHFT_RULES = (
    Rule(name="torchft-is-elastic", scope=Scope.RUNTIME, check=is_elastic),
    Rule(name="torchft-lighthouse", scope=Scope.RUNTIME, check=has_lighthouse),
    Rule(name="torchft-of-replicas", scope=Scope.RUNTIME, check=of_replicas),
    Rule(name="torchft-meets-plainly", scope=Scope.RUNTIME, check=meet_plainly),
    Rule(name="torchft-of-dense-layers", scope=Scope.RUNTIME, check=of_dense_layers),
    Rule(name="torchft-without-techniques", scope=Scope.RUNTIME, check=without_techniques),
    Rule(name="torchft-nothing-undone", scope=Scope.RUNTIME, check=nothing_undone),
    Rule(name="torchft-on-one-node", scope=Scope.RUNTIME, check=on_one_node),
)
