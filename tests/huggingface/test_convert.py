"""Weights into a run and out of it: the same bits, at any plan, a tensor at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import catalog
from meshwright.catalog.decoders.load import load_model
from meshwright.catalog.huggingface.folder import open_folder
from meshwright.catalog.huggingface.write import config_of
from meshwright.cli import app
from meshwright.data import prepare
from meshwright.nn import Decoder, initialize
from meshwright.parallel.relocate import whole_of
from meshwright.run import convert, verify
from meshwright.run.files import write_json
from meshwright.run.generate import load_model as load_decoder
from meshwright.spec.errors import ConfigError, EnvironmentUnfit, ExitCode
from meshwright.spec.plan import Sharding
from meshwright.train.huggingface import load_weights
from meshwright.train.huggingface.files import MappedFiles
from tests.huggingface import oracle
from tests.huggingface.cases import configs
from tests.huggingface.folders import write_model
from tests.huggingface.rank_cases import begun, kept
from tests.huggingface.whole import Whole
from tests.support.designs import Layout, design
from tests.support.full_disk import a_full_disk
from tests.support.models import all_models, factored, with_prefix
from tests.support.pool import Pool
from tests.support.sampled import sampled

CASES = configs()
TOLD: dict[str, Any] = json.loads(oracle.TOLD.read_text())
WIDE = Layout(shard=2, tensor=2, sharding=Sharding.PARAMETERS, batch=8)
LONG = Layout(pipeline=2, shard=2, sharding=Sharding.OPTIMIZER, batch=8)


def folder_of(path: Path, case: str, *, dtype: str = "F32") -> Path:
    return write_model(path / case, CASES[case], TOLD[case]["tensors"], dtype=dtype)


def parameters_of(folder: Path) -> dict[str, torch.Tensor]:
    opened = open_folder(folder)
    decoder = Decoder(opened.model).to(torch.float64)
    load_weights(whole_of(Whole(parts=(decoder,))), opened, group=None)
    return {f"model.{name}": x.detach() for name, x in [*decoder.named_parameters(), *decoder.named_buffers()]}


@pytest.mark.parametrize("case", ["llama", "phi3", "gpt2", "mixtral", "gpt_oss", "llama4", "gemma4", "deepseek_v3"])
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_what_goes_in_comes_out_bit_for_bit(tmp_path: Path, case: str, dtype: str) -> None:
    source = folder_of(tmp_path, case, dtype=dtype)
    (source / "generation_config.json").write_text('{"temperature": 0.5}')
    convert.to_run(source, tmp_path / "run")
    asked = {"BF16": "bf16", "F32": "fp32"}[dtype]
    found = convert.to_huggingface(tmp_path / "run", tmp_path / "back", dtype=asked, shard_bytes=3000)
    assert found.tensors == len(TOLD[case]["tensors"])
    before, after = (open_folder(path) for path in (source, tmp_path / "back"))
    assert before.model == replace(after.model, name=before.model.name)
    assert after.dtypes[0] == dtype
    files = {stored.file for stored in after.tensors.values()}
    assert len(files) > 5
    values = [{name: file.tensor(name) for name in before.tensors} for file in (_files(before), _files(after))]
    assert all(torch.equal(values[0][name], values[1][name]) for name in before.tensors)
    told = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: told[key] for key in CASES[case]} == CASES[case]
    assert told["torch_dtype"] == found.dtype
    assert (tmp_path / "back" / "generation_config.json").read_text() == '{"temperature": 0.5}'


def test_what_is_not_trained_here_comes_back_when_it_is_asked_for(tmp_path: Path) -> None:
    """An indexer beside dense attention, and a vision tower beside a language model."""
    text, tower = CASES["llama4"], {"vision_model.norm.weight": [5], "multi_modal_projector.linear_1.weight": [16, 5]}
    config = {"model_type": "llama4", "text_config": text, "tie_word_embeddings": False}
    shapes = {f"language_model.{name}": shape for name, shape in TOLD["llama4"]["tensors"].items()} | tower
    beside = write_model(tmp_path / "llama4", config, shapes)
    told = {name.replace("model.", "model.language_model.", 1): x for name, x in TOLD["gemma4"]["tensors"].items()}
    seeing = {"model.vision_tower.std_bias": [5], "model.embed_vision.embedding_projection.weight": [16, 5]}
    config = {"model_type": "gemma4", "text_config": CASES["gemma4"], "tie_word_embeddings": True}
    gemma = write_model(tmp_path / "gemma4", config, told | seeing)
    for source, left_out in ((folder_of(tmp_path, "glm_moe_dsa"), 10), (beside, 2), (gemma, 2)):
        run, back = tmp_path / f"{source.name}-run", tmp_path / f"{source.name}-back"
        found = convert.to_run(source, run)
        assert found.left_out == left_out
        assert "--rest" in "".join(found.lines())
        assert convert.to_huggingface(run, back, rest=source, dtype="fp32").tensors == found.tensors + left_out
        before, after = (open_folder(path) for path in (source, back))
        for told in ("tensors", "rest"):
            ours, theirs = (MappedFiles(getattr(folder, told)) for folder in (after, before))
            assert all(torch.equal(ours.tensor(name), theirs.tensor(name)) for name in getattr(before, told))
    convert.to_huggingface(tmp_path / "llama4-run", tmp_path / "alone", dtype="fp32")
    alone = open_folder(tmp_path / "alone")
    assert alone.config["model_type"] == "llama4_text"
    assert set(alone.tensors) == set(TOLD["llama4"]["tensors"])
    assert not alone.rest


def test_sparse_attention_is_trained_no_further_than_it_is_dense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folder_of(tmp_path, "glm_moe_dsa")
    assert load_model(f"{source}:language").layers == open_folder(source).model.layers
    asked = [word for entry in ("sequence_length=32", "batch_tokens=64") for word in ("--set", entry)]
    assert app.run(["plan", "--model", f"{source}:language", "--cluster", "local:1", *asked]) == ExitCode.USAGE
    assert "dense up to so many positions" in capsys.readouterr().err


def _files(folder: Any) -> Any:
    from meshwright.train.huggingface.files import MappedFiles

    return MappedFiles(folder.tensors)


def test_scales_less_one_come_back_to_the_nearest_number(tmp_path: Path) -> None:
    source = folder_of(tmp_path, "gemma2", dtype="BF16")
    convert.to_run(source, tmp_path / "run")
    convert.to_huggingface(tmp_path / "run", tmp_path / "back", dtype="bf16")
    before, after = (parameters_of(path) for path in (source, tmp_path / "back"))
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=2.0**-23)


@pytest.mark.parametrize(
    ("case", "layout"),
    sampled((("gpt_oss", WIDE), ("deepseek_v3", WIDE), ("gpt2", LONG), ("qwen3", LONG)), quick=2),
)
def test_every_rank_of_any_plan_reads_its_part(pool: Pool, tmp_path: Path, case: str, layout: Layout) -> None:
    source = folder_of(tmp_path, case)
    expected = parameters_of(source)
    convert.to_run(source, tmp_path / "run")
    laid = design(open_folder(source).model, layout)
    for start in (str(source), None):
        for found in pool.run(begun, laid, str(tmp_path / "run"), start, ranks=layout.ranks):
            assert set(found) == set(expected)
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_ranks_that_share_a_vocabulary_unevenly_read_and_write_their_rows(pool: Pool, tmp_path: Path) -> None:
    config = {**CASES["llama"], "vocab_size": 43}
    shapes = {name: [43, 16] if shape == [48, 16] else shape for name, shape in TOLD["llama"]["tensors"].items()}
    source = write_model(tmp_path / "llama", config, shapes)
    expected = parameters_of(source)
    convert.to_run(source, tmp_path / "run")
    laid = design(open_folder(source).model, Layout(shard=3, tensor=2, sharding=Sharding.PARAMETERS, batch=6))
    for start in (str(source), None):
        for found in pool.run(begun, laid, str(tmp_path / "run"), start, ranks=6):
            assert all(torch.equal(found[name], expected[name]) for name in expected)
    pool.run(kept, laid, str(tmp_path / "run"), str(source), ranks=6)
    convert.to_huggingface(tmp_path / "run", tmp_path / "back", dtype="fp32")
    back = parameters_of(tmp_path / "back")
    assert all(torch.equal(back[name], expected[name]) for name in expected)


def test_a_run_begins_with_the_weights_it_is_told_to_and_no_others(tmp_path: Path) -> None:
    """Through `train`: the first loss is that of the folder's weights."""
    from meshwright.run.preflight import check_start

    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 200)
    config = {**CASES["llama"], "vocab_size": 256, "max_position_embeddings": 32}
    shapes = {n: [256, 16] if s == [48, 16] else s for n, s in TOLD["llama"]["tensors"].items()}
    source = write_model(tmp_path / "llama", config, shapes)
    sets = [f"start={source}", "sequence_length=16", "batch_tokens=64", "total_tokens=128"]
    arguments = ["train", "--model", str(source), "--cluster", "local:1", "--data", str(text), "--quiet"]
    asked = [word for entry in sets for word in ("--set", entry)]
    assert app.run([*arguments, *asked, "--run", str(tmp_path / "run")]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first = next(row for row in map(json.loads, lines) if "loss" in row)
    kept = catalog.load_design(tmp_path / "run")
    assert kept.job.start == str(source)
    corpus = prepare(kept.job.data, sequence_length=16, seed=kept.job.seed, cache=tmp_path / "again")
    batch = corpus.train.sequences(0, 4)
    opened = open_folder(source)
    decoder = Decoder(opened.model)
    load_weights(whole_of(Whole(parts=(decoder,))), opened, group=None)
    logits = decoder(torch.from_numpy(batch.tokens), documents=torch.from_numpy(batch.documents))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten())
    assert first["loss"] == pytest.approx(loss.item(), rel=2e-2)  # bf16 products
    assert convert.to_huggingface(tmp_path / "run", tmp_path / "out").dtype == "bfloat16"
    other = replace(kept, model=replace(kept.model, layers=kept.model.layers[:1]))
    with pytest.raises(ConfigError, match=r"job\.start"):
        check_start(other)
    prompted = replace(kept, model=with_prefix(kept.model))
    check_start(prompted)
    (tmp_path / "prompted").mkdir()
    write_json(tmp_path / "prompted" / "design.json", prompted)
    with pytest.raises(ConfigError, match="no family there says a prefix mask"):
        convert.to_huggingface(tmp_path / "prompted", tmp_path / "none")
    with pytest.raises(ConfigError, match="not a Hugging Face folder"):
        check_start(replace(kept, job=replace(kept.job, start=str(tmp_path / "nowhere"))))


