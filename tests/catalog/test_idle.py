"""What a job says that does nothing is told, with why, and what does something is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import catalog
from meshwright.catalog.idle import idle
from meshwright.catalog.jobs import job_remarks
from meshwright.spec.job import JobSpec


def told(*sets: str) -> list[str]:
    return [str(problem) for problem in idle(catalog.load_job(None, sets=sets))]


DILOCO = 'synchronize.kinds=["diloco"]'
SHORT = ("total_tokens=100M", "batch_tokens=1M")  # a hundred steps


@pytest.mark.parametrize(
    ("said", "lets", "why"),
    [
        (("synchronize.every=10",), DILOCO, "the job allows none"),
        (("synchronize.most_every=10",), DILOCO, "the job allows none"),
        (("synchronize.precision=int8",), "constraints.fix.sync=local", "the job allows none"),
        (("synchronize.most_every=9", "synchronize.every=8", DILOCO), "synchronize.every=0", "says how many steps"),
        (("learning_rate.decay_fraction=0.3",), "learning_rate.decay=wsd", "decay is cosine"),
        (
            ("learning_rate.final_fraction=0", "learning_rate.decay=constant"),
            "learning_rate.decay=cosine",
            "the learning rate is constant after warm-up",
        ),
        (
            ("learning_rate.warmup_fraction=0.1", "learning_rate.warmup_steps=10"),
            "learning_rate.warmup_steps=0",
            "warmup_steps says it already",
        ),
        (("learning_rate.warmup_steps=101", *SHORT), "total_tokens=101M", "ends in a warm-up of 101"),
        (
            ("learning_rate.decay_fraction=0.6", "learning_rate.warmup_fraction=0.5", "learning_rate.decay=wsd"),
            "learning_rate.warmup_fraction=0.4",
            "0.6 is more of the run than the 0.5 that warm-up leaves",
        ),
        (
            ("learning_rate.decay_fraction=0.6", "learning_rate.warmup_steps=50", "learning_rate.decay=wsd", *SHORT),
            "learning_rate.warmup_steps=40",
            "0.6 is more of the run than the 0.5 that warm-up leaves",
        ),
        (("checkpoint.keep_every_steps=20",), "checkpoint.every_steps=10", "nothing is saved on the way"),
        (
            ("checkpoint.keep_every_steps=15", "checkpoint.every_steps=10"),
            "checkpoint.every_steps=5",
            "every 30th stays, not every 15th",
        ),
        (
            ("checkpoint.keep_every_steps=33", "checkpoint.every_steps=10", *SHORT),
            "checkpoint.every_steps=11",
            "no step that is saved is a multiple of it in a run of 100 steps",
        ),
        (("checkpoint.every_steps=101", *SHORT), "checkpoint.every_steps=100", "the run has 100 steps"),
        (("evaluation.every_steps=101", *SHORT), "evaluation.every_steps=100", "the run has 100 steps"),
        (("verify.every_steps=101", *SHORT), "verify.every_steps=100", "the run has 100 steps"),
        (("evaluation.every_steps=5", "data.validation_fraction=0"), "data.validation_fraction=0.1", "no text is held"),
        (("evaluation.tokens=5", "data.validation_fraction=0"), "data.validation_fraction=0.1", "no text is held out"),
        (
            ("verify.policy=roll_back", "checkpoint.every_steps=50"),
            "verify.every_steps=10",
            "ranks are never compared",
        ),
        (("non_finite.most_in_a_row=3",), "non_finite.policy=skip", "the first one stops the run"),
        (("spike.window=64",), "spike.policy=stop", "spike.policy is ignore"),
        (("spike.deviations=3",), "spike.policy=skip", "spike.policy is ignore"),
        (("spike.most_in_a_row=3", "spike.policy=stop"), "spike.policy=skip", "the first one stops the run"),
        (("elastic.copies_every=3",), "elastic.min_ranks=1", "the loss of a rank ends the run"),
        (("elastic.replacements=3",), "elastic.min_ranks=1", "the loss of a rank ends the run"),
        (("elastic.backend=torchft",), "elastic.min_ranks=1", "the loss of a rank ends the run"),
        (
            ("elastic.copies_every=3", "elastic.min_ranks=1", "elastic.backend=torchft"),
            "elastic.backend=own",
            "torchft copies nothing",
        ),
        (
            ("low_rank.recovery_steps=3", "low_rank.kind=pufferfish"),
            "low_rank.refactorise_every=100",
            "factors are never balanced anew",
        ),
        (
            ("synchronize.precision=int8", DILOCO, 'constraints.forbid=["sync=diloco"]'),
            "constraints.forbid=[]",
            "constraints.forbid[0] leaves none",
        ),
        (
            ("synchronize.precision=int8", DILOCO, 'constraints.forbid=["sync"]'),
            'synchronize.precision="fp32"',
            "constraints.forbid[0] leaves none",
        ),
        (
            ("synchronize.every=9", DILOCO, "constraints.fix.replicate=1"),
            "constraints.fix.replicate=2",
            "constraints.fix.replicate leaves none",
        ),
        (
            ("synchronize.quorum=2", DILOCO, 'constraints.forbid=["ddp"]'),
            "constraints.forbid=[]",
            "constraints.forbid[0] leaves none",
        ),
        (('synchronize.kinds=["diloco"]', "constraints.fix.data=1"), "constraints.fix.data=4", "fix.data rules it out"),
        (
            ('synchronize.compressions=[{kind="powersgd"}]', 'constraints.forbid=["sync=powersgd"]'),
            "constraints.forbid=[]",
            "constraints.forbid[0] rules it out",
        ),
        (
            ('other_precisions=["fp8"]', 'constraints.forbid=["precision=fp8"]'),
            "constraints.forbid=[]",
            "constraints.forbid[0] rules it out",
        ),
        (('other_precisions=["bf16"]', "precision=bf16"), "precision=fp32", "precision says it already"),
        (("skip.share=0.25", "constraints.fix.pp=1"), "constraints.fix.pp=4", "constraints.fix.pipeline rules it out"),
        (
            ('optimizer.groups=[{names=["embedding.*"]}]',),
            "optimizer.groups.0.weight_decay=0.1",
            "it says nothing of its names",
        ),
    ],
)  # fmt: skip
def test_what_does_nothing_is_told_until_something_lets_it(said: tuple[str, ...], lets: str, why: str) -> None:
    place, others = said[0].partition("=")[0], said[1:]
    told_now = [line for line in told(*said) if line.startswith(place)]
    assert len(told_now) == 1
    assert why in told_now[0]
    assert "; " in told_now[0]
    for better in (told(*said, lets), told(*others)):
        assert not [line for line in better if line.startswith(place)]


def test_nothing_is_told_of_defaults_and_of_saves_that_all_stay() -> None:
    assert idle(JobSpec()) == ()
    assert told("checkpoint.keep_every_steps=10", "checkpoint.every_steps=100") == []
    assert told("checkpoint.keep_every_steps=300", "checkpoint.every_steps=100") == []
    assert told("checkpoint.keep_every_steps=300", "checkpoint.interval=goodput") == []
    assert told("learning_rate.warmup_steps=10", "learning_rate.warmup_fraction=0") == []
    assert told("learning_rate.decay=constant", "learning_rate.final_fraction=1") == []


def test_what_does_nothing_is_told_where_it_is_said(tmp_path: Path) -> None:
    path, sets = tmp_path / "job.toml", ["spike.window=64"]
    path.write_text("[synchronize]\nevery = 10\n")
    job = catalog.load_job(path, sets=sets)
    places = [problem.where for problem in job_remarks(job, path, sets=sets)]
    assert places == [f"{path}:2 synchronize.every", "--set spike.window"]
    assert [problem.where for problem in job_remarks(job, None)] == ["job.synchronize.every", "job.spike.window"]
