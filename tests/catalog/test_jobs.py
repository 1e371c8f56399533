from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import catalog
from meshwright.catalog import documents, ranges
from meshwright.catalog.job_template import COMMENTS
from meshwright.catalog.jobs import job_origins
from meshwright.catalog.overrides import parse_value
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import DataSpec, JobSpec, Source
from meshwright.spec.optimizer import OptimizerSpec
from meshwright.spec.plan import Axis, AxisName, BlockGroup, Design, Plan, Schedule, Stage

BAD = """name = "x"
sequence_length = "2Ki"
batch_tokens = "many"

[optimizer]
knd = "adamw"

[[data.sources]]
path = "a"
[[data.sources]]
pth = "b"
"""


def refused(path: Path | None, *sets: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        catalog.load_job(path, sets=sets)
    return [str(problem) for problem in caught.value.problems]


def test_no_file_and_no_set_is_the_default() -> None:
    assert catalog.load_job(None) == JobSpec()


def test_quantities_have_units_and_sections_may_be_left_out() -> None:
    job = catalog.load_job(None, sets=["job.batch_tokens=4Mi", "total_tokens=300G", "optimizer.learning_rate=1e-3"])
    assert (job.batch_tokens, job.total_tokens, job.optimizer.learning_rate) == (4 * 2**20, 300 * 10**9, 1e-3)


def test_a_file_and_sets_together(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('seed = 3\nprecision = "fp32"\n[constraints.fix]\ntensor = 2\n')
    job = catalog.load_job(file, sets=["seed=4", "constraints.fix.recompute=none"])
    assert (job.seed, job.precision, job.constraints.fix) == (4, Precision.FP32, {"tensor": 2, "recompute": "none"})


def test_files_that_a_job_names_lie_beside_it_and_those_of_sets_where_one_works(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        'start = "weights"\n[data]\ntokenizer = "bpe.json"\n'
        '[[data.sources]]\npath = "text/a.jsonl"\n[[data.sources]]\npath = "/b.txt"\n'
    )
    job = catalog.load_job(file)
    assert (job.start, job.data.tokenizer) == (str(tmp_path / "weights"), str(tmp_path / "bpe.json"))
    assert [source.path for source in job.data.sources] == [str(tmp_path / "text" / "a.jsonl"), "/b.txt"]
    job = catalog.load_job(file, sets=["data.sources.1.path=c.txt", "data.tokenizer=bytes"])
    assert (job.data.sources[1].path, job.data.tokenizer) == ("c.txt", "bytes")
    assert job.data.sources[0].path == str(tmp_path / "text" / "a.jsonl")


def test_what_the_optimizer_keeps_is_told_where_it_is_asked_for() -> None:
    sets = ["optimizer.state=fp8", "optimizer.master=bf16_stochastic"]
    asked = job_origins(catalog.load_job(None, sets=sets), None, sets=sets).asked
    assert (asked["optimizer.state"], asked["optimizer.master"]) == ("fp8", "bf16_stochastic")
    assert not any(name.startswith("optimizer") for name in job_origins(JobSpec(), None).asked)


def test_all_errors_of_a_file_at_once_each_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(BAD)
    assert refused(file) == [
        f"{file}:3 batch_tokens: 'many' is not a number",
        f"{file}:6 optimizer.knd: unknown key; did you mean 'kind'?",
        f"{file}:11 data.sources[1].pth: unknown key; did you mean 'path'?",
        f"{file}:10 data.sources[1]: 'path' is missing",
    ]


def test_a_word_that_is_no_choice_hides_no_number_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        'batch_tokens = "many"\ntotal_tokens = 1000\n[checkpoint]\nkeep = 0\nevery_steps = -1\ninterval = "x"\n'
        '[synchronize]\nkinds = ["dilocoo"]\nevery = -3\n[skip]\nshare = 0.5\nswap = "x"\n'
        '[[data.sources]]\npath = "a"\nweight = "x"\n[[data.sources]]\npath = "b"\nweight = -1\n'
    )
    with pytest.raises(ConfigError) as refused:
        catalog.load_job(str(path), sets=["verify.policy=x", "verify.every_steps=-1"])
    told = sorted(problem.where.partition(" ")[2] for problem in refused.value.problems)
    assert told == [
        "batch_tokens",
        "checkpoint.every_steps",
        "checkpoint.interval",
        "checkpoint.keep",
        "data.sources[0].weight",
        "data.sources[1].weight",
        "skip.share",
        "skip.swap",
        "synchronize.every",
        "synchronize.kinds[0]",
        "verify.every_steps",
        "verify.policy",
    ]


def test_a_word_that_is_no_choice_hides_no_number_of_rounds_and_compressions(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        '[synchronize]\nkinds = ["dilocoo"]\nevery = -3\nquorum = -1\ngrace_seconds = nan\nmost_left_out = 1.5\n'
        'compressions = [{kind = "demo", decay = 7, largest = 100}, {kind = "powersgd", rank = 0, start_step = -1}]\n'
    )
    told = sorted(line.partition(" ")[2].partition(":")[0] for line in refused(path))
    assert told == [
        "synchronize.compressions[0].decay",
        "synchronize.compressions[0].largest",
        "synchronize.compressions[1].rank",
        "synchronize.compressions[1].start_step",
        "synchronize.every",
        "synchronize.grace_seconds",
        "synchronize.kinds[0]",
        "synchronize.most_left_out",
        "synchronize.quorum",
    ]


@pytest.mark.parametrize("written", ["-1", "3", '"0"', "eny"])
def test_how_many_devices_is_asked_for_elsewhere(written: str) -> None:
    (told,) = refused(None, f"constraints.devices={written}")
    assert told.startswith(f"--set constraints.devices: {parse_value(written)!r} is not a choice; one of all, any; ")
    assert "constraints.fix.devices" in told


@pytest.mark.parametrize("path", ["constraints.order", "objective", "compile", "skip.swap", "elastic.backend"])
@pytest.mark.parametrize("written", ["-1", "1.5", "true", "[1]"])
def test_what_is_no_word_is_told_with_the_words(path: str, written: str) -> None:
    (told,) = refused(None, f"{path}={written}")
    assert "is not a choice; one of " in told


def test_errors_of_sets_stand_beside_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("sed = 1\n")
    told = refused(file, "nonsense", "job.optimizer.beta1=high", "precision=bf17")
    assert told == [
        "--set nonsense: expected key=value; write --set optimizer.kind=adamw",
        f"{file}:1 sed: unknown key; did you mean 'seed'?",
        "--set optimizer.beta1: 'high' is not a number",
        "--set precision: 'bf17' is not a choice; did you mean 'bf16'?",
    ]


def test_a_newer_schema_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("seed = 1\nschema = 99\n")
    assert refused(file) == [
        f"{file}:2 schema: schema 99 is newer (this meshwright reads schema 1 and older); update meshwright"
    ]


@pytest.mark.parametrize(
    "entry",
    [
        *(f"{path}=0" for path in (*ranges.AT_LEAST_ONE, *ranges.ABOVE_ZERO)),
        *(f"{path}=-1" for path in ranges.AT_LEAST_ZERO),
        *(f"{path}=1.5" for path in ranges.FRACTIONS),
        *(f"{path}=1.0" for path in ranges.BELOW_ONE),
        *(f"{path}=nan" for path in (*ranges.ABOVE_ZERO, *ranges.FRACTIONS)),
        "peer_timeout_seconds=0.5",
        "peer_timeout_seconds=1e308",
        f"synchronize.every={10**30}",
        f"checkpoint.keep={2**63}",
        'data.sources=[{path="a", weight=0}]',
        'data.sources=[{path="a", weight=inf}]',
    ],
)
def test_a_number_that_no_job_has_is_refused(entry: str) -> None:
    (told,) = refused(None, entry)
    assert told.startswith(f"--set {entry.partition('=')[0]}")


@pytest.mark.parametrize("path", [*ranges.FRACTIONS, *ranges.AT_LEAST_ZERO])
def test_the_ends_of_a_range_are_in_it(path: str) -> None:
    assert catalog.load_job(None, sets=[f"{path}=0"])


def test_none_switches_off_what_may_be_off() -> None:
    assert catalog.load_job(None, sets=["optimizer.clip_norm=none"]).optimizer.clip_norm is None
    assert "expected a number" not in "".join(refused(None, "optimizer.beta1=none"))


def test_a_saved_job_is_read_back_equal(tmp_path: Path) -> None:
    job = JobSpec(
        name='quote " and \\ and \x7f',
        optimizer=OptimizerSpec(clip_norm=None, epsilon=1e-20),
        data=DataSpec(sources=(Source(path="/a"), Source(path="/b", weight=0.5)), cache="c"),
        trackers=("tensorboard",),
    )
    for name in ("job.toml", "job.json"):
        catalog.save(job, tmp_path / name)
        assert catalog.load_job(tmp_path / name) == job


def test_the_template_loads_as_the_default_and_explains_itself(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(catalog.job_template())
    job = catalog.load_job(file)
    assert replace(job, data=replace(job.data, sources=())) == JobSpec()
    assert catalog.job_template().count("\n# ") >= 30
    products = [each for each in Precision if each.multiplies]
    assert all(f" {each.value}" in COMMENTS["precision"] for each in products)
    top = {field.name for field in dataclasses.fields(JobSpec)}
    assert top <= set(COMMENTS)
    written = tomllib.loads(catalog.job_template())
    for path in COMMENTS:
        table = written
        for key in path.split("."):
            table = table[0] if isinstance(table, list) else table
            assert key in table, f"the template has no {path}"
            table = table[key]


def test_a_seed_is_below_the_one_that_begins_again() -> None:
    assert catalog.load_job(None, sets=[f"seed={2**63 - 1}"]).seed == 2**63 - 1
    (told,) = refused(None, f"seed={2**63}")
    assert told.startswith(f"--set seed: {2**63} is not below 2^63")


def test_a_roll_back_needs_checkpoints_on_the_way() -> None:
    asked = ("non_finite.policy=roll_back", "non_finite.most_in_a_row=0")
    assert [line.partition(";")[0] for line in refused(None, *asked)] == [
        "--set non_finite.most_in_a_row: 0 is not at least 1",
        "--set non_finite.policy: there is no checkpoint on the way to roll back to",
    ]


def test_how_often_to_save_is_said_once() -> None:
    chosen = "checkpoint.interval=goodput"
    asked = catalog.load_job(None, sets=[chosen, "non_finite.policy=roll_back"])
    assert asked.checkpoint.on_the_way
    (told,) = refused(None, chosen, "checkpoint.every_steps=5")
    assert told.startswith("--set checkpoint.interval: every_steps says it already")


def test_numbers_that_are_none_and_other_optimizers_are_refused() -> None:
    assert refused(None, "optimizer.learning_rate=inf", "z_loss=nan", "data.validation_fraction=1") == [
        "--set optimizer.learning_rate: inf is not finite and above 0",
        "--set z_loss: nan is not finite and from 0",
        "--set data.validation_fraction: 1.0 is not from 0 to below 1",
    ]
    assert refused(None, "optimizer.kind=adam") == [
        "--set optimizer.kind: kind 'adam' is unknown; did you mean 'adamw'?"
    ]
    assert refused(None, "optimizer.kind=sgd", "optimizer.beta1=0.5") == [
        "--set optimizer.beta1: unknown key; one of clip_norm, groups, kind, learning_rate, momentum, weight_decay"
    ]
    assert refused(None, "optimizer.kind=muon", "optimizer.momentum=1.5", "optimizer.steps=0") == [
        "--set optimizer.steps: 0 is not at least 1",
        "--set optimizer.momentum: 1.5 is not from 0 to below 1",
    ]


def test_a_number_that_no_computer_has_is_told_as_it_was_typed(tmp_path: Path) -> None:
    told = "'1e400' is too large for any computer"
    assert refused(None, "optimizer.learning_rate=1e400") == [f"--set optimizer.learning_rate: {told}"]
    assert refused(None, "batch_tokens=1e400Mi")[0].endswith("'1e400Mi' is too large for any computer")
    assert refused(None, "batch_tokens=1" + 400 * "0")[0].endswith("... is too large for any computer")
    for name, text in (("job.toml", "z_loss = 1e400"), ("job.json", '{"z_loss": 1e400}')):
        path = tmp_path / name
        path.write_text(text)
        assert refused(path) == [f"{path}:1 z_loss: {told}"]


def test_a_number_of_thousands_of_digits_in_another_base_is_refused(tmp_path: Path) -> None:
    digits = "0x" + 5000 * "f"
    assert refused(None, f"precision={digits}")[0].startswith("--set precision: '0xff")
    path = tmp_path / "job.toml"
    path.write_text(f"seed = {digits}")
    assert refused(path) == [f"{path}: a number in it has thousands of digits"]


def test_a_text_of_thousands_of_digits_is_no_number(tmp_path: Path) -> None:
    digits, path = "0x" + 1200 * "f", tmp_path / "job.toml"
    path.write_text(f'# {digits}\nname = "{digits}"\n')
    assert documents.read(path).values == {"name": digits}
    assert parse_value(f"'{digits}'") == digits


def test_a_schema_that_is_set_is_checked_like_one_in_a_file() -> None:
    (told,) = refused(None, "schema=9")
    assert "schema 9 is newer" in told


def made_design() -> Design:
    model, cluster = catalog.load_model("tiny"), catalog.load_cluster("8xH100")
    plan = Plan(
        model=model.name,
        cluster=cluster.name,
        axes=(Axis(name=AxisName.SHARD, size=8),),
        stages=(Stage(rank=0, groups=(BlockGroup(start=0, stop=6),)),),
        schedule=Schedule(),
        sequence_length=64,
        microbatch=1,
    )
    return Design(model=model, cluster=cluster, job=JobSpec(), plan=plan)


def test_a_plan_without_a_stage_or_with_sizes_of_zero_is_refused(tmp_path: Path) -> None:
    design = made_design()
    plan = replace(design.plan, stages=(), microbatch=0, axes=(Axis(name=AxisName.SHARD, size=0),))
    broken = replace(design, plan=plan, job=JobSpec(total_tokens=-3))
    (tmp_path / "design.json").write_text(broken.to_json())
    with pytest.raises(ConfigError) as caught:
        catalog.load_design(tmp_path)
    told = [str(problem).partition(" ")[2] for problem in caught.value.problems]
    assert told == [
        "plan.microbatch: 0 is not at least 1; choose 1 or more",
        "plan.axes[0].size: 0 is not at least 1; choose 1 or more",
        "plan.stages: is empty; give at least one",
        "job.total_tokens: -3 is not at least 1; write the plan again with meshwright plan --out",
    ]


def test_a_design_is_read_from_its_file_or_its_run(tmp_path: Path) -> None:
    design = made_design()
    (tmp_path / "design.json").write_text(design.to_json())
    assert catalog.load_design(tmp_path) == design
    assert catalog.load_design(tmp_path / "design.json") == design
    (tmp_path / "design.json").write_text(design.to_json().replace('"microbatch":', '"microbatc":', 1))
    with pytest.raises(ConfigError, match=r"design\.json:\d+ plan\.microbatc: unknown key; did you mean 'microbatch'"):
        catalog.load_design(tmp_path)


def test_wrong_units_are_told_with_the_right_ones() -> None:
    assert refused(None, "total_tokens=15B", "sequence_length=2s") == [
        "--set total_tokens: '15B' is in bytes and a count is expected: billions are written G, as in 15G",
        "--set sequence_length: '2s' is in seconds and a count is expected: a count has no unit",
    ]


def test_what_was_asked_of_a_job_is_told() -> None:
    sets = ["precision=bf16", 'other_precisions=["fp8", "fp32"]', "constraints.order=usual", "constraints.devices=any"]
    found = job_origins(catalog.load_job(None, sets=sets), None, sets=sets)
    limits = {"constraints.devices": "any", "constraints.order": "usual"}
    assert found.asked == {"precision": "bf16", "other_precisions": "fp8, fp32", **limits}


@pytest.mark.parametrize("text", ["fp8,fp32", "[fp8, fp32]"], ids=["bare", "quotes-taken-by-a-shell"])
def test_a_list_that_is_none_is_told_as_it_should_be_written(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        catalog.load_job(None, sets=[f"other_precisions={text}"])
    assert raised.value.problems[0].fix == 'write ["fp8", "fp32"]'


@pytest.mark.parametrize("said", ["fp8", "bf16"])
def test_a_precision_that_is_said_and_another_that_is_fixed_contradict(said: str, tmp_path: Path) -> None:
    fixed = "fp8" if said == "bf16" else "bf16"
    sets = (f"precision={said}", f"constraints.fix.precision={fixed}")
    told = f"{fixed} is fixed, and --set precision says {said}; drop one of the two, or say the same in both"
    assert refused(None, *sets, "z_loss=-1") == [
        f"--set constraints.fix.precision: {told}",
        "--set z_loss: -1.0 is not finite and from 0",
    ]
    file = tmp_path / "job.toml"
    file.write_text(f'precision = "{said}"\n[constraints.fix]\nprecision = "{fixed}"\n')
    (problem,) = refused(file)
    assert problem.startswith(f"{file}:3 constraints.fix.precision: {fixed} is fixed, and {file}:1 precision says")


def test_a_fixed_precision_that_contradicts_nothing_said_is_taken() -> None:
    fix = "constraints.fix.precision=fp8"
    for others in ((), ("precision=fp8",), ("precision=bf16", 'other_precisions=["fp8"]')):
        assert catalog.load_job(None, sets=[fix, *others]).constraints.fix == {"precision": "fp8"}


def test_a_precision_that_is_fixed_is_no_default() -> None:
    sets = ["constraints.fix.precision=fp8"]
    found = job_origins(catalog.load_job(None, sets=sets), None, sets=sets)
    assert "precision" not in found.defaults
    assert found.asked["constraints.fix.precision"] == "fp8"


def test_a_name_that_toml_cannot_hold_is_refused_and_json_holds_it(tmp_path: Path) -> None:
    job = replace(catalog.load_job(None), start=f"{tmp_path}/run-\udcff")
    with pytest.raises(ConfigError, match="TOML cannot hold this"):
        catalog.save(job, tmp_path / "job.toml")
    catalog.save(job, tmp_path / "job.json")
    assert catalog.load_job(tmp_path / "job.json") == job