@pytest.mark.parametrize("name", ["tiny", "gpt", "tied", "llama3", "yarn", "head_norm", "window", "biases", "mixture"])
def test_a_model_that_never_had_a_config_is_given_one(name: str) -> None:
    model = all_models()[name]
    if name == "head_norm":
        model = replace(model, layers=tuple(_without_post_norm(layer) for layer in model.layers))
    config = config_of(model)
    from meshwright.catalog.huggingface import model_from_config

    assert replace(model_from_config(config, name=model.name), source="") == model


def _without_post_norm(layer: Any) -> Any:
    return replace(layer, mixer=replace(layer.mixer, post_norm=None))


@pytest.mark.parametrize("name", ["latent_direct", "mixture_full", "partial", "attention_only", "shared_key_value"])
def test_a_model_that_no_family_says_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no Hugging Face form"):
        config_of(all_models()[name])


def test_the_model_of_a_converted_folder_generates(tmp_path: Path) -> None:
    convert.to_run(folder_of(tmp_path, "qwen3"), tmp_path / "run")
    loaded = load_decoder(tmp_path / "run")
    assert loaded.step == 0
    expected = parameters_of(tmp_path / "qwen3")
    assert all(torch.equal(x.double(), expected[f"model.{name}"]) for name, x in loaded.decoder.named_parameters())


