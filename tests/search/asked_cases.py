"""A legal and an illegal design for every rule of what a job allows."""

from __future__ import annotations

from dataclasses import replace

from meshwright.spec.cluster import Precision
from meshwright.spec.compression import Compression, PowerSgd
from meshwright.spec.plan import Design
from meshwright.spec.synchronize import SynchronizeSpec, SyncKind
from tests.search.compression_cases import Case, met
from tests.search.search_samples import design


def of_precision(*others: Precision) -> Design:
    """A plan in fp32, whose job is in bf16 and allows others."""
    made = design(precision=Precision.FP32)
    return replace(made, job=replace(made.job, precision=Precision.BF16, other_precisions=others))


def of_learners(*kinds: SyncKind) -> Design:
    """Learners that meet as local, whose job allows so many kinds."""
    made = met(kind=SyncKind.LOCAL)
    return replace(made, job=replace(made.job, synchronize=SynchronizeSpec(kinds=kinds)))


def of_compression(*kinds: Compression) -> Design:
    """Gradients that meet by powersgd of rank 1, whose job allows so many kinds."""
    made = met(compression=PowerSgd(rank=1))
    return replace(made, job=replace(made.job, synchronize=SynchronizeSpec(compressions=kinds)))


ASKED_CASES = {
    "precision-is-asked": Case(
        lambda: of_precision(Precision.FP32), lambda: of_precision(), "fp32 is not the job's bf16"
    ),
    "learners-are-asked": Case(
        lambda: of_learners(SyncKind.LOCAL),
        lambda: of_learners(SyncKind.EAGER),
        "the job allows every_step or eager of meeting, not local",
    ),
    "compression-is-asked": Case(
        lambda: of_compression(PowerSgd(rank=1)),
        lambda: of_compression(PowerSgd(rank=2)),
        "the job allows powersgd of rank 2 of gradients, not powersgd of rank 1",
    ),
}
