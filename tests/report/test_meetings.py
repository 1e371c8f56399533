"""How ranks meet, in words: bytes, time and choice on every tier of links, and what other ways would cost."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import catalog
from meshwright.cost import predict
from meshwright.cost.ways import met_over, ways_of_meeting
from meshwright.report.explain import Explanation, explain_files
from meshwright.report.meetings import Meetings, Way, meetings
from meshwright.report.rows import setting_words
from meshwright.report.run_files import RunFiles
from meshwright.spec.compression import TopK
from meshwright.spec.plan import Design, Sharding
from meshwright.spec.report import LineName
from meshwright.spec.synchronize import SynchronizeSpec, SyncKind
from meshwright.spec.units import format_bytes, format_seconds
from tests.cost.cost_examples import design as example
from tests.cost.cost_examples import llama, selene
from tests.cost.test_rounds import MODEL, met


def met_as(design: Design) -> Meetings:
    return meetings(design, predict(design))


def told(design: Design) -> list[str]:
    return list(met_as(design).sentences)


def explained(design: Design) -> Explanation:
    report = predict(design)
    files = RunFiles(path=Path("plan.json"), name="plan", is_plan=True, design=design, predicted=report)
    return explain_files(files)


def test_what_joins_hosts_of_tpus_is_a_pod_and_what_joins_nodes_of_a_rack_a_rack() -> None:
    for name, words in (("8xTPU-v5p", "in a pod"), ("gb200-nvl72", "in a rack")):
        made = example(llama(), catalog.load_cluster(name), shard=8, sharding=Sharding.PARAMETERS)
        assert {each.tier for each in met_over(made, outer_bytes=0.0)} == {words}


@pytest.mark.parametrize("kind", [SyncKind.STREAMING, SyncKind.DILOCO])
def test_of_every_tier_bytes_and_what_is_exposed_and_hidden_are_told(kind: SyncKind) -> None:
    """Shards of a learner meet in its node in every step, learners between sites in rounds."""
    design = met(kind)
    report = predict(design)
    outer = report.step.find(LineName.OUTER)
    assert outer is not None
    sent = met_over(design, outer_bytes=outer.bytes)
    assert {(each.line, each.tier) for each in sent} == {
        (LineName.GRADIENTS, "in a node"),
        (LineName.PARAMETERS, "in a node"),
        (LineName.OUTER, "between sites"),
    }
    sentences = told(design)
    for each in sent:
        line = report.step.find(each.line)
        assert line is not None
        hidden = max(report.detail.get(f"{each.line}, hidden included", line.seconds) - line.seconds, 0.0)
        assert (
            f"Of {each.line} a device sends {format_bytes(each.bytes)} {each.tier} a step: "
            f"{format_seconds(line.seconds)} exposed, {format_seconds(hidden) if hidden else 'none'} hidden."
            in sentences
        )


def test_what_crosses_two_tiers_has_its_exposed_and_hidden_seconds_on_each() -> None:
    """Gradients are scattered in a node and reduced between sites: by the time that either takes alone."""
    shares = []
    for bits in (1e9, 1e10):
        design = met(SyncKind.EVERY_STEP, bits=bits)
        report = predict(design)
        line = report.step.find(LineName.GRADIENTS)
        assert line is not None
        near, far = (each for each in met_over(design, outer_bytes=0.0) if each.line is LineName.GRADIENTS)
        assert (near.tier, far.tier) == ("in a node", "between sites")
        assert near.share + far.share == pytest.approx(1.0)
        shares.append(far.share / near.share)
        hidden = report.detail[f"{LineName.GRADIENTS}, hidden included"] - line.seconds
        each = " and ".join(
            f"{format_bytes(one.bytes)} {one.tier} ({format_seconds(one.share * line.seconds)} exposed, "
            f"{format_seconds(one.share * hidden)} hidden)"
            for one in (near, far)
        )
        assert f"Of {LineName.GRADIENTS} a device sends {each} a step." in told(design)
    slow, fast = shares
    assert slow > fast > 1.0
    assert slow == pytest.approx(10.0 * fast, rel=0.1)


def test_what_crosses_between_nodes_is_told_apart_from_what_is_sent_over_every_link() -> None:
    """Of a ring of 16 ranks on two nodes only two send to another node."""
    design = example(MODEL, selene(nodes=2), shard=16, sharding=Sharding.OPTIMIZER)
    found = {each.line: each for each in met_over(design, outer_bytes=0.0)}
    sent = found[LineName.GRADIENTS]
    assert sent.tier == "between nodes"
    assert sent.crossing_bytes == pytest.approx(sent.bytes * 2 / 16)
    whole, crossing = format_bytes(sent.bytes), format_bytes(sent.crossing_bytes)
    (line,) = [line for line in told(design) if line.startswith(f"Of {LineName.GRADIENTS} ")]
    assert f" a device sends {whole} over every link, {crossing} of it between nodes, a step: " in line


def test_the_choice_and_what_every_other_way_would_take_and_cost_in_loss_are_a_table() -> None:
    design = met(SyncKind.STREAMING)
    own, *others = ways_of_meeting(design)
    found = met_as(design)
    (says,) = [line for line in found.sentences if line.startswith("This plan's ranks meet")]
    assert says == f"This plan's ranks meet as {own.words}."
    first, *rest = found.ways
    assert (first.words, first.is_plan, first.change, first.beside) == (own.words, True, 0.0, "this plan")
    assert len(rest) > len(SyncKind) - 2
    assert own.words not in {way.words for way in rest}
    seconds = {way.words: way.step_seconds for way in rest}
    for way in others:
        words = "in every step" if way.kind is SyncKind.EVERY_STEP and not way.compression else way.words
        assert way.words == own.words or seconds[words] == way.step_seconds
    assert first.loss is not None
    losses = [
        line for line in found.sentences if line.startswith("Loss above that of every step, after as many tokens: ")
    ]
    assert len(losses) == 1
    assert re.search(r"[ :]streaming [+-]\d\.\d{3} nats[ ,].*\(.*; .+\)\.$", losses[0])


def test_a_plan_without_rounds_meets_in_every_step_and_ways_that_take_as_long_say_so() -> None:
    found = met_as(met(SyncKind.EVERY_STEP))
    (says,) = [line for line in found.sentences if line.startswith("This plan's ranks meet")]
    assert says == "This plan's ranks meet in every step."
    alike = replace(found.ways[1], change=1e-5, fits=True)
    assert alike.beside == "as long"
    assert replace(alike, change=-0.069).beside == "6.9 % less"
    assert replace(alike, change=0.861).beside == "86.1 % more"
    assert replace(alike, change=59.337).beside == "60.3 times"


def test_a_way_of_meeting_that_memory_has_no_room_for_is_told() -> None:
    """Learners keep copies: where what every step holds just fits, no round of theirs does, however long it is."""
    design = met(SyncKind.EVERY_STEP)
    (memory,) = {stage.total for stage in predict(design).memory}
    groups = tuple(
        replace(group, device=replace(group.device, memory_bytes=1.001 * memory / group.device.usable_fraction))
        for group in design.cluster.groups
    )
    tight = replace(design, cluster=replace(design.cluster, groups=groups))
    own, *others = ways_of_meeting(tight)
    assert own.fits
    assert not any(way.fits for way in others if way.every)
    beside = {way.words: way.beside for way in met_as(tight).ways}
    for way in others:
        if way.every:
            assert beside[way.words].endswith(", does not fit"), way.words


def test_ways_to_meet_are_rows_of_explain_under_their_heads() -> None:
    design = met(SyncKind.EVERY_STEP)
    way = Way(words="topk of 0.01", learners=1, step_seconds=0.1, change=0.5, fits=False, is_plan=False, loss=None)
    shown = replace(explained(design), ways=(way,)).lines()
    (head,) = [index for index, line in enumerate(shown) if line.startswith("way to meet")]
    assert shown[head + 1].split("  ")[0] == "topk of 0.01"
    assert "way to meet, predicted" in shown[head], "a run beside them was measured"
    assert "50.0 % more, does not fit" in shown[head + 1]
    assert "loss" not in shown[head], "none of these was measured"
    assert replace(explained(design), ways=(way,)).lines(ways=False) == (*shown[: head - 1], *shown[head + 2 :])


def test_a_row_and_a_name_say_that_gradients_are_compressed() -> None:
    plan = met(SyncKind.EVERY_STEP).plan
    compressed = replace(plan, gradients=replace(plan.gradients, compression=TopK()))
    for words in (setting_words(compressed), compressed.describe()):
        assert "replicas meet in every step by topk of 0.01" in words
    assert "meet" not in setting_words(plan) + plan.describe()


def test_losses_of_learners_are_told_where_the_job_asks_for_learners_or_is_advised_some() -> None:
    """Where links are fast and the job allows none, nothing of learners is in question."""
    fast = example(MODEL, selene(nodes=2), shard=16, sharding=Sharding.OPTIMIZER)
    assert len(met_as(fast).ways) > 1
    assert not any(line.startswith("Loss above that of every step") for line in told(fast))
    asking = replace(fast, job=replace(fast.job, synchronize=SynchronizeSpec(kinds=(SyncKind.DILOCO,))))
    losses = any(way.loss for way in met_as(asking).ways)
    assert any(line.startswith("Loss above that of every step") for line in told(asking)) is losses
    assert losses


def test_ways_to_meet_are_priced_with_the_rounds_that_a_run_made() -> None:
    design = met(SyncKind.DILOCO)
    every = design.plan.gradients.rounds.every
    planned, changed = (meetings(design, predict(design), every=one).ways[0] for one in (None, 4 * every))
    assert f"{every:,}" in planned.words
    assert f"{4 * every:,}" in changed.words
    assert changed.step_seconds < planned.step_seconds
