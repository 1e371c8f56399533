"""What devices of one generation share: the curve of matrix products, the cost of a launch, how often they fail."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.cluster import MatrixCurve

LLAMA3_HOURS_BETWEEN_FAILURES = 16384 * 54 * 24 / 419


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """`measured` is the device whose products were measured; every other device is like it by analogy."""

    measured: str
    curve: MatrixCurve
    curve_source: str
    launch_seconds: float
    launch_source: str
    hours_between_failures: float | None = None
    failure_source: str = ""


AMPERE = Generation(
    measured="A100-80GB",
    curve=MatrixCurve(fraction=0.827, half_m=99.6, half_n=99.6, half_k=105.0),
    curve_source="fit to half of 16,200 bf16 products measured on A100 SXM (tables of aiconfigurator 0.12.0); on the "
    "other half the mean error is 8.7 %, the median 6.0 %",
    launch_seconds=6.3e-6,
    launch_source="intercept of that fit",
)
HOPPER = Generation(
    measured="H100",
    curve=MatrixCurve(fraction=0.842, half_m=13.5, half_n=13.5, half_k=168.0),
    curve_source="fit to half of 16,200 bf16 products measured on H100 SXM (tables of aiconfigurator 0.12.0); on the "
    "other half the mean error is 7.6 %, the median 5.3 %",
    launch_seconds=3.3e-6,
    launch_source="intercept of that fit",
    hours_between_failures=LLAMA3_HOURS_BETWEEN_FAILURES,
    failure_source="Llama 3, 2407.21783, section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 H100",
)
BLACKWELL = Generation(
    measured="B200",
    curve=MatrixCurve(fraction=0.66, half_m=13.5, half_n=13.5, half_k=168.0),
    curve_source="the largest share of peak in SimuMax's table of bf16 products measured on B200 (0.39 to 0.66); the "
    "dims of half speed by analogy with H100",
    launch_seconds=3.3e-6,
    launch_source="by analogy with H100",
)
OLDER = Generation(
    measured="",
    curve=MatrixCurve(fraction=0.8, half_m=99.6, half_n=99.6, half_k=105.0),
    curve_source="by analogy with A100; not measured",
    launch_seconds=6.3e-6,
    launch_source="by analogy with A100",
)
AMD = Generation(
    measured="",
    curve=MatrixCurve(fraction=0.7, half_m=128.0, half_n=128.0, half_k=128.0),
    curve_source="by analogy with A100 at a lower share of peak; not measured",
    launch_seconds=6.3e-6,
    launch_source="by analogy with A100",
)
