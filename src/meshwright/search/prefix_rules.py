"""Rules of prefix masks: prompts that the data tell, each whole where it is attended."""

from __future__ import annotations

from meshwright.search.rules import Rule, Scope
from meshwright.spec.errors import Problem
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design

PROMPTS = "prefix-has-prompts"


def prompt_problem(model: ModelSpec, job: JobSpec) -> Problem | None:
    """The data of a model with a prefix mask say where prompts end; without, every token would see the past alone."""
    if not model.prefix or not job.data.sources or job.data.masks:
        return None
    return Problem(
        where="job.data.sources[0].prompt_field",
        what=f"{model.name} has a prefix mask, and no source has prompts",
        fix="name the field of the prompts, or choose prefix = 0 in the model, which is causal",
    )


def prefix_has_prompts(design: Design) -> Problem | None:
    """As `prompt_problem`."""
    return prompt_problem(design.model, design.job)


def prefix_in_one_slice(design: Design) -> Problem | None:
    """A prompt's first slice would see keys of later slices, which are computed after it."""
    slices = design.plan.schedule.slices
    if slices == 1 or not design.model.prefix:
        return None
    what = f"a prompt may reach beyond its slice, one of {slices}, and a prefix mask lets it see all of itself"
    return Problem(where="plan.schedule.slices", what=what, fix="choose 1")


PREFIX_RULES = (
    Rule(name=PROMPTS, scope=Scope.PLAN, check=prefix_has_prompts),
    Rule(name="prefix-in-one-slice", scope=Scope.PLAN, check=prefix_in_one_slice),
)