def test_a_disk_that_is_full_is_told_in_the_system_s_words_and_nothing_stays(tmp_path: Path) -> None:
    convert.to_run(folder_of(tmp_path, "llama"), tmp_path / "run")
    with a_full_disk(), pytest.raises(EnvironmentUnfit, match="out: File too large; free space there"):
        convert.to_huggingface(tmp_path / "run", tmp_path / "out", dtype="fp32")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_converted_is_told_before_anything_is_written(tmp_path: Path) -> None:
    source = folder_of(tmp_path, "llama")
    with pytest.raises(ConfigError, match="is not an empty folder"):
        convert.to_run(source, source)
    with pytest.raises(ConfigError, match="neither a run nor"):
        convert.to_huggingface(tmp_path / "gone", tmp_path / "out")
    convert.to_run(folder_of(tmp_path, "qwen3"), tmp_path / "other")
    plan = tmp_path / "other" / "design.json"
    with pytest.raises(ConfigError, match="another model than"):
        convert.to_run(source, tmp_path / "run", plan=plan)
    assert not (tmp_path / "run").exists()


def test_a_wrong_config_or_type_of_numbers_is_refused(tmp_path: Path) -> None:
    convert.to_run(folder_of(tmp_path, "llama"), tmp_path / "run")
    other = folder_of(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match="says another model"):
        convert.to_huggingface(tmp_path / "run", tmp_path / "out", config=other)
    with pytest.raises(ConfigError, match="'int4' is unknown"):
        convert.to_huggingface(tmp_path / "run", tmp_path / "out", dtype="int4")
    assert not (tmp_path / "out").exists()


