"""Published runs: what is read, what becomes a plan, and scores that are right on rows whose answer is known."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

import meshwright
from meshwright import cost, replay
from meshwright.cli import main
from meshwright.replay import pricing, published
from meshwright.replay.express import express
from meshwright.replay.names import known_device
from meshwright.replay.published import replay as replay_row
from meshwright.replay.rates import node_gigabits
from meshwright.replay.runs import Run
from meshwright.replay.scores import OutOfMemory, Point, leave_one_group_out, overall, score
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError
from meshwright.spec.model import Attention, Mixture, Recurrence
from meshwright.spec.plan import ExpertGrid, Recompute, ScheduleKind, Sharding

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "published.csv"
ROW = {
    "id": "row-1",
    "group": "g",
    "rank_kind": "strategy",
    "source_id": "S",
    "arch": "gpt",
    "layers": "24",
    "hidden": "2048",
    "heads": "16",
    "vocab": "51200",
    "seq": "2048",
    "gpu": "A100-80GB-SXM",
    "n_gpus": "16",
    "gpus_per_node": "8",
    "framework": "Megatron-LM v3",
    "flash": "no",
    "tp": "2",
    "pp": "2",
    "dp": "4",
    "zero": "1",
    "sp": "yes",
    "mbs": "2",
    "gbs": "64",
    "recompute": "selective",
    "precision": "fp16",
    "iter_s": "2.0",
    "status": "ok",
}


def row(**changes: str) -> Run:
    return Run(line=int(changes.pop("line", "2")), columns={**ROW, **changes})


def point(run: Run, predicted: float, *, fits: bool = True, memory: float | None = None) -> Point:
    return Point(
        run=run,
        predicted_seconds=predicted,
        low_seconds=0.8 * predicted,
        high_seconds=1.25 * predicted,
        fits=fits,
        predicted_bytes=2e9,
        memory_bytes=memory,
    )


def test_a_row_becomes_the_plan_that_it_was() -> None:
    design = express(row()).design
    plan, group = design.plan, design.plan.first_group
    assert (plan.tensor, plan.pipeline, plan.shard, plan.replicate) == (2, 2, 4, 1)
    assert (plan.microbatch, plan.schedule.microbatches) == (2, 8)
    assert plan.schedule.kind is ScheduleKind.ONE_F_ONE_B
    assert group.sharding is Sharding.OPTIMIZER
    assert group.recompute is Recompute.SELECTIVE
    assert group.precision is Precision.FP16
    assert group.sequence_parallel
    assert design.job.software == "megatron-2022"
    assert design.cluster.num_devices == 16
    assert plan.batch_tokens == 64 * 2048


def test_what_a_source_leaves_open_is_assumed_and_told() -> None:
    found = express(row(precision="", recompute="", vocab="", flash="", sp=""))
    told = "; ".join(found.assumed)
    for word in ("fp16", "no recompute", "51200", "attention not fused", "sequence parallel off"):
        assert word in told


def test_recipes_that_a_stack_ships_fill_what_a_source_leaves_open() -> None:
    """A sharded optimizer, gradients in bf16 and parameters in eight bits, where speed is what is published."""
    blank = {"zero": "", "sp": "", "flash": "", "precision": "bf16", "gpu": "H100"}
    old, core = (express(row(**blank, framework=name)).design for name in ("Megatron-LM v3", "Megatron-Core"))
    assert (old.plan.first_group.sharding, core.plan.first_group.sharding) == (Sharding.NONE, Sharding.OPTIMIZER)
    assert core.plan.gradients.precision is Precision.FP32
    tuned = express(row(**blank, framework="Megatron-Core (NeMo/Megatron-Bridge)"))
    assert tuned.design.plan.gradients.precision is Precision.BF16
    assert tuned.design.job.software == "megatron-bridge"
    assert {"optimizer state sharded", "gradients in bf16"} <= set(tuned.assumed)
    eight_bit = express(row(**blank | {"precision": "fp8"}, framework="Megatron-LM")).design
    assert (eight_bit.job.software, eight_bit.plan.first_group.sequence_parallel) == ("megatron-core", True)


@pytest.mark.parametrize(
    ("changes", "software"),
    [
        ({"extra": "attention/norm kernel=flash_attention2 + RMS kernel"}, "scaling-fused-norms"),
        ({"extra": "attention/norm kernel=flash_attention2"}, "scaling"),
        ({"extra": "attention/norm kernel=flash_attentionv1.0.8"}, "scaling-flash-1"),
        ({"extra": "attention/norm kernel=fused", "flash": "no"}, "scaling-fused-softmax"),
        ({"extra": "attention/norm kernel=torch", "flash": "no"}, "scaling-plain-softmax"),
        ({"framework": "InternEvo (Hybrid Zero)", "flash": "yes"}, "internevo"),
        ({"framework": "torchtitan (FSDP2)", "compile": "yes"}, "torch-2024-compiled"),
        ({"framework": "torchtitan (FSDP2)", "compile": "no"}, "torch-2024"),
        ({"framework": "NeMo AutoModel (PyTorch FSDP2)"}, "automodel"),
        ({"framework": "NeMo/Megatron-Core", "flash": "yes"}, "nemo"),
        ({"framework": "Megatron-Bridge", "flash": "", "extra": "dispatcher=deepep"}, "megatron-bridge-deepep"),
        ({"framework": "HAI-LLM", "flash": "yes"}, "megatron-core-deepep-overlap"),
    ],
)
def test_kernels_that_a_source_names_choose_the_software(changes: dict[str, str], software: str) -> None:
    assert express(row(**changes)).design.job.software == software


MIXTURE = {
    "arch": "moe",
    "gated": "yes",
    "n_experts": "16",
    "topk": "2",
    "expert_ffn": "1024",
    "n_shared": "1",
}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "Abacus"}, "no figures of the device Abacus"),
        ({"arch": "rwkv"}, "arch: 'rwkv' is not one of"),
        ({"arch": "moe"}, "expert_ffn is not printed"),
        ({**MIXTURE, "ep": "3"}, "ep 3 x etp 2 does not divide"),
        ({"cp": "3"}, "x cp 3 x dp"),
        ({"extra": "task=lora;"}, "adapters alone"),
        ({"layers": ""}, "layers is not printed"),
        ({"mbs": "3"}, "not whole microbatches"),
        ({"dp": "3"}, "is not 16 devices"),
        ({"schedule": "round-robin"}, "the schedule round-robin is not known"),
        ({"vpp": "3", "gbs": "56"}, "not a multiple of 2 pipeline ranks"),
        ({"precision": "nvfp4"}, "has no peak for nvfp4"),
        ({"offload": "everything"}, "offload everything is not known"),
        ({"heads": "15"}, "15"),
        ({"tp": "two"}, "tp: 'two' is not a number"),
        ({"layers": "1e9"}, "layers: '1e9' is not between"),
        ({"layers": "1_0"}, "not a number"),
        ({"gpus_per_node": "0"}, "gpus_per_node: '0' is not between"),
        ({"iter_s": "-1"}, "iter_s"),
        ({"iter_s": "inf"}, "iter_s"),
        ({"mbs": "1.5"}, "not a whole number"),
        ({"noise_pct": "-100"}, "noise_pct"),
        ({"status": "weird"}, "status: 'weird' is not one of ok, oom, fail"),
        ({"status": ""}, "status is blank"),
        ({"flash": "maybe"}, "flash: 'maybe' is not one of yes, no"),
        ({"ga": "3"}, "3 accumulation steps"),
        ({"schedule": "gpipe", "vpp": "2"}, "gpipe runs one stage on each rank"),
        ({"precision": "fp8xyz"}, "fp8xyz is not known"),
        ({"tp": "3", "n_gpus": "24"}, "3 tensor ranks do not divide 16 heads"),
        ({"arch": "llama", "gated": "no"}, "not gated"),
        ({"layers": "1", "pp": "4", "dp": "2", "extra": "first and last stage have one layer fewer"}, "do not fill"),
    ],
)
def test_a_row_that_no_plan_says_has_its_reason(changes: dict[str, str], reason: str) -> None:
    found = replay_row(row(**changes))
    assert found.point is None
    assert reason in found.reason


def test_a_row_without_a_microbatch_is_taken_to_have_the_fastest() -> None:
    open_row = row(mbs="", ga="")
    found = express(open_row)
    assert found.design.plan.microbatch == 1
    assert [design.plan.microbatch for design in found.others] == [2, 4, 8]
    assert all(design.plan.batch == 64 for design in found.others)
    predicted = replay_row(open_row).point
    assert predicted is not None
    tried = [cost.predict(design).step_seconds for design in (found.design, *found.others)]
    assert predicted.predicted_seconds == min(tried)
    assert "the microbatch that is predicted fastest" in found.assumed


def test_a_mixture_is_rebuilt_and_laid_on_its_grid() -> None:
    found = express(row(**MIXTURE, ep="4"))
    mixture = found.design.model.layers[0].transform
    assert isinstance(mixture, Mixture)
    assert (mixture.experts, mixture.top_k, mixture.hidden) == (16, 2, 1024)
    assert mixture.shared is not None
    assert found.design.plan.experts == ExpertGrid(expert=4, tensor=2)
    tuned = express(row(**MIXTURE, ep="4", framework="NeMo/Megatron-Core"))
    assert tuned.design.plan.experts == ExpertGrid(expert=4, tensor=1)
    assert "experts divided as the rest is, Megatron's default" in found.assumed


def test_a_preset_says_what_columns_cannot() -> None:
    found = express(row(arch="moe-mla", model="deepseek-v3", layers="61", hidden="7168", heads="128", tp="1", dp="8"))
    assert sum(isinstance(layer.transform, Mixture) for layer in found.design.model.layers) == 58


@pytest.mark.parametrize("arch", ["hybrid-mamba", "hybrid-mamba-moe"])
def test_a_hybrid_has_few_layers_that_attend(arch: str) -> None:
    found = express(row(**{**MIXTURE, "arch": arch, "ffn": "8192", "layers": "40"}))
    kinds = [type(layer.mixer) for layer in found.design.model.layers]
    assert (kinds.count(Attention), kinds.count(Recurrence)) == (4, 20)
    assert any("Mamba-2" in told for told in found.assumed)


def test_an_encoder_sees_all_and_a_decoder_attends_to_it() -> None:
    """Layers of a decoder attend twice; printed parameters say whether the layers are of each or of both."""
    bert = express(row(arch="bert")).design.model
    assert all(isinstance(layer.mixer, Attention) and not layer.mixer.causal for layer in bert.layers)
    found = express(row(arch="t5", layers="12", hidden="1024"))
    assert "as many tokens of the decoder as of the encoder" in found.assumed
    layers = found.design.model.layers
    assert [layer.mixer.causal for layer in layers if isinstance(layer.mixer, Attention)] == [False] * 12 + [
        True,
        False,
    ] * 12
    assert sum(layer.transform is not None for layer in layers) == 24
    half = express(row(arch="t5", layers="24", hidden="1024", params_b="0.4")).design.model
    assert (len(half.layers), half.parameters) == (36, found.design.model.parameters)


def test_compiled_programs_have_no_host_to_wait_for() -> None:
    design = express(row(framework="MaxText (JAX)", gpu="TPU-v4", precision="bf16", flash="")).design
    assert design.job.software == "xla"


def test_a_context_axis_and_a_schedule_are_said() -> None:
    plan = express(row(cp="2", dp="2", schedule="gpipe", offload="no")).design.plan
    assert (plan.context, plan.data, plan.world_size) == (2, 2, 16)
    assert plan.schedule.kind is ScheduleKind.GPIPE


def test_a_device_is_known_by_how_its_name_begins() -> None:
    for name, known in (
        ("H100-80GB-SXM", "H100"),
        ("A100-40GB-SXM", "A100-40GB"),
        ("V100-32GB-SXM2", "V100-32GB"),
        ("H200-141GB-SXM", "H200"),
        ("MI300X", "MI300X"),
    ):
        found = known_device(name)
        assert found is not None
        assert found.name == known
    assert known_device("") is None


@pytest.mark.parametrize(
    ("link", "gigabits"),
    [
        ("InfiniBand HDR 8x200Gb/s", 1600.0),
        ("RoCE 4x100Gb", 400.0),
        ("RDMA 400Gb/s per GPU", 3200.0),
        ("InfiniBand HDR 200Gb/s", 200.0),
        ("Ethernet 50 Gb/s", 50.0),
        ("Omni-Path", None),
        ("NVLink3 600GB/s", None),
    ],
)
def test_a_network_is_read_as_its_source_writes_it(link: str, gigabits: float | None) -> None:
    assert node_gigabits(link, devices=8, adapters=8) == gigabits
    group = express(row(inter_link=link)).design.cluster.groups[0]
    if gigabits is not None:
        assert group.nic.bandwidth * group.nics * 8 == pytest.approx(gigabits * 1e9)


def test_seconds_follow_from_rates_where_none_are_printed() -> None:
    assert row().seconds == 2.0
    assert row(iter_s="", tokens_s_gpu="1024").seconds == pytest.approx(64 * 2048 / (1024 * 16))
    printed = row(iter_s="", tflops_gpu="100", flop_conv="hardware FLOPs incl. full recompute (4x fwd)").seconds
    flops = 96 * 64 * 2048 * 24 * 2048**2 * (1 + 1 / 6 + 51200 / (16 * 24 * 2048))
    assert printed == pytest.approx(flops / (100e12 * 16))
    assert row(iter_s="", tflops_gpu="100", flop_conv="megatron").seconds == printed
    assert row(iter_s="", tflops_gpu="100").seconds is None
    assert row(status="oom").seconds is None


def test_scores_of_known_answers() -> None:
    a, b, c = row(), row(line="3", iter_s="3.0"), row(line="4", iter_s="3.01")
    points = [point(a, 2.2), point(b, 2.0), point(c, 2.0, memory=1e9)]
    factors = leave_one_group_out(points)
    assert set(factors.values()) == {0.0}
    found = score(points, rows=4, factors=factors)
    errors = [0.1, 1 / 3, 1 - 2 / 3.01]
    assert found.mape_zero_shot == pytest.approx(100 * sum(errors) / 3)
    assert found.bias == pytest.approx(100 * (0.1 - errors[1] - errors[2]) / 3)
    assert found.pairwise_accuracy == 0.0  # b and c are within the noise of each other
    assert found.kendall_tau == -100.0
    assert found.regret_at_1 == pytest.approx(50.25)  # predictions of b and c tie: either may be tried
    assert found.regret_at_3 == 0.0
    assert found.memory_mape == pytest.approx(100.0)
    assert found.interval_coverage == pytest.approx(100 / 3)
    assert (found.rows, found.predicted, found.inexpressible) == (4, 3, 1)


def test_the_factor_of_a_group_is_that_of_the_others() -> None:
    here, there = row(group="one"), row(line="3", group="two")
    points = [point(here, 1.0), point(there, 4.0)]
    factors = leave_one_group_out(points)
    assert factors[2] == pytest.approx(math.log(2.0 / 4.0))
    assert factors[3] == pytest.approx(math.log(2.0 / 1.0))


def test_every_source_counts_alike_and_memory_is_a_table() -> None:
    few = score([point(row(), 2.2)], rows=1, factors={2: 0.0})
    dead = row(id="d", status="oom")
    many = score([point(row(), 2.6), point(dead, 1.0, fits=False)], rows=2, factors={2: 0.0})
    both = overall([few, many])
    assert both.mape_zero_shot == pytest.approx((10.0 + 30.0) / 2)
    assert both.oom == OutOfMemory(died_refused=1, died_accepted=0, ran_refused=0, ran_accepted=2)
    assert both.pairwise_accuracy is None


def test_the_example_is_replayed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    out = tmp_path / "predictions.csv"
    assert main(["validate", str(EXAMPLE), "--predictions", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    table = list(csv.DictReader(out.open()))
    assert len(table) == document["overall"]["rows"] == len(replay.read_runs(EXAMPLE))
    megatron = document["sources"]["S03-megatron-2104.04473"]
    assert megatron["rows"] == megatron["predicted"] == 10
    assert megatron["mape_zero_shot"] < 12.0
    first = next(entry for entry in table if entry["predicted_seconds"])
    same = next(run for run in replay.read_runs(EXAMPLE) if run.id == first["id"])
    assert float(first["predicted_seconds"]) == pytest.approx(cost.predict(express(same).design).step_seconds)
    assert all(bool(entry["reason"]) is not bool(entry["predicted_seconds"]) for entry in table)
    assert main(["validate", str(EXAMPLE)]) == 0
    assert "mean of sources" in capsys.readouterr().out
    assert meshwright.validate(EXAMPLE).overall.rows == len(table)


def test_processes_share_a_long_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "_ROWS_EACH", 4)
    monkeypatch.setattr(pricing, "_MOST", 5)
    told: list[tuple[int, int]] = []
    shared = replay.validate(EXAMPLE, processes=2, progress=lambda done, total: told.append((done, total)))
    assert shared == replay.validate(EXAMPLE)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len(told) > 2
    assert told[-1] == (len(shared.rows), len(shared.rows))


def write(path: Path, *rows: dict[str, str], encoding: str = "utf-8") -> Path:
    with path.open("w", newline="", encoding=encoding) as file:
        table = csv.DictWriter(file, list(ROW))
        table.writeheader()
        table.writerows(rows)
    return path


def test_files_as_people_save_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {**ROW, "id": "row-2", "source_id": "[bold]s[/x]", "flash": "NO", "status": "OK", "gpu": "[/b]"}
    path = write(tmp_path / "bom.csv", ROW, other, encoding="utf-8-sig")
    found = replay.validate(path)
    assert [bool(entry.point) for entry in found.rows] == [True, False]
    assert main(["validate", str(path)]) == 0
    assert "[bold]s[/x]" in capsys.readouterr().out
    assert main(["validate", str(path), "--predictions", str(path)]) == 2
    assert "would replace the table" in capsys.readouterr().err
    assert main(["validate", str(path), "--predictions", str(tmp_path / "no" / "out.csv")]) == 2
    with path.open("a") as file:
        file.write("torn,row\n")
    torn = replay.validate(path).rows[2]
    assert "more or fewer fields" in torn.reason


@pytest.mark.parametrize("again", ["row-1", ""])
def test_rows_are_told_apart_by_line_whatever_their_ids(tmp_path: Path, again: str) -> None:
    slow = {"framework": "Megatron-Core", "precision": "bf16", "iter_s": "60"}
    rows = [ROW, {**ROW, "group": "h"}, {**ROW, **slow}, {**ROW, **slow, "group": "h"}]
    unique = write(tmp_path / "unique.csv", *({**each, "id": str(index)} for index, each in enumerate(rows)))
    twice = write(tmp_path / "twice.csv", *({**each, "id": again} for each in rows))
    assert replay.validate(twice).overall == replay.validate(unique).overall


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "id,id\n1,2\n", "\x00\x01", None])
def test_what_is_no_table_is_one_error(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"table|rows"):
        replay.read_runs(path)
    assert main(["validate", str(path)]) == main(["validate", "/dev/zero"]) == 2
