"""What no choice of plan can mend: a batch of broken sequences, positions that were not learned, missing arithmetic."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from fnmatch import fnmatchcase

from meshwright.cost.stacks import software_of
from meshwright.search.compression_rules import SOUND
from meshwright.search.constraints import limits
from meshwright.search.degree_rules import beyond_positions
from meshwright.search.prefix_rules import PROMPTS, prompt_problem
from meshwright.search.quorum_rules import ASKED, quorum_beyond, quorum_problem
from meshwright.search.rules import Rule, Scope
from meshwright.search.trainer import Trainer
from meshwright.spec.cluster import ClusterSpec, Precision
from meshwright.spec.codec import nearest
from meshwright.spec.compression import compression_problems
from meshwright.spec.errors import ConfigError, Gathering, Problem, name_rule
from meshwright.spec.job import Automatic, JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design, Offload
from meshwright.spec.synchronize import SyncKind
from meshwright.spec.tensors import prefix, tensors

GROUPS, SOFTWARE = "groups-name-parameters", "software-known"


def check_job(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, *, trainer: Trainer | None = None) -> None:
    """Raises ConfigError with all that no choice of plan can mend, for plans that `trainer` has words for."""
    gathered = Gathering()
    problems = gathered.problems
    if job.sequence_length < 1 or job.batch_tokens < job.sequence_length or job.batch_tokens % job.sequence_length:
        length = max(job.sequence_length, 1)
        whole = max(1, round(job.batch_tokens / length)) * length
        what = f"{job.batch_tokens:,} tokens are not whole sequences of {job.sequence_length:,}"
        count = whole // length
        words = f"choose {whole} tokens ({count:,} sequence{'' if count == 1 else 's'})"
        fix = words if job.sequence_length >= 1 else "choose a sequence length of 1 or more"
        problems.append(Problem(where="job.batch_tokens", what=what, why="rule batch-is-asked", fix=fix))
    too_long = beyond_positions(model, job.sequence_length, where="job.sequence_length")
    if too_long is not None:
        problems.append(replace(too_long, why="rule sequence-fits-positions"))
    problems += [name_rule(problem, GROUPS) for problem in group_problems(model, job)]
    if (mixed := software_problem(cluster, job)) is not None:
        problems.append(name_rule(mixed, SOFTWARE))
    for place, compression in enumerate(job.synchronize.compressions):
        unsound = compression_problems(compression, where=f"job.synchronize.compressions[{place}]")
        problems += [name_rule(problem, SOUND) for problem in unsound]
        if compression.kind in [each.kind for each in job.synchronize.compressions[:place]]:
            where, what = f"job.synchronize.compressions[{place}]", f"{compression.kind} is named twice"
            problems.append(Problem(where=where, what=what, why=f"rule {SOUND}", fix="name each kind once"))
    if (problem := prompt_problem(model, job)) is not None:
        problems.append(name_rule(problem, PROMPTS))
    if (problem := gathered.attempt(lambda: quorum_problem(job) or quorum_beyond(cluster, job))) is not None:
        problems.append(name_rule(problem, ASKED))
    asked = gathered.attempt(lambda: limits(job.constraints))
    hostless = [group.name for group in cluster.groups if group.host is None]
    if asked is not None and hostless and asked.fixed.get("offload", Offload.NONE.value) != Offload.NONE.value:
        what = f"nothing is known of the link from {hostless[0]} to its host's memory"
        fix = "drop it, or give cluster.groups.host"
        where = "job.constraints.fix.offload"
        problems.append(Problem(where=where, what=what, why="rule offload-has-host", fix=fix))
    allowed = gathered.attempt(lambda: allowed_precisions(job, cluster)) or ()
    if trainer is not None and not set(allowed) & set(trainer.precisions):
        problems += [_unspoken(cluster, job, precision, trainer) for precision in allowed]
    for precision in allowed:
        problems += _precision_problems(cluster, job, precision)
    gathered.tell()


def group_problems(model: ModelSpec, job: JobSpec) -> list[Problem]:
    """Patterns of the optimizer's groups that no parameter of the model has a name for: they would do nothing."""
    if not job.optimizer.groups:
        return []
    names = [
        f"{prefix(block, index)}{entry.name}" for index, block in enumerate(model.blocks) for entry in tensors(block)
    ]
    return [
        Problem(
            where=f"job.optimizer.groups[{place}].names",
            what=f"no parameter of {model.name} is called {pattern!r}",
            fix=nearest(pattern, names) if "*" not in pattern else f"names are like {names[len(names) // 2]!r}",
        )
        for place, group in enumerate(job.optimizer.groups)
        for pattern in group.names
        if not any(fnmatchcase(name, pattern) for name in names)
    ]


def groups_name_parameters(design: Design) -> Problem | None:
    """Every group of the optimizer is of some parameter."""
    return next(iter(group_problems(design.model, design.job)), None)


