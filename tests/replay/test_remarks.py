"""What a table says and nothing reads is told, with its rows."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.replay import read_runs, validate
from meshwright.replay.express import express
from meshwright.replay.remarks import COLUMNS, SETTINGS, remarks
from tests.replay.test_validate import ROW

SHIPPED = Path(__file__).parents[2] / "benchmarks" / "published"


def written(place: Path, *rows: dict[str, str]) -> Path:
    with place.open("w", newline="") as opened:
        table = csv.DictWriter(opened, [*dict.fromkeys(name for row in rows for name in row)])
        table.writeheader()
        table.writerows(rows)
    return place


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ({"schdule": "1f1b"}, "the column 'schdule' is not read: did you mean 'schedule'?"),
        ({"my own words": "fast"}, "the column 'my own words' is not read"),
        ({"inter_link": "Infinband"}, "inter_link 'Infinband' names no network: the usual one"),
        ({"inter_link": "8xH100, IB 400Gb/s"}, "inter_link '8xH100, IB 400Gb/s': 8 is read as no rate and no count"),
        ({"inter_link": "Ethernet 10"}, "inter_link 'Ethernet 10': 10 is read as no rate"),
        ({"inter_link": "InfiniBand 8 400Gb/s"}, "inter_link 'InfiniBand 8 400Gb/s': 8 is read as no rate"),
        ({"inter_link": "3.2 Tb/s RoCE (8 NICs)"}, "inter_link '3.2 Tb/s RoCE (8 NICs)': 8 is read as no rate"),
        ({"n_shared": "2"}, "n_shared is not read where n_experts is blank"),
        ({"expert_ffn": "1024", "ffn": "8192"}, "expert_ffn is not read where n_experts is blank"),
        ({"intra_link": "NVLnk"}, "intra_link 'NVLnk' names no link: the usual one"),
        ({"extra": "warm; stage_layer=12+12"}, "'stage_layer' in extra is not read: did you mean 'stage_layers'?"),
    ],
)
def test_what_nothing_reads_is_remarked(tmp_path: Path, cell: dict[str, str], said: str) -> None:
    found = remarks(read_runs(written(tmp_path / "runs.csv", {**ROW, "id": "first"}, {**ROW, **cell})))
    assert [count for remark, count in found.items() if remark.startswith(said)] == [1]
    assert len(found) == 1


@pytest.mark.parametrize(
    "cells",
    [
        {"gpu": "TPU v5p", "inter_link": "2 slices"},
        {"inter_link": "Slingshot-11 4x200"},
        {"inter_link": "8 ConnectX-7 NICs at 400 Gb/s (NDR)"},
        {"inter_link": "400 Gb/s per NIC, 2 NICs per node"},
        {"inter_link": "RoCE 2x100G + Ethernet 25Gb/s, Ethernet 10 Gb/s between"},
        {"n_experts": "8", "topk": "2", "n_shared": "1", "expert_ffn": "1024", "ffn": "8192"},
        {"arch": "moe", "model": "mixtral-8x7b", "layers": "", "topk": "2", "n_shared": "1"},
        {"inter_link": "InfiniBand, 4 links", "inter_gbit_per_node": "400"},
    ],
)
def test_what_is_read_is_not_remarked(tmp_path: Path, cells: dict[str, str]) -> None:
    assert not remarks(read_runs(written(tmp_path / "runs.csv", {**ROW, **cells})))


def test_ids_of_several_rows_are_remarked(tmp_path: Path) -> None:
    assert remarks(read_runs(written(tmp_path / "runs.csv", ROW, ROW))) == {f"the id {ROW['id']!r} is of 2 rows": 2}


@pytest.mark.parametrize(
    "name",
    [
        "runs.csv",
        "held_out_nvidia.csv",
        "held_out_other.csv",
        "held_out_second.csv",
        "held_out_third.csv",
        "held_out_fourth.csv",
        "held_out_fifth.csv",
        "held_out_sixth.csv",
    ],
)
def test_tables_that_are_shipped_say_nothing_that_is_not_read(name: str) -> None:
    assert remarks(read_runs(SHIPPED / name)) == {}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_are_read_are_remarked_only_when_misspelt(tmp_path: Path, name: str) -> None:
    told = remarks(read_runs(written(tmp_path / "a.csv", {**ROW, "extra": f"{name}=2"})))
    spelt = remarks(read_runs(written(tmp_path / "b.csv", {**ROW, "extra": f"{name}x=2"})))
    assert not told
    assert list(spelt) == [f"'{name}x' in extra is not read: did you mean {name!r}?"]


def test_columns_that_are_named_are_those_of_the_shipped_table() -> None:
    assert set(read_runs(SHIPPED / "held_out_other.csv")[0].columns) <= set(COLUMNS)


@pytest.mark.parametrize(
    ("cell", "fix"),
    [
        ({"gpu": "A10X-80GB"}, "did you mean 'A100-80GB'?"),
        ({"schedule": "1f1"}, "did you mean '1f1b'?"),
        ({"recompute": "ful"}, "did you mean 'full'?"),
        ({"precision": "nvfp"}, "did you mean 'nvfp4'?"),
        ({"zero": "7"}, "one of 0, 1, 2, 3, hsdp"),
        ({"offload": "atc"}, "offload atc is not known; one of activations, none, optimizer, parameters"),
        ({"n_experts": "8", "topk": "9", "ffn": "4096"}, "topk 9 is more than the 8 experts there are"),
        ({"ep": "2"}, "ep 2 of a model without experts; print n_experts, or leave ep blank"),
        ({"tp": "3", "dp": ""}, "tp 3 x pp 2 x cp 1 does not divide 16 devices"),
    ],
)
def test_refused_cells_come_with_the_nearest_that_is_known(tmp_path: Path, cell: dict[str, str], fix: str) -> None:
    (row,) = validate(written(tmp_path / "runs.csv", {**ROW, **cell})).rows
    assert fix in row.reason


def test_remarks_and_first_lines_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "runs.csv", ROW, {**ROW, "id": "two", "gpu": "Abacus", "hiden": "5"})
    assert main(["validate", str(file)]) == 0
    told = capsys.readouterr().out
    assert "first in line" in told
    assert any(line.split()[:2] == ["1", "3"] for line in told.splitlines())
    assert "the column 'hiden' is not read: did you mean 'hidden'?" in told
    assert main(["validate", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["remarks"] == {
        "the column 'hiden' is not read: did you mean 'hidden'?": 1
    }


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("params", "parameters"),
        ("parameters + optimizer", "parameters"),
        ("ZeRO-Infinity", "parameters"),
        ("cpu", "optimizer"),
        ("ZeRO-Offload", "optimizer"),
        ("CPU-Adam", "optimizer"),
        ("act-40-layers", "activations"),
        ("none", "none"),
    ],
)
def test_what_lies_in_the_hosts_memory_by_the_words_of_sources(tmp_path: Path, text: str, kind: str) -> None:
    cells = {"offload": text, "zero": "3", "tp": "1", "pp": "1", "dp": "16", "framework": "DeepSpeed"}
    (row,) = read_runs(written(tmp_path / "runs.csv", {**ROW, **cells}))
    assert express(row).design.plan.first_group.offload == kind


@pytest.mark.parametrize(
    ("text", "kind", "left"),
    [
        ("act+optimizer", "optimizer", "activations"),
        ("optimizer + act-4-layers", "optimizer", "activations"),
        ("act and parameters", "parameters", "activations"),
        ("optimizer+gradients", "optimizer", "gradients"),
        ("optimizer+parameters", "parameters", ""),
        ("parameters & optimizer", "parameters", ""),
        ("act (4 layers)", "activations", ""),
    ],
)
def test_of_several_kinds_in_the_hosts_memory_one_is_taken(tmp_path: Path, text: str, kind: str, left: str) -> None:
    """In either order, and what is left out is told; parameters bring the optimizer's state."""
    cells = {"offload": text, "zero": "3", "tp": "1", "pp": "1", "dp": "16", "framework": "DeepSpeed"}
    (row,) = read_runs(written(tmp_path / "runs.csv", {**ROW, **cells}))
    found = express(row)
    kinds = {group.offload for stage in found.design.plan.stages for group in stage.groups}
    assert kinds == ({kind, "none"} if "4 layers" in text else {kind})
    told = [words for words in found.assumed if "alone in the host's memory" in words]
    assert told == ([f"{kind} alone in the host's memory: a plan holds no {left} there too"] if left else [])
