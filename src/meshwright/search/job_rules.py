"""What no choice of plan can mend: a batch of broken sequences, positions that were not learned, missing arithmetic."""

from __future__ import annotations

from meshwright.spec.cluster import ClusterSpec, Precision
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec


def check_job(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, *, precision: Precision) -> None:
    """Raises ConfigError for what no choice of plan can mend."""
    problems = []
    if job.sequence_length < 1 or job.batch_tokens < job.sequence_length or job.batch_tokens % job.sequence_length:
        length = max(job.sequence_length, 1)
        whole = max(1, round(job.batch_tokens / length)) * length
        what = f"{job.batch_tokens:,} tokens are not whole sequences of {job.sequence_length:,}"
        count = whole // length
        words = f"choose {whole} tokens ({count:,} sequence{'' if count == 1 else 's'})"
        fix = words if job.sequence_length >= 1 else "choose a sequence length of 1 or more"
        problems.append(Problem(where="job.batch_tokens", what=what, why="rule batch-is-asked", fix=fix))
    positions = model.embedding.positions
    if positions and job.sequence_length > positions:
        what = f"{job.sequence_length:,} is more than the {positions:,} positions the model has learned"
        fix = f"choose {positions} or less"
        problems.append(Problem(where="job.sequence_length", what=what, why="rule sequence-fits-positions", fix=fix))
    problems += _precision_problems(cluster, job, precision)
    if problems:
        raise ConfigError(problems)


def _precision_problems(cluster: ClusterSpec, job: JobSpec, precision: Precision) -> list[Problem]:
    """Devices that cannot multiply in `precision`, with the precisions that all of them can, the fastest first."""
    devices = {group.device.name: group.device for group in cluster.groups}
    first = cluster.groups[0].device.peak_flops
    common = [kind for kind in first if all(device.peak_flops.get(kind) for device in devices.values())]
    common.sort(key=lambda kind: -first[kind])
    field_name = "constraints.fix.precision" if "precision" in job.constraints.fix else "precision"
    others = f" (or {', '.join(kind.value for kind in common[1:])})" if common[1:] else ""
    fix = f"--set {field_name}={common[0].value}{others}" if common else "choose devices with a precision in common"
    return [
        Problem(
            where=f"job.{field_name}",
            what=f"{name} has no {precision.value} arithmetic",
            why="rule precision-known",
            fix=fix,
        )
        for name, device in devices.items()
        if not device.peak_flops.get(precision)
    ]
