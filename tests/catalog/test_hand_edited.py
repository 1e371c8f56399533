"""Designs, clusters and models edited by hand: every number that none can have is told, and none is priced."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright import catalog
from meshwright.catalog.devices import devices
from meshwright.catalog.figures import machine_problems, numbers
from meshwright.catalog.model_ranges import model_problems
from meshwright.cli import main
from meshwright.search import design as decide
from meshwright.spec.errors import ConfigError

HUGE, NAN = 10**30, float("nan")
LAYER, GROUP = "model.layers.0", "cluster.groups.0"


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    job = catalog.load_job(None, sets=["batch_tokens=64Ki", "constraints.fix.pipeline=2"])
    made = decide(catalog.load_model("llama-3.1-8b"), catalog.load_cluster("16xH100"), job, top=1)
    document: dict[str, Any] = json.loads(made.design.to_json())
    return document


def edited(document: dict[str, Any], path: str, value: Any) -> str:
    found = copy.deepcopy(document)
    table: Any = found
    *keys, last = path.split(".")
    for key in keys:
        table = table[int(key)] if isinstance(table, list) else table[key]
    table[int(last) if isinstance(table, list) else last] = value
    return json.dumps(found)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("plan.microbatch", -1, "-1 is not at least 1"),
        ("plan.sequence_length", NAN, "expected a whole number, got nan"),
        ("plan.axes.0.size", HUGE, "more than the 16 devices of the cluster"),
        ("plan.schedule.chunks", 10**6, "is more than the 34 blocks of the model"),
        ("plan.schedule.microbatches", HUGE, "rule batch-is-asked"),
        ("plan.stages.0.groups.0.stop", 5, "rule stages-cover"),
        ("plan.stages.0.groups.0.stop", 10**6, "rule stages-hold-blocks"),
        ("plan.placement", [0] * 16, "placement"),
        ("plan.schedule.kind", "zigzag", "'zigzag' is not a choice"),
        ("plan.schema", 9, "plan.schema: schema 9 is not known"),
        ("schema", 9, "schema 9 is newer"),
        (f"{LAYER}.mixer.heads", 0, "0 is not a positive number"),
        (f"{LAYER}.mixer.heads", HUGE, "is more than any model has"),
        (f"{LAYER}.mixer.kv_heads", 3, "3 does not divide 32 heads"),
        (f"{LAYER}.mixer.rotary.dims", 3, "3 is not an even number up to the 128 of a head"),
        (f"{LAYER}.mixer.rotary.planes", 65, "65 is more than the 64 planes of 128 features"),
        (f"{LAYER}.sum_norm", {"width": 4096}, "needs a dense branch beside the transform"),
        (
            f"{LAYER}.dense",
            {"kind": "feed_forward", "width": 4096, "hidden": 8, "norm": None},
            "goes beside a mixture",
        ),
        (f"{LAYER}.mixer.width", 7, "7 is not the width of the model, 4096"),
        (f"{LAYER}.mixer.prefix", 1.5, "1.5 is not a share of a sequence"),
        (f"{LAYER}.mixer.prefix", -0.5, "-0.5 is below 0"),
        (
            f"{LAYER}.mixer",
            {
                "kind": "attention",
                "width": 4096,
                "heads": 32,
                "kv_heads": 8,
                "head_dim": 128,
                "norm": None,
                "causal": False,
                "prefix": 0.5,
            },
            "sees all of the prompt already",
        ),
        ("model.head.vocab", 7, "7 is not the vocabulary, 128256"),
        ("model.layers", [], "model.layers: is empty"),
        (f"{GROUP}.device.memory_bytes", -1, "-1.0 is not positive"),
        (f"{GROUP}.device.peak_flops.bf16", NAN, "nan is not a finite number"),
        (f"{GROUP}.device.launch_seconds", HUGE, "is more than any machine has"),
        (f"{GROUP}.cores", 10**9, "is more than any machine has"),
        (f"{GROUP}.device.usable_fraction", 3, "3.0 is not a share above 0 and up to 1"),
        (f"{GROUP}.device.tiles.sizes", [], "tiles.sizes: is empty"),
        (f"{GROUP}.device.tiles.sizes", [[0, 0]], "0 is not positive"),
        (f"{GROUP}.device.tiles.step", 0, "0 is not positive"),
        (f"{GROUP}.device.scaling", [], "scaling: is empty"),
        (f"{GROUP}.nic.latency_seconds", -1, "-1.0 is below 0"),
        (f"{GROUP}.nic.bandwidth", 0, "0.0 is not positive"),
        ("job.checkpoint.every_steps", -5, "-5 is not finite and from 0"),
        ("job.constraints.fix", {"tp": 2, "tensor": 2}, "tensor is named twice"),
    ],
)
def test_what_no_design_has_is_told_at_its_place(
    path: str, value: Any, told: str, written: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(edited(written, path, value))
    assert main(["explain", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert "Traceback" not in err


def test_machines_that_fail_at_once_are_priced_all_the_same(written: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(edited(written, f"{GROUP}.device.hours_between_failures", 1e-12))
    assert main(["explain", str(tmp_path / "plan.json")]) == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the file is empty"),
        ("{", "not JSON"),
        ("[]", "expected a table of keys, got a list"),
        ("NaN", "expected a table of keys, got a float"),
        ("[" * 100_000, "nested too deep"),
        ('{"schema": 1' + "0" * 5000 + "}", "thousands of digits"),
        ('{"axes": []}', "it holds a plan without its model, cluster and job"),
        ('{"design": 3, "ranked": []}', "expected"),
        ('{"model": {}}', "missing"),
    ],
)
def test_what_is_no_design_is_told(text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text(text)
    for command in ("explain", "report"):
        assert main([command, str(tmp_path / "plan.json")]) == 2
        err = capsys.readouterr().err
        assert told in err
        assert "plan.json" in err
        assert "Traceback" not in err


def presets() -> Iterator[str]:
    yield from (entry.name for entry in catalog.clusters())
    yield from (f"2x2x{name}" for name in devices())


def test_no_preset_has_a_figure_that_is_refused() -> None:
    for name in presets():
        assert not tuple(machine_problems(catalog.load_cluster(name))), name
    for entry in catalog.models():
        assert not tuple(model_problems(catalog.load_model(entry.name))), entry.name


def test_every_number_of_a_cluster_is_looked_at(tmp_path: Path) -> None:
    """Each made no number, one after the other: all are refused, by name."""
    paths = [path for path, _ in numbers(catalog.load_cluster("8xH100")) if path != "schema"]
    assert len(paths) > 30
    catalog.save(catalog.load_cluster("8xH100"), tmp_path / "whole.json")
    whole = json.loads((tmp_path / "whole.json").read_text())
    for path in paths:
        keys = path.replace("[", ".").replace("]", "")
        (tmp_path / "odd.json").write_text(edited(whole, keys, -1))
        with pytest.raises(ConfigError) as caught:
            catalog.load_cluster(str(tmp_path / "odd.json"))
        assert path in str(caught.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("layers = 1000000", "odd.toml:1 layers: 1,000,000 are more layers than a plan is made for; choose 4,096"),
        ("width = 1000000000000000000000000000000", "odd.toml:1 width: 1e+30 is more than any model has"),
        (f"width = 1{'0' * 300}", "odd.toml:1 width: 1e+300 is more than any model has"),
        ("heads = 0", "odd.toml:1 heads: 0 is not a positive number"),
    ],
)
def test_short_models_that_are_too_large_are_told_at_once(
    change: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {"layers": 4, "width": 512, "heads": 8, "kv_heads": 2, "hidden": 1024, "vocab": 1000}
    rest = [f"{name} = {value}" for name, value in whole.items() if name != change.split()[0]]
    (tmp_path / "odd.toml").write_text("\n".join([change, 'kind = "llama"', *rest]))
    assert main(["plan", "--model", str(tmp_path / "odd.toml"), "--cluster", "8xH100"]) == 2
    assert told in capsys.readouterr().err
