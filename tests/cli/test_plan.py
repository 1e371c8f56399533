"""`meshwright plan`, `models`, `clusters` and `version` from end to end, without torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import catalog, search
from meshwright.cli import main
from meshwright.search import Decision
from meshwright.spec import codec
from meshwright.spec.errors import ConfigError
from tests.support.full_disk import a_full_disk

pytestmark = pytest.mark.usefixtures("searched_once")

SETS = ("sequence_length=2048", "batch_tokens=1Mi", "total_tokens=1T")
TOP = ["--cluster", "16xH100", "--top", "3"]
PLAN = ["plan", "--model", "llama-3.1-8b", *TOP, *(part for text in SETS for part in ("--set", text))]
SMALL = ["plan", "--model", "llama-5m", *TOP]
FEW = [part for column in ("context", "pipeline") for part in ("--set", f"constraints.fix.{column}=1")]


def test_plan_prints_a_table_and_writes_what_train_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "plan.json"
    assert main([*PLAN, "--out", str(out)]) == 0
    text, notes = capsys.readouterr()
    design = catalog.load_design(out)
    assert design.plan.describe() in " ".join(text.split())
    assert design.plan.digest() in notes
    said = [line for line in notes.splitlines() if not line.endswith(" so far")]
    assert said[0] == f"folder {out.parent} was not there and is made"
    assert design.job.batch_tokens == 2**20
    for word in (
        "tokens/s",
        "MFU",
        "bubble",
        "backward",
        "activations",
        "why",
        "rejected",
        "memory-fits",
        "instead of",
    ):
        assert word in text, word
    assert "\x1b[" not in text, "no colour where there is no terminal"


def test_what_a_design_was_chosen_from_is_found_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "plan.json"
    assert main([*PLAN, "--out", str(out)]) == 0
    assert "plan.decision.json" in capsys.readouterr().err
    design = catalog.load_design(out)
    kept = search.read_decision(out, plan=design.plan)
    assert kept is not None
    assert len(kept.ranked) == 3
    assert main(["report", str(out)]) == 0
    assert "legal plans were" in out.with_suffix(".html").read_text()

    given: list[object] = []

    def train(_: object, **options: object) -> object:
        given.append(options["decision"])
        raise ConfigError("it stops here")

    monkeypatch.setattr("meshwright.run.train.train", train)
    assert main(["train", str(out), "--run", str(tmp_path / "run")]) == 2
    assert given == [kept]

    other = replace(design.plan, microbatch=design.plan.microbatch + 1)
    assert search.read_decision(out, plan=other) is None
    (tmp_path / "plan.decision.json").write_text("{")
    capsys.readouterr()
    assert main(["report", str(out)]) == 2
    assert "plan.decision.json:1: not JSON" in capsys.readouterr().err


def test_plan_prints_one_document_that_is_the_decision(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--json"]) == 0
    text, _ = capsys.readouterr()
    decision = codec.decode(Decision, json.loads(text))
    assert len(decision.ranked) == 3
    assert decision.report.plan == decision.design.plan.digest()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_name_from_a_file_moves_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    file = tmp_path / "model.toml"
    short = "layers = 1\nwidth = 64\nheads = 4\nhidden = 128\nvocab = 256\n"
    file.write_text(f'kind = "llama"\nname = "\\u001b]0;mine\\u0007"\n{short}')
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    sets = ("--set", "sequence_length=64", "--set", "batch_tokens=256", "--set", "total_tokens=1024")
    assert main(["plan", "--model", str(file), "--cluster", "1xA100", *sets]) == 0
    text = capsys.readouterr().out
    assert "\\x1b]0;mine" in text
    assert "\x1b]" not in text
    assert "\x07" not in text


@pytest.mark.parametrize("columns", [80, 140])
def test_no_line_is_wider_than_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(PLAN) == 0
    text, _ = capsys.readouterr()
    assert max(len(line) for line in text.splitlines()) <= columns
    assert "…" not in text, "nothing is cut off"


def test_nothing_fits_is_exit_code_3_with_a_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-3.1-70b", "--cluster", "2xH100"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "needs" in err
    assert re.search(r"; \d+ such devices would fit \(", err)


def test_a_precision_that_devices_lack_is_told_with_the_setting_that_they_have(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--model", "tiny", "--cluster", "8xT4", "--set", "precision=bf16"]) == 2
    assert "job.precision: T4 has no bf16 arithmetic" in (said := capsys.readouterr().err)
    assert "--set precision=fp16 (or fp32)" in said
    assert main(["plan", "--model", "tiny", "--cluster", "8xT4", "--set", "precision=fp16", *FEW]) == 0
    capsys.readouterr()
    assert main(["plan", "--model", "tiny", "--cluster", "8xT4", "--set", "constraints.fix.precision=fp8"]) == 2
    assert "--set constraints.fix.precision=fp16" in capsys.readouterr().err


def test_what_train_would_refuse_is_warned_of_and_the_plan_is_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = tmp_path / "nothing.jsonl"
    sets = ("data.tokenizer=nowhere.json", f'data.sources=[{{path="{text}"}}]', 'techniques=["low_rnk"]')
    narrow = [*SMALL, *FEW]
    vocab = catalog.load_model("llama-5m").embedding.vocab
    assert main([*narrow, "--json", *(part for entry in sets for part in ("--set", entry))]) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    warned = [line for line in err.splitlines() if line.startswith("warning: train would refuse this job here: ")]
    assert len(warned) == 3
    for words in ("nowhere.json", str(text), "technique 'low_rnk' is unknown"):
        assert any(words in line for line in warned), words
    assert main([*narrow, "--set", "data.tokenizer=train:200000"]) == 0
    assert f"the tokenizer has 200,000 tokens and the model reads {vocab:,}" in capsys.readouterr().err


def test_what_does_nothing_in_a_job_is_warned_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text("[synchronize]\nevery = 10\n")
    words = ["plan", "--model", "tiny", "--cluster", "local:2", "--set", "constraints.fix.pipeline=1"]
    assert main([*words, "--job", str(job), "--set", "checkpoint.keep_every_steps=7"]) == 0
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert [line.split(": ")[1] for line in warned] == [
        f"{job}:2 synchronize.every",
        "--set checkpoint.keep_every_steps",
    ]


def test_fewer_tokens_than_one_step_reads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "tiny", "--cluster", "8xH100", "--set", "total_tokens=1Mi"]) == 2
    assert "total_tokens: 1,048,576 is less than the 4,194,304 tokens of one step" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([*PLAN, "--out", str(tmp_path / "file" / "plan.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_full_disk_is_exit_code_4_and_leaves_the_plan_that_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "plan.json"
    place.write_text("the plan of yesterday")
    with a_full_disk():
        assert main([*PLAN, "--out", str(place)]) == 4
    assert f"{place}: cannot be written: File too large; free space there" in capsys.readouterr().err
    assert place.read_text() == "the plan of yesterday"


@pytest.mark.parametrize("page", ["plan.json", "plan.decision.json"])
def test_files_that_would_replace_one_another_are_refused_before_the_search(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert main([*PLAN, "--out", str(out), "--html", str(tmp_path / page)]) == 2
    assert "two things would be written to it" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_what_is_no_plain_file_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--out", "/dev/null"]) == 2
    assert "no plain file" in capsys.readouterr().err


def test_plan_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert main([*PLAN, "--html", str(page)]) == 0
    assert "was not there" not in capsys.readouterr().err
    assert "<html" in page.read_text()[:500]


def test_models_and_clusters_list_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    for command, name, words in (
        ("models", "llama-3.1-8b", ("8,030,261,248 parameters", "32 heads of 128, 8 key-value")),
        ("clusters", "16xH100", ("16 devices", "peak bf16", "data sheet", "adapters a node")),
    ):
        assert main([command]) == 0
        listed = capsys.readouterr().out
        assert "what it is" in listed
        assert main([command, "--json"]) == 0
        names = [entry["name"] for entry in json.loads(capsys.readouterr().out)]
        assert all(known in listed for known in names)
        assert main([command, name]) == 0
        shown = capsys.readouterr().out
        assert all(word in shown for word in words), shown
        assert main([command, name, "--json"]) == 0
        json.loads(capsys.readouterr().out)


def test_alike_machines_are_shown_once_and_one_adapter_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clusters", "two-sites"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("memory bandwidth") == 1
    assert shown.count("machines as in ") == 1
    assert main(["clusters", "mixed"]) == 0
    assert capsys.readouterr().out.count("memory bandwidth") == 2
    assert main(["clusters", "pcie-a100"]) == 0
    assert "1 adapter a node " in capsys.readouterr().out


def test_version_names_what_it_stands_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--json"]) == 0
    assert {"meshwright", "python", "torch", "numpy"} <= set(json.loads(capsys.readouterr().out))


def test_planning_never_imports_torch() -> None:
    words = [*SMALL, *FEW]
    script = (
        f"import sys\nfrom meshwright.cli import main\nassert main({words!r}) == 0\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_number_of_the_cluster_is_set_with_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, *FEW, "--json", "--set"]
    assert main([*words, "cluster.inter.bandwidth=1GB/s"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["design"]["cluster"]["groups"][0]["nic"]["bandwidth"] == 1e9
    assert document["design"]["cluster"]["name"] == "16xH100 with inter.bandwidth=1GB/s"
    for entry, told in (
        ("cluster.inter.bandwidth=50", "write 50GB/s"),
        ("cluster.memory=80", "write 80GiB"),
        ("cluster.inter.latency_seconds=5", "write 5us"),
        ("cluster.peak.bf16=989", "write 989TFLOP/s"),
        ("cluster.intr.bandwidth=5GB/s", "did you mean cluster.inter.bandwidth or cluster.intra.bandwidth"),
    ):
        assert main([*words, entry]) == 2
        problem = capsys.readouterr().err
        assert f"--set {entry.split('=')[0]}" in problem
        assert told in problem


def test_sequences_longer_than_the_model_has_positions_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    long = ["plan", "--model", "llama-5m", "--cluster", "2xH100", "--top", "1", "--json", *FEW]
    positions = catalog.load_model("llama-5m").max_positions
    for length, warned in ((positions, False), (2 * positions, True)):
        sets = ["--set", f"sequence_length={length}", "--set", f"batch_tokens={4 * length}"]
        assert main([*long, *sets]) == 0
        out, err = capsys.readouterr()
        told = f"sequences of {length:,} tokens are longer than the {positions:,} positions"
        assert (f"warning: {told}" in err) == warned
        assert any(told in note for note in json.loads(out)["report"]["notes"]) == warned
