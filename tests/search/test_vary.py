"""Sensitivity, headroom and sweeps: every figure is a plan designed or priced again, and says what changed."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from meshwright import catalog, cost, search
from meshwright.report import terminal_why
from meshwright.search import Question, headroom, sensitivity, sweep, vary
from meshwright.search.constraints import columns_of
from meshwright.search.fields import ALIASES, find_field, with_field
from meshwright.search.headroom import LIMITS
from meshwright.search.sensitivity import FIGURES
from meshwright.search.sweep import read_axis
from meshwright.spec.cluster import AttentionRate, Collective, CollectiveFit, Precision
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import Constraints
from tests.search import search_samples as samples

pytestmark = pytest.mark.usefixtures("searched_once")

LARGE = samples.model(layers=10, layer=samples.dense_layer(hidden=2048), vocab=2048)
SETS = ("sequence_length=2048", "batch_tokens=1Mi")


def question(*, nodes: int = 2, memory_bytes: float = 16 * 2**30) -> Question:
    group = samples.nodes(num_nodes=nodes, devices_per_node=4, of=samples.device(memory_bytes=memory_bytes))
    return Question(model=LARGE, cluster=samples.cluster(group), job=samples.job())


def decide(asked: Question) -> search.Decision:
    return search.design(asked.model, asked.cluster, asked.job, top=1)


@pytest.mark.slow
def test_every_effect_is_the_plan_priced_again_on_the_changed_machines() -> None:
    seen: list[tuple[int, int, str]] = []

    def progress(done: int, total: int, now: str = "") -> None:
        seen.append((done, total, now))

    asked = Question(
        model=catalog.load_model("llama-3.1-8b"),
        cluster=catalog.load_cluster("16xH100"),
        job=catalog.load_job(None, sets=SETS),
    )
    decision = decide(asked)
    found = sensitivity(asked, decision, progress=progress)
    named = [*(figure for figure, _, _ in FIGURES), ""]
    assert seen == [(done, len(FIGURES), name) for done, name in enumerate(named)]
    assert {effect.figure for effect in found.effects} == {figure for figure, _, _ in FIGURES}
    alters = {figure: (alter, factor) for figure, alter, factor in FIGURES}
    for effect in found.effects:
        alter, factor = alters[effect.figure]
        changed = replace(decision.design, cluster=alter(asked.cluster, factor))
        assert effect.step_seconds == pytest.approx(cost.predict(changed).step_seconds)
        assert effect.best_seconds <= effect.step_seconds * (1 + 1e-9)
        assert effect.change <= 1e-12, "better machines never make the same plan slower"
        best = cost.predict(replace(changed, plan=effect.best))
        assert best.fits
        assert bool(effect.changed) == effect.flips
    reach = [min(effect.change, effect.best_change) for effect in found.effects]
    assert reach == sorted(reach)
    by_name = {effect.figure: effect for effect in found.effects}
    assert by_name["memory capacity"].change == 0
    assert by_name["peak of the device"].change < 0


@pytest.mark.slow
def test_more_memory_flips_a_decision_that_memory_forced() -> None:
    roomy = question()
    free = decide(roomy)
    tight = question(memory_bytes=free.report.peak_bytes * 0.9)
    forced = decide(tight)
    assert forced.report.step_seconds > free.report.step_seconds
    found = headroom(tight, forced)
    memory = next(limit for limit in found.limits if limit.name == "memory")
    assert memory.plan == free.design.plan
    assert memory.gain == pytest.approx(forced.report.step_seconds / free.report.step_seconds - 1.0)
    assert memory.changed
    assert next(limit for limit in headroom(roomy, free).limits if limit.name == "memory").gain == 0


def test_headroom_tells_the_limit_that_is_worth_most() -> None:
    asked = question()
    bound = replace(asked, job=replace(asked.job, constraints=Constraints(fix={"pipeline": 8, "microbatch": 4})))
    found = headroom(bound, decide(bound))
    gains = [limit.gain for limit in found.limits]
    assert gains == sorted(gains, reverse=True)
    assert len(found.limits) == len(LIMITS)
    assert found.binding is not None
    assert found.binding.name in found.sentence
    free = decide(asked).report.tokens_per_second / decide(bound).report.tokens_per_second - 1.0
    named = next(limit for limit in found.limits if limit.name == "constraints")
    assert named.gain == pytest.approx(free)
    assert named.gain > 0


def test_what_was_measured_moves_with_the_figure_beside_it() -> None:
    fit = CollectiveFit(operation=Collective.ALL_REDUCE, ranks=8, latency_seconds=1e-5, bytes_per_second=1e10)
    rate = AttentionRate(precision=Precision.BF16, length=128, forward_flops=1e13, backward_flops=2e13)
    group = samples.nodes()
    measured = replace(
        group,
        nic=replace(group.nic, fits=(fit,)),
        device=replace(group.device, attention_rates=(rate,), optimizer_bandwidth=5e11),
    )
    cluster = samples.cluster(measured)
    nic = vary.between_nodes(cluster, 2.0).groups[0].nic
    assert nic.bandwidth == 2 * group.nic.bandwidth
    assert nic.fits[0].bytes_per_second == 2e10
    assert nic.fits[0].latency_seconds == 1e-5
    assert vary.latency(cluster, 0.5).groups[0].nic.fits[0].latency_seconds == 5e-6
    assert vary.peak(cluster, 2.0).groups[0].device.attention_rates[0].backward_flops == 4e13
    assert vary.memory_bandwidth(cluster, 2.0).groups[0].device.optimizer_bandwidth == 1e12
    assert vary.inside_nodes(cluster, 2.0).groups[0].nic == measured.nic
    wide = vary.between_nodes(cluster, 2.0).wide_area
    assert wide is not None
    assert cluster.wide_area is not None
    assert wide.bandwidth == 2 * cluster.wide_area.bandwidth
    uneven = replace(cluster, uplinks={"a": cluster.wide_area})
    assert vary.between_nodes(uneven, 2.0).uplinks == {"a": wide}
    assert vary.latency(uneven, 0.5).uplinks["a"].latency_seconds == 0.5 * cluster.wide_area.latency_seconds
    asked = Question(model=LARGE, cluster=cluster, job=samples.job())
    swept = with_field(asked, find_field(asked, "cluster.inter.bandwidth"), "50GB/s")
    assert swept.cluster.groups[0].nic.fits[0].bytes_per_second == pytest.approx(2e10)


@pytest.mark.slow
def test_every_point_of_a_sweep_is_the_best_plan_there() -> None:
    asked = question()
    found = sweep(asked, ["cluster.nodes=1,2,4"])
    assert [point.devices for point in found.points] == [4, 8, 16]
    for nodes, point in zip((1, 2, 4), found.points, strict=True):
        alone = decide(question(nodes=nodes))
        assert point.best is not None
        assert point.best.plan == alone.design.plan
        each = point.best.tokens_per_second / point.devices
        first = found.points[0].best
        assert first is not None
        assert point.scaling == pytest.approx(each / (first.tokens_per_second / 4))
        assert all("devices" not in move.changed for move in point.moves)


@pytest.mark.slow
def test_a_flip_is_marked_where_the_plan_changes_and_nowhere_else() -> None:
    roomy = question()
    need = decide(roomy).report.peak_bytes
    low, high = need * 0.9, need * 4
    found = sweep(roomy, [f"cluster.memory={low:.0f},{high:.0f},{2 * high:.0f}"])
    assert [point.flips for point in found.points] == [False, True, False]
    assert all(point.scaling is None for point in found.points)
    first, second, _ = found.points
    assert first.best is not None
    assert second.best is not None
    stay = cost.predict(replace(decide(roomy).design, plan=first.best.plan)).step_seconds
    assert [(move.path, move.before) for move in second.moves] == [("cluster.memory", f"{low:.0f}")]
    assert second.moves[0].kept == pytest.approx(stay / second.best.step_seconds - 1.0)
    back = sweep(roomy, [f"cluster.memory={high:.0f},{low:.0f}"]).points[1]
    assert back.flips
    assert back.moves[0].kept is None, "the plan of the larger memory does not fit the smaller"


def test_two_paths_are_crossed_and_scaling_is_within_a_value_of_the_other() -> None:
    found = sweep(question(), ["cluster.inter.bandwidth=5GB/s,50GB/s", "cluster.nodes=1,2"])
    assert [point.labels for point in found.points] == [
        ("5GB/s", "1"),
        ("5GB/s", "2"),
        ("50GB/s", "1"),
        ("50GB/s", "2"),
    ]
    assert [point.scaling for point in found.points if point.labels[1] == "1"] == [1.0, 1.0]
    moves = [[(move.path.rpartition(".")[2], move.before) for move in point.moves] for point in found.points]
    assert moves == [[], [("nodes", "1")], [("bandwidth", "5GB/s")], [("bandwidth", "5GB/s"), ("nodes", "1")]]


def test_a_flip_along_the_first_of_two_paths_is_marked() -> None:
    """At every value of the second, which flips nothing here."""
    paths = ["cluster.inter.bandwidth=0.05GB/s,400GB/s", "job.checkpoint.every_steps=10,20"]
    found = sweep(question(nodes=2), paths)
    assert [point.flips for point in found.points] == [False, False, True, True]
    (move,) = (move for move in found.points[2].moves if move.flips)
    assert (move.path, move.before) == ("cluster.inter.bandwidth", "0.05GB/s")
    console = Console(width=200, record=True, file=StringIO())
    console.print(terminal_why.sweep(found))
    told = console.export_text()
    assert " - bandwidth 400GB/s, every_steps 10, from bandwidth 0.05GB/s: " in told
    assert "ranked by" in told
    assert (
        "* the decision flips here. Ranked by the step that 19 of 20 stay under, over the chance that it fits." in told
    )


def test_a_swept_constraint_is_no_flip_and_a_value_without_a_plan_says_why() -> None:
    found = sweep(question(), ["fix.tensor=1,2,3"])
    assert [point.best is None for point in found.points] == [False, False, True]
    assert "tensor" not in found.points[1].moves[0].changed
    assert "3 leaves no legal plan" in str(found.points[2].problems[0])
    assert "3 does not divide 8 heads, rule tensor-divides-heads" in found.points[2].problems[0].why
    assert columns_of(found.points[1].best.plan)["tensor"] == 2 if found.points[1].best else False


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ("cluster.nodes=1..8*2", ("1", "2", "4", "8")),
        ("cluster.nodes=1..7*2", ("1", "2", "4")),
        ("cluster.inter.bandwidth=10GB/s..40GB/s:4", ("10 GB/s", "20 GB/s", "30 GB/s", "40 GB/s")),
        ("cluster.memory=40GiB..80GiB:2", ("40 GiB", "80 GiB")),
        ("batch_tokens=1Mi,2Mi", ("1Mi", "2Mi")),
        ("cluster.nodes=1..4:9", ("1", "2", "3", "4")),
        ("cluster.nodes=1..64*1.01", tuple(str(number) for number in range(1, 64))),
        ("cluster.nodes=190..193*1.0001", ("190", "191", "192", "193")),
    ],
)
def test_forms_of_values(values: str, labels: tuple[str, ...]) -> None:
    assert read_axis(question(), values).labels == labels


@pytest.mark.parametrize(
    ("over", "told"),
    [
        (["cluster.intre.bandwidth=1,2"], "did you mean cluster.inter.bandwidth or cluster.intra.bandwidth"),
        (["cluster.nodes"], "names no values"),
        (["cluster.nodes=1..8"], "no steps; write cluster.nodes=1..8:4 for four values, or cluster.nodes=1..8*2 to"),
        (["cluster.inter.bandwidth=5GB"], "'5GB' is not bytes a second; write 5GB/s"),
        (["cluster.inter.bandwidth=5GB..9GB:2"], "'5GB' is not bytes a second; write 5GB/s"),
        (["cluster.inter.bandwidth=5parsecs..9GB/s:2"], "'parsecs' is not a unit; write for example 80GiB"),
        (["cluster.nodes=1e400..2:2"], "'1e400' is too large for any computer; write PATH=1,2,4, "),
        (["cluster.nodes=8..1:3"], "a range goes up"),
        (["cluster.nodes=1..8*1"], "a range goes up"),
        (["cluster.nodes=two"], "'two' is not a number"),
        (["cluster.nodes=1.5"], "--sweep cluster.nodes=1.5: expected a whole number"),
        (["cluster.nodes=0,-1"], "--sweep cluster.nodes=-1: -1 is not positive"),
        (["cluster.nodes=-3..4:3"], "--sweep cluster.nodes=-3: -3 is not positive"),
        (["cluster.inter.bandwidth=0"], "--sweep cluster.inter.bandwidth=0: 0.0 is not positive"),
        (["cluster.inter.efficiency=2"], "is not a share above 0 and up to 1"),
        (["job.batch=0,4Mi"], "--sweep job.batch=0: 0 is not at least 1"),
        (["optimizer.learning_rate=1e-4"], "is not a number that plans depend on; name a number, such as"),
        (["job.precision=bf16,fp8"], "did you mean job.constraints.fix.precision?"),
        (["precison=bf16,fp8"], "did you mean job.constraints.fix.precision?"),
        (["tp=1,2"], "did you mean job.constraints.fix.tensor?"),
        (["cluster=8xH100,16xH100"], "one number is swept, not clusters as a whole; name a number, such as cluster.n"),
        (["model=tiny,gpt2"], "or plan each model with --out and meshwright compare two of the files"),
        (["cluster.device=H100,A100"], "is a table, not a number; name one of it: cluster.device.memory_bytes, "),
        (["job.objective=time,cost"], "is not a number that plans depend on; name a number, such as cluster.nodes"),
        (["cluster.groups[9].nic.bandwidth=1GB/s"], "did you mean cluster.groups[0].nic.bandwidth"),
        (["bandwidth=1GB/s"], "did you mean cluster.wide_area.bandwidth or cluster.inside.bandwidth"),
        (["nodes=1,2"], "did you mean cluster.nodes?"),
        (["fix.tp=0,2"], "--sweep fix.tp=0: expected a whole number of 1 or more"),
        (["fix.recompute=some"], "--sweep fix.recompute=some: 'some' is not a recompute"),
        (["cluster.nodes=1,1"], "named twice"),
        (["cluster.nodes=1..1e9:1000"], "more than 200 designs"),
        (["cluster.nodes=1..1e300*1.0000001"], "more than 200 designs"),
        (["job.fix.tensr=1"], "did you mean 'tensor'?"),
        (["cluster.nodes=1", "cluster.num_nodes=2"], "is swept twice"),
        (["cluster.nodes=1", "job.batch=1", "job.sequence=1"], "3 paths are swept"),
        (["cluster.inter.bandwith=1"], "did you mean cluster.inter.bandwidth"),
    ],
)
def test_sweeps_that_are_wrong_are_told_before_anything_is_priced(
    over: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.search.decide.best", None)
    with pytest.raises(ConfigError) as raised:
        sweep(question(), over)
    assert told in str(raised.value)
    assert all(str(problem).count("write ") <= 1 for problem in raised.value.problems), "what to do is said once"


def test_a_link_that_the_cluster_has_not_is_told() -> None:
    asked = replace(question(), cluster=replace(question().cluster, wide_area=None))
    with pytest.raises(ConfigError, match=r"cluster\.wide\.bandwidth: there is no cluster\.wide_area here"):
        read_axis(asked, "cluster.wide.bandwidth=1GB/s")


def test_a_value_that_only_the_rest_of_the_question_forbids_is_a_point_without_a_plan() -> None:
    asked = replace(question(), job=replace(question().job, total_tokens=2**20))
    axis = read_axis(asked, f"job.batch={asked.job.batch_tokens},2Mi")
    assert axis.labels == (str(asked.job.batch_tokens), "2Mi")
    kept, lost = sweep(asked, [f"job.batch={asked.job.batch_tokens},2Mi"]).points
    assert kept.best is not None
    assert lost.best is None
    assert "is less than the" in str(lost.problems[0])


def test_short_names_of_fields_lead_to_fields() -> None:
    asked = Question(
        model=catalog.load_model("tiny"),
        cluster=catalog.load_cluster("two-sites"),
        job=catalog.load_job(None, sets=SETS),
    )
    for alias, full in ALIASES.items():
        tail = {"nic": ".bandwidth", "inside": ".bandwidth", "wide_area": ".bandwidth"}.get(full.split(".")[-1], "")
        tail = {"peak_flops": ".bf16", "fix": ".tensor"}.get(full.split(".")[-1], tail)
        assert find_field(asked, alias + tail).path == full + tail


def test_a_field_of_one_group_changes_that_group_alone() -> None:
    cluster = samples.cluster(samples.nodes(site="a"), samples.nodes(site="b"))
    asked = Question(model=LARGE, cluster=cluster, job=samples.job())
    one = with_field(asked, find_field(asked, "cluster.groups[1].nic.bandwidth"), "1GB/s").cluster
    assert one.groups[0] == cluster.groups[0]
    assert one.groups[1].nic.bandwidth == 1e9
    both = with_field(asked, find_field(asked, "cluster.nic.bandwidth"), "1GB/s").cluster
    assert [group.nic.bandwidth for group in both.groups] == [1e9, 1e9]
