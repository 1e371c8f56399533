"""What no flag says is told by name, and what a flag can say is no longer lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.catalog import with_vocab
from meshwright.export import NotExpressible, Peer, Verdict, check, export, holder
from meshwright.spec.job import CheckpointSpec, EvaluationSpec, Interval, Switch
from meshwright.spec.model import Attention, Mixture, RotaryScaling
from meshwright.spec.plan import Design, Sharding
from tests.export.plans import design

MEGATRON, TITAN, DEEPSPEED = Peer.MEGATRON_LM, Peer.TORCHTITAN, Peer.DEEPSPEED
ZERO3, ZERO2 = Sharding.PARAMETERS, Sharding.GRADIENTS


def lost_of(peer: Peer, entry: Design) -> dict[str, tuple[str, str]]:
    return {line.name: (line.plan, line.peer) for line in export(entry, to=peer).lines if line.verdict is Verdict.LOST}


@pytest.mark.parametrize("peer", Peer)
def test_checkpoints_are_written_where_the_job_says_how_often_and_else_named(peer: Peer) -> None:
    entry = design(sharding=ZERO2)
    assert "none; " in lost_of(peer, entry)["checkpoints"][1]
    often = replace(entry, job=replace(entry.job, checkpoint=CheckpointSpec(every_steps=50)))
    words = "enable = true\ninterval = 50\nkeep_latest_k = 2" if peer is TITAN else "--save-interval 50"
    assert words in export(often, to=peer).text
    assert words not in export(entry, to=peer).text
    assert "checkpoints" not in lost_of(peer, often)
    assert "all nodes have to see" in lost_of(peer, often)["checkpoint folder"][1]
    best = replace(entry, job=replace(entry.job, checkpoint=CheckpointSpec(interval=Interval.GOODPUT)))
    assert lost_of(peer, best)["checkpoints"][0] == "as often as wastes least"


@pytest.mark.parametrize("peer", Peer)
def test_evaluation_is_written_or_named(peer: Peer) -> None:
    entry = design(sharding=ZERO2)
    spec = EvaluationSpec(every_steps=200, tokens=3 * entry.job.batch_tokens)
    often = replace(entry, job=replace(entry.job, evaluation=spec))
    assert lost_of(peer, often)["evaluation"][0].startswith("every 200 steps, of ")
    if peer is not TITAN:
        text = export(often, to=peer).text
        assert "--eval-interval 200 " in text
        assert "--eval-iters 3 " in text


@pytest.mark.parametrize("peer", Peer)
def test_what_is_not_lost_is_not_told(peer: Peer) -> None:
    entry = design(sharding=ZERO2)
    assert entry.job.compile is Switch.OFF
    assert "compile" not in lost_of(peer, entry)
    asked = replace(entry, job=replace(entry.job, compile=Switch.AUTO, start="/weights", deterministic=True))
    assert {"compile", "first weights"} <= lost_of(peer, asked).keys()
    assert ("deterministic" in lost_of(peer, asked)) == (peer is not TITAN)
    assert all(plan != theirs for plan, theirs in lost_of(peer, asked).values())


@pytest.mark.parametrize("peer", Peer)
def test_a_plan_that_is_predicted_as_other_software_than_the_file_starts_says_so(peer: Peer) -> None:
    entry = design(sharding=ZERO2)
    own = holder(peer.value).stack(entry.job)
    plan, theirs = lost_of(peer, entry)["predicted as"]
    assert plan == "torch"
    assert theirs.startswith(f"{own} runs it; plan --for {peer} ")
    kept = replace(entry, job=replace(entry.job, software=own))
    assert "predicted as" not in lost_of(peer, kept)
    compiled = lost_of(peer, replace(kept, job=replace(kept.job, compile=Switch.ON)))
    assert ("predicted as" in compiled) == (peer is TITAN)


def test_a_file_that_every_node_of_deepspeed_reads_is_told_of() -> None:
    entry = design(shard=16)
    assert "ds_config.json" not in lost_of(DEEPSPEED, design())
    assert "a folder that all nodes see" in lost_of(DEEPSPEED, entry)["ds_config.json"][1]
    assert "start this in a folder that all nodes see" in export(entry, to=DEEPSPEED).text


def test_what_a_flavor_has_otherwise_is_lost_and_not_kept() -> None:
    lost = lost_of(TITAN, design("deepseek-v3", sharding=ZERO3))
    assert lost["model: norm epsilon"] == ("1e-06", "1e-05")
    assert lost["model: scaling"][1] == "none"
    assert lost_of(DEEPSPEED, design())["model: scaling"] == ("llama3 by 8, 1 to 4 of 8192", "none")


def test_latent_attention_and_its_router_are_said_in_full_to_megatron() -> None:
    text = export(design("deepseek-v3"), to=MEGATRON).text
    flags = ("--rotary-scaling-factor 40.0", "--mscale 1.0", "--mscale-all-dim 1.0", "--moe-router-num-groups 8")
    flags += ("--moe-router-score-function sigmoid", "--moe-router-topk-scaling-factor 2.5")
    flags += ("--moe-router-enable-expert-bias", "--moe-router-group-topk 4", "--moe-router-bias-update-rate 0.001")
    assert [flag for flag in flags if flag not in text] == []


def balanced(peer: Peer, **routing: float) -> Design:
    """A mixture that `peer` has, balanced so."""
    entry = design("qwen3-30b-a3b" if peer is TITAN else "mixtral-8x7b", sharding=ZERO2)
    layer = entry.model.layers[0]
    assert isinstance(layer.transform, Mixture)
    said = replace(layer, transform=replace(layer.transform, routing=replace(layer.transform.routing, **routing)))
    return replace(entry, model=replace(entry.model, layers=(said,) * len(entry.model.layers)))


def test_a_loss_that_balances_is_written_to_megatron_as_it_is() -> None:
    entry = balanced(MEGATRON, balance_loss=0.02)
    text = export(entry, to=MEGATRON).text
    assert "--moe-router-load-balancing-type seq_aux_loss" in text
    assert "--moe-aux-loss-coeff 0.02" in text
    assert not {"balance of experts", "model: routing"} & lost_of(MEGATRON, entry).keys()
    other = text.replace("seq_aux_loss", "aux_loss")
    (line,) = (line for line in check(entry, other, to=MEGATRON) if line.verdict is Verdict.DIFFERS)
    told = (
        "softmax, normalized x 1, loss 0.02 of every sequence",
        "softmax, normalized x 1, loss 0.02 of every microbatch",
    )
    assert (line.plan, line.peer) == told


def test_a_loss_that_balances_is_lost_where_a_trainer_has_another_one_or_none() -> None:
    assert lost_of(DEEPSPEED, balanced(DEEPSPEED, balance_loss=0.02))["model: routing"] == (
        "softmax, normalized x 1, loss 0.02 of every sequence",
        "softmax, normalized x 1, loss 0.02 of every microbatch's first choices",
    )
    assert lost_of(TITAN, balanced(TITAN, balance_loss=0.02))["model: routing"][1].endswith("x 1, bias 0.001")


@pytest.mark.parametrize("peer", [MEGATRON, DEEPSPEED])
def test_experts_that_nothing_balances_are_told_of(peer: Peer) -> None:
    plan, theirs = lost_of(peer, balanced(peer))["balance of experts"]
    assert plan.startswith("none: ")
    assert "yours to" in theirs


def test_a_bias_that_balances_a_softmax_is_refused_by_megatron() -> None:
    with pytest.raises(NotExpressible, match="cannot say a bias that balances a softmax"):
        export(balanced(MEGATRON, bias_rate=0.001), to=MEGATRON)


def test_bounds_of_yarn_that_no_flag_names_are_lost() -> None:
    lost = lost_of(MEGATRON, design("kimi-k2"))
    assert lost["model: scaling"] == ("yarn by 32, 1 to 1 of 4096, gain 1", "yarn by 32, 1 to 32 of 4096, gain 1")


def test_frequencies_that_megatron_stretches_otherwise_are_refused() -> None:
    entry = design()
    layer = entry.model.layers[0]
    assert isinstance(layer.mixer, Attention)
    assert layer.mixer.rotary is not None
    scaling = RotaryScaling(kind="llama3", factor=8.0, trained_positions=4096)
    odd = replace(layer, mixer=replace(layer.mixer, rotary=replace(layer.mixer.rotary, scaling=scaling)))
    with pytest.raises(NotExpressible, match="cannot say rotary frequencies stretched as llama3 by 8, 1 to 4 of 4096"):
        export(replace(entry, model=replace(entry.model, layers=(odd,) * len(entry.model.layers))), to=MEGATRON)


def test_a_model_of_a_flavors_sizes_has_it_whatever_it_is_called() -> None:
    entry = design(sharding=ZERO2)
    ours = replace(entry, model=replace(entry.model, name="ours"), plan=replace(entry.plan, model="ours"))
    assert export(ours, to=TITAN).text == export(entry, to=TITAN).text


def test_a_model_of_other_sizes_has_no_flavor_whatever_it_is_called_and_the_nearest_is_told() -> None:
    entry = design(sharding=ZERO2)
    padded = with_vocab(entry.model, vocab=128512)
    words = "the nearest, llama3 8B, has vocab 128256 and not 128512"
    with pytest.raises(NotExpressible, match=f"cannot say the model llama-3.1-8b .*; {words}$"):
        export(replace(entry, model=padded), to=TITAN)
    with pytest.raises(NotExpressible, match=r"it has no flavor of these sizes.*; it has llama3 8B, llama3 70B"):
        export(design("mixtral-8x7b", sharding=ZERO2), to=TITAN)


def test_what_the_sizes_of_a_flavor_do_not_say_is_refused() -> None:
    entry = design(sharding=ZERO2)
    layer = entry.model.layers[0]
    assert isinstance(layer.mixer, Attention)
    odd = replace(layer, mixer=replace(layer.mixer, window=1024))
    with pytest.raises(NotExpressible, match="torchtitan cannot say attention windows"):
        export(replace(entry, model=replace(entry.model, layers=(odd,) * len(entry.model.layers))), to=TITAN)
