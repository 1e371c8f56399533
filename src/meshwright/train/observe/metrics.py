"""Metrics of a step as one flat object: what was learnt, how fast, and how that compares with the prediction."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.report import Report
from meshwright.train.events import Evaluated, StepDone

Metrics = dict[str, float | int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """What a step is measured against: FLOPs of the model in a step, FLOP/s of all devices, predicted seconds."""

    tokens_per_step: int
    model_flops: float
    peak_flops: float | None
    predicted_seconds: float

    @classmethod
    def of(cls, predicted: Report) -> Yardstick:
        return cls(
            tokens_per_step=predicted.tokens_per_step,
            model_flops=predicted.model_flops,
            peak_flops=predicted.peak_flops,
            predicted_seconds=predicted.step_seconds,
        )


def of_step(event: StepDone, *, yardstick: Yardstick) -> Metrics:
    """The object that metrics.jsonl keeps of a step.

    `mfu` is None where the peak is not known. `of_prediction` is measured over predicted speed: 1 is as predicted,
    less is slower. Models with experts have `expert_load`, the most loaded one's over the mean.
    """
    seconds = max(event.seconds, 1e-12)
    peak, expected = yardstick.peak_flops, yardstick.predicted_seconds
    load: Metrics = {} if event.expert_load is None else {"expert_load": event.expert_load}
    return {
        "step": event.step,
        "tokens": event.tokens,
        "loss": event.loss,
        "grad_norm": event.grad_norm,
        "learning_rate": event.learning_rate,
        "seconds": event.seconds,
        "tokens_per_second": yardstick.tokens_per_step / seconds,
        "mfu": yardstick.model_flops / (seconds * peak) if peak else None,
        "memory_bytes": event.memory_bytes,
        "of_prediction": expected / seconds if expected else None,
        **load,
    }


def of_evaluation(event: Evaluated) -> Metrics:
    """The object that metrics.jsonl keeps of an evaluation."""
    return {
        "step": event.step,
        "tokens": event.tokens,
        "validation_loss": event.loss,
        "bits_per_byte": event.bits_per_byte,
    }