def test_verify_without_transformers_says_so_before_it_converts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(EnvironmentUnfit, match="transformers is not installed"):
        convert.to_run(folder_of(tmp_path, "llama"), tmp_path / "run", check=True)
    assert not (tmp_path / "run").exists()


def test_the_largest_difference_has_its_place_and_a_wrong_model_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(folder_of(tmp_path, "llama"))

    def nearly(off: float) -> Any:
        def theirs(_: Path, tokens: torch.Tensor) -> tuple[torch.Tensor, str]:
            decoder = verify._of_folder(folder)
            with torch.no_grad():
                logits = decoder(tokens)
            logits[1, 5, 7] += off
            return logits, "0.0"

        return theirs

    monkeypatch.setattr(verify, "_theirs", nearly(1e-4))
    found = verify.compare(folder, verify.transformers_logits(folder, fix=""), run_dir=None)
    assert (found.sequence, found.position, found.token) == (1, 5, 7)
    assert found.largest_difference == pytest.approx(1e-4, rel=1e-2)
    assert "sequence 1, position 5, token 7" in "\n".join(found.lines())
    monkeypatch.setattr(verify, "_theirs", nearly(1.0))
    with pytest.raises(verify.LogitsDiffer, match="sequence 1, position 5, token 7") as caught:
        verify.compare(folder, verify.transformers_logits(folder, fix=""), run_dir=None)
    assert caught.value.exit_code == 3


MEASURE = """
import sys, threading, time
from pathlib import Path
from meshwright.run import convert

def anonymous():
    text = open("/proc/self/status").read()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024

def watched(work):
    import meshwright.train.checkpoint, meshwright.train.huggingface.begin, meshwright.train.huggingface.write
    before, peak, stop = anonymous(), [0], threading.Event()
    def watch():
        while not stop.is_set():
            peak[0] = max(peak[0], anonymous())
            time.sleep(0.001)
    thread = threading.Thread(target=watch)
    thread.start()
    work()
    stop.set()
    thread.join()
    return peak[0] - before

source, place = Path(sys.argv[1]), Path(sys.argv[2])
print(watched(lambda: convert.to_run(source, place / "run")))
print(watched(lambda: convert.to_huggingface(place / "run", place / "out", dtype="fp32")))
"""


