"""What is asked of a place: what it has no use of, what it lacks, and which nodes a plan lies on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright import cost
from meshwright.run.launching.ask import Ask, Place, check, check_start
from meshwright.run.launching.grace import grace_seconds
from meshwright.run.launching.shares import check_alike, shares
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import EvaluationSpec
from tests.run.launching.made import FAR, ask, on_gpus, on_processors


def told(asked: Ask) -> str:
    with pytest.raises(ConfigError) as error:
        check(asked)
    return str(error.value)


@pytest.mark.parametrize("place", list(Place))
def test_a_place_takes_what_is_of_it_and_refuses_the_rest(place: Place) -> None:
    every: dict[str, Any] = {"hosts": ("one", "two"), "address": "one", "partition": "gpu", "account": "us"}
    every |= {"extra": ("qos=long",), "image": "i", "volume": "v:/mnt", "namespace": "n", "restarts": 1, "python": "p"}
    every |= {"time_seconds": 60.0, "grace_seconds": 30.0}
    refused = told(ask(place, **every))
    asked = {name: value for name, value in every.items() if f"{_option(name)}: --on" not in refused}
    check(ask(place, **asked))
    assert len(asked) < len(every)
    for name in every.keys() - asked.keys():
        assert f"{_option(name)}: --on {place} has no use of it; it is of --on " in refused


def _option(name: str) -> str:
    return {"time_seconds": "--time", "grace_seconds": "--grace", "extra": "--scheduler"}.get(name, f"--{name}")


def test_all_that_a_place_lacks_is_told_at_once() -> None:
    lacking = told(ask("kubernetes", run=Path("runs/one")))
    assert "--image: --on kubernetes needs it" in lacking
    assert "--volume: --on kubernetes needs it" in lacking
    assert "--run: runs/one is not from the root" in lacking
    assert "--hosts: --on ssh needs it" in told(ask("ssh"))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"volume": "training"}, "'training' is no volume and folder"),
        ({"volume": "training:data"}, "write --volume NAME:/folder"),
        ({"volume": "training:/data"}, "is not in the volume's folder /data; --run /data/first-run"),
    ],
)
def test_the_run_is_kept_in_the_volume(asked: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _ = ask("kubernetes", **{**FAR, **asked}).mount


def test_what_cannot_be_started_from_here_is_refused() -> None:
    with pytest.raises(ConfigError, match="--on dstack is not started from here; --out FILE"):
        check_start(ask("dstack", **FAR), submit=True, follow=False)
    with pytest.raises(ConfigError, match="only a job that is handed to SLURM is followed"):
        check_start(ask("ssh", hosts=("a", "b")), submit=True, follow=True)
    with pytest.raises(ConfigError, match="add --submit"):
        check_start(ask("slurm"), submit=False, follow=True)


@pytest.mark.parametrize(
    ("run", "name"), [("My run_1", "my-run-1"), ("7b", "run-7b"), ("x" * 80, "x" * 30), ("é", "run")]
)
def test_jobs_have_names_that_every_place_takes(run: str, name: str) -> None:
    assert ask("slurm", run=Path("/shared") / run).name == name


def test_nodes_hold_devices_in_the_order_of_the_cluster(tmp_path: Path) -> None:
    found = shares(on_gpus(tmp_path, "A100"))
    assert [(share.node, share.group, share.first, share.count) for share in found] == [(0, 0, 0, 1), (1, 1, 1, 1)]
    assert [share.accelerator for share in found] == ["nvidia.com/gpu"] * 2
    with pytest.raises(ConfigError, match="node 0 of the plan has 1 H100 and node 1 1 A100-80GB"):
        check_alike(found, place="slurm")


def test_the_last_node_may_be_used_in_part(tmp_path: Path) -> None:
    made = on_gpus(tmp_path)
    group = replace(made.cluster.groups[0], num_nodes=3, devices_per_node=8)
    wide = replace(made.plan, axes=tuple(replace(axis, size=12 if axis.size == 2 else 1) for axis in made.plan.axes))
    found = shares(replace(made, cluster=replace(made.cluster, groups=(group,)), plan=wide))
    assert [(share.first, share.count) for share in found] == [(0, 8), (8, 4)]


def test_devices_that_nothing_starts_on_are_named(tmp_path: Path) -> None:
    from meshwright.run.launching.start import document

    made = on_gpus(tmp_path)
    (group,) = made.cluster.groups
    device = replace(group.device, kind=DeviceKind.TPU)
    there = replace(made, cluster=replace(made.cluster, groups=(replace(group, device=device),)))
    with pytest.raises(ConfigError, match="do not reach TPUs; rule runtime-devices"):
        document(there, ask("slurm"))


def test_the_grace_covers_steps_and_saves_and_leaves_time_to_train(tmp_path: Path) -> None:
    made = on_processors(tmp_path)
    predicted, job = cost.predict(made), replace(made.job, evaluation=EvaluationSpec())
    usual = grace_seconds(ask("slurm"), job=job, predicted=predicted)
    assert usual >= 60 + 2 * predicted.step_seconds
    assert usual % 30 == 0
    slow = replace(predicted, step=replace(predicted.step, seconds=100.0))
    assert 260 <= grace_seconds(ask("slurm"), job=job, predicted=slow) < 360
    evaluates = replace(job, evaluation=EvaluationSpec(every_steps=10, tokens=8 * slow.tokens_per_step))
    assert grace_seconds(ask("slurm"), job=evaluates, predicted=slow) >= 260 + 8 * 50
    assert grace_seconds(ask("slurm", grace_seconds=7.5), job=job, predicted=slow) == 8
    with pytest.raises(ConfigError, match=r"no time is left to train: 60\.0 s of which 90\.0 s"):
        grace_seconds(ask("slurm", time_seconds=60.0), job=job, predicted=predicted)


def test_one_question_has_one_answer(tmp_path: Path) -> None:
    from meshwright.run.launching.start import document

    def asked(place: str) -> Ask:
        more: dict[str, Any] = {"ssh": {"hosts": ("a", "b")}, "local": {}, "slurm": {}}.get(place, FAR)
        return ask(place, **more)

    made = on_processors(tmp_path)
    for place in Place:
        assert document(made, asked(place)) == document(made, asked(place)), place