def allowed_precisions(job: JobSpec, cluster: ClusterSpec) -> tuple[Precision, ...]:
    """The precision that the job fixes, or its own and the others that it allows, without those that it forbids; where
    it says none, those that the devices are best at.

    Raises ConfigError where it forbids them all.
    """
    asked = limits(job.constraints)
    own = usual_precisions(cluster) if isinstance(job.precision, Automatic) else (job.precision,)
    named = dict.fromkeys((*own, *job.other_precisions))
    if "precision" in asked.fixed:
        named = dict.fromkeys([Precision(str(asked.fixed["precision"]))])
    refusals = {kind: asked.refusal("precision", kind.value) for kind in named}
    found = tuple(kind for kind, refusal in refusals.items() if refusal is None)
    if found:
        return found
    raise ConfigError(
        Problem(where=_field(job, kind), what=f"{kind.value} is forbidden by {refusal}")
        for kind, refusal in refusals.items()
    )


def usual_precisions(cluster: ClusterSpec) -> tuple[Precision, ...]:
    """What a job that says no precision is trained in on `cluster`: bf16 where all devices have it, and fp32 beside it
    where one of them is faster in that; else fp16 or fp32."""
    peaks = [group.device.peak_flops for group in cluster.groups]
    if not all(peak.get(Precision.BF16) for peak in peaks):
        halves = (Precision.FP16,) if all(peak.get(Precision.FP16) for peak in peaks) else ()
        return (*halves, Precision.FP32)
    emulated = any(peak.get(Precision.FP32, 0.0) > peak[Precision.BF16] for peak in peaks)
    return (Precision.BF16, Precision.FP32) if emulated else (Precision.BF16,)


def allowed_meetings(job: JobSpec) -> tuple[str, ...]:
    """How replicas may meet, of MEETINGS: in every step, and as the job allows besides, or as it fixes, without what it
    forbids."""
    asked, also = limits(job.constraints), [each.kind for each in job.synchronize.compressions]
    named = dict.fromkeys([SyncKind.EVERY_STEP.value, *(kind.value for kind in job.synchronize.kinds), *also])
    if "sync" in asked.fixed:
        named = dict.fromkeys([str(asked.fixed["sync"])])
    return tuple(word for word in named if asked.allows("sync", word))


def _field(job: JobSpec, precision: Precision) -> str:
    """Where the job names `precision`."""
    if "precision" in job.constraints.fix:
        return "job.constraints.fix.precision"
    if precision not in job.other_precisions or precision is job.precision:
        return "job.precision"
    return f"job.other_precisions[{job.other_precisions.index(precision)}]"


def _unspoken(cluster: ClusterSpec, job: JobSpec, precision: Precision, trainer: Trainer) -> Problem:
    """A precision that the trainer has no words for, with those that it has and all devices know."""
    what = f"{trainer.name} has no words for {precision.value} products"
    return Problem(where=_field(job, precision), what=what, fix=_other(cluster, job, precision, trainer.precisions))


def _other(cluster: ClusterSpec, job: JobSpec, precision: Precision, among: Collection[Precision]) -> str:
    """How the job names another precision than `precision`, one of `among` that all devices multiply in; the fastest
    first, and bf16 before fp16, whose gradients need a scale."""
    first = cluster.groups[0].device.peak_flops
    devices = [group.device for group in cluster.groups]
    common = [kind for kind in first if kind in among and all(device.peak_flops.get(kind) for device in devices)]
    common.sort(key=lambda kind: (-first[kind], kind is Precision.FP16))
    if not common:
        return "choose devices with a precision in common"
    where, names = _field(job, precision), [kind.value for kind in common]
    if where.startswith("job.other_precisions"):
        return f"leave it out, or choose {', '.join(names)}"
    others = f" (or {', '.join(names[1:])})" if names[1:] else ""
    return f"--set {where.removeprefix('job.')}={names[0]}{others}"


def _precision_problems(cluster: ClusterSpec, job: JobSpec, precision: Precision) -> list[Problem]:
    """Devices that cannot multiply in `precision`, with the precisions that all of them can, the fastest first."""
    devices = {group.device.name: group.device for group in cluster.groups}
    return [
        Problem(
            where=_field(job, precision),
            what=f"{name} has no {precision.value} arithmetic",
            why="rule precision-known",
            fix=_other(cluster, job, precision, tuple(Precision)),
        )
        for name, device in devices.items()
        if not (precision.multiplies and device.peak_flops.get(precision))
    ]


def software_problem(cluster: ClusterSpec, job: JobSpec) -> Problem | None:
    """Why nothing is known that plans of `job` on `cluster` could be priced as."""
    try:
        software_of(job, cluster)
    except ConfigError as error:
        return error.problems[0]
    return None


def software_known(design: Design) -> Problem | None:
    """One software, of which it is known what it does, runs on all devices."""
    return software_problem(design.cluster, design.job)


JOB_RULES = (
    Rule(name=GROUPS, scope=Scope.PLAN, check=groups_name_parameters),
    Rule(name=SOFTWARE, scope=Scope.PLAN, check=software_known),
)