def test_no_process_holds_the_model(tmp_path: Path) -> None:
    """Of 134 MB of parameters, the largest of 4 MB, less than a third is ever in memory, with what threads keep."""
    config = {**CASES["llama"], "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 128}
    config |= {"attention_bias": False, "mlp_bias": False, "num_key_value_heads": 4}
    from meshwright.catalog.huggingface import model_from_config
    from meshwright.catalog.huggingface.tensors import tensors

    model = model_from_config(config, name="x")
    shapes = tensors(config, model).theirs
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    from meshwright.train.huggingface.files import write_file

    announced = {name: ("F32", shape) for name, shape in shapes.items()}
    write_file(source / "model.safetensors", announced, make=lambda name: torch.ones(shapes[name]))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(source), str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    whole = 4 * model.parameters
    assert whole > 130e6
    assert max(map(int, done.stdout.split())) < whole / 3


def test_the_command_converts_both_ways_and_tells_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder_of(tmp_path, "llama")
    assert app.run(["convert", str(source), str(tmp_path / "run"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["direction"], told["dtype"], told["verified"]) == ("from_huggingface", "float32", None)
    assert app.run(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--shard-size", "4kB"]) == 0
    assert "tensors" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    for words in (["--dtype", "bf16"], ["--config", str(source)]):
        assert app.run(["convert", str(source), str(tmp_path / "other"), *words]) == 2
    for words in (["--plan", "x.json"], ["--shard-size", "big"], ["--shard-size", "0"]):
        assert app.run(["convert", str(tmp_path / "run"), str(tmp_path / "other"), *words]) == 2


def saved(folder: Path, model: Any) -> Decoder:
    """`folder` is a run whose one checkpoint is the decoder that is returned."""
    from meshwright.train.checkpoint import Store

    laid = design(model, Layout(batch=8))
    decoder = Decoder(model)
    initialize(decoder, seed=1)
    folder.mkdir()
    (folder / "design.json").write_text(laid.to_json())
    store = Store(folder / "checkpoints", design=laid)
    store.save(whole_of(Whole(parts=(decoder,))), step=4, progress={"techniques": {}})
    store.close()
    return decoder


def test_a_model_of_our_own_goes_out_and_comes_in(tmp_path: Path) -> None:
    """A run that no folder began: its config is written for it, and reads back as its model."""
    decoder = saved(tmp_path / "run", all_models()["mixture"])
    convert.to_huggingface(tmp_path / "run", tmp_path / "out", dtype="fp32")
    found = parameters_of(tmp_path / "out")
    assert all(torch.equal(found[f"model.{name}"], x.double()) for name, x in decoder.named_parameters())


@pytest.mark.parametrize("begun_as", ["thin", "whole"])
def test_two_thin_matrices_go_out_as_a_whole_one(tmp_path: Path, begun_as: str) -> None:
    """Of the model of whole matrices, whose logits are the same; a run that became low rank began with whole ones."""
    low = factored(all_models()["gpt"])
    decoder = saved(tmp_path / "run", low).double()
    if begun_as == "whole":
        (tmp_path / "run" / "design.json").write_text(design(low.dense(), Layout(batch=8)).to_json())
    told = convert.to_huggingface(tmp_path / "run", tmp_path / "out", dtype="fp32")
    assert told.parameters == low.dense().parameters > low.parameters
    opened = open_folder(tmp_path / "out")
    merged = Decoder(opened.model).to(torch.float64)
    load_weights(whole_of(Whole(parts=(merged,))), opened, group=None)
    tokens = torch.arange(32).view(2, 16)
    torch.testing.assert_close(merged(tokens), decoder(tokens), rtol=1e-5, atol=1e-5)  # written in fp32
