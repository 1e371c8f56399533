from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import catalog
from meshwright.catalog.documents import read
from meshwright.catalog.migrations import migrate
from meshwright.catalog.overrides import override, parse_value, set_path
from meshwright.catalog.positions import json_lines, locate, toml_lines
from meshwright.spec.errors import ConfigError

TOML = """# a job
name = "x"
optimizer.kind = "adamw"

[data]
tokenizer = \"\"\"
[not] a = 1
\"\"\"
mixed = [
  1,
  { path = "a", weight = 1 },  # ] } "
  { path = "b" },
]

[[data.sources]]
path = 'a # b'
[[data.sources]]
"quoted key" = 1
inner = { deep = { er = 2 } }
[data.sources.below]
x = 1
"""

EXPECTED = {
    "name": 2,
    "optimizer.kind": 3,
    "data": 5,
    "data.tokenizer": 6,
    "data.mixed": 9,
    "data.mixed[0]": 10,
    "data.mixed[1].weight": 11,
    "data.mixed[2].path": 12,
    "data.sources[0]": 15,
    "data.sources[0].path": 16,
    "data.sources[1].quoted key": 18,
    "data.sources[1].inner.deep.er": 19,
    "data.sources[1].below.x": 21,
}


def paths(value: Any, path: str = "") -> list[str]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key, item in value.items():
            found += paths(item, f"{path}.{key}" if path else key)
    if isinstance(value, list):
        for index, item in enumerate(value):
            found += paths(item, f"{path}[{index}]")
    return found


def test_every_key_of_a_toml_text_has_its_line() -> None:
    lines = toml_lines(TOML)
    assert {path: lines.get(path) for path in EXPECTED} == EXPECTED
    assert not any("not" in path for path in lines)


def test_a_path_without_a_line_takes_that_of_the_table_around_it() -> None:
    lines = toml_lines(TOML)
    assert locate(lines, "data.sources[1].nothing") == 17
    assert locate(lines, "nowhere.at.all") == 1


NAMES = st.text("abcxyz", min_size=1, max_size=4)
SCALARS = st.one_of(st.integers(), st.booleans(), st.text(max_size=6), st.floats(allow_nan=False))
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=8
)


@settings(max_examples=25)
@given(st.dictionaries(NAMES, TREES, max_size=4))
def test_every_path_of_a_json_text_is_found_where_it_stands(values: dict[str, Any]) -> None:
    text = json.dumps(values, indent=1)
    lines = json_lines(text)
    assert set(lines) == set(paths(values))
    rows = text.splitlines()
    for path, line in lines.items():
        if not path.endswith("]"):
            assert json.dumps(path.rpartition(".")[2].rpartition("]")[2]) in rows[line - 1]


@settings(max_examples=25)
@given(st.dictionaries(NAMES, TREES, max_size=4))
def test_what_the_writer_writes_is_toml_of_the_same_values_and_all_its_paths_are_found(values: dict[str, Any]) -> None:
    text = catalog.dump_toml(values)
    assert tomllib.loads(text) == values
    assert set(paths(values)) <= set(toml_lines(text))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("1e-3", 1e-3),
        ("true", True),
        ('["a", "b"]', ["a", "b"]),
        ("4Mi", "4Mi"),
        ("zero3", "zero3"),
        ("null", None),
        ("1\nevil = 2", "1\nevil = 2"),
        ("", ""),
    ],
)
def test_a_set_is_a_toml_value_or_text(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_a_set_reaches_into_lists_and_adds_to_them() -> None:
    values = {"data": {"sources": [{"path": "a"}], "names": ["x", "y"]}}
    sets = ["data.sources.0.path=b", "data.sources.1.path=c", "data.names.1=z", "new.0.path=d", "new.0.weight=2"]
    edited = override(values, sets, section="job")
    assert edited.problems == ()
    assert edited.values["data"] == {"sources": [{"path": "b"}, {"path": "c"}], "names": ["x", "z"]}
    assert edited.values["new"] == [{"path": "d", "weight": 2}]
    assert values == {"data": {"sources": [{"path": "a"}], "names": ["x", "y"]}}
    assert set_path("job.data.sources.1.path=c", section="job") == "data.sources[1].path"
    for entry in ("data.sources.2.path=x", "data.sources.path=x", "data.sources.-1.path=x"):
        (problem,) = override(values, [entry], section="job").problems
        assert "'data.sources' is a list of 1: " in problem.what


def test_sets_make_a_new_document_and_the_last_one_wins() -> None:
    values = {"seed": 1, "data": {"tokenizer": "bytes"}}
    edited = override(values, ["job.seed=2", "seed=3", "data.cache=x", "new.deep.key=1"], section="job")
    assert edited.problems == ()
    assert edited.values == {"seed": 3, "data": {"tokenizer": "bytes", "cache": "x"}, "new": {"deep": {"key": 1}}}
    assert values == {"seed": 1, "data": {"tokenizer": "bytes"}}


@pytest.mark.parametrize("entry", ["seed", "=1", "a..b=1", "seed.deep=1"])
def test_a_set_that_cannot_be_is_told_and_changes_nothing(entry: str) -> None:
    edited = override({"seed": 1}, [entry, "other=2"], section="job")
    assert edited.values == {"seed": 1, "other": 2}
    assert [problem.where for problem in edited.problems] == [f"--set {entry}"]


def test_a_newer_schema_is_refused_and_an_older_one_migrates() -> None:
    def rename(values: dict[str, Any]) -> dict[str, Any]:
        return {"new": values["old"], "schema": 1}

    assert migrate({"old": 5, "schema": 1}, kind="K", newest={"K": 2}, steps={("K", 1): rename}) == {
        "new": 5,
        "schema": 2,
    }
    with pytest.raises(ConfigError, match="no way from schema 1"):
        migrate({"schema": 1}, kind="K", newest={"K": 2}, steps={})
    with pytest.raises(ConfigError, match=r"schema 3 is newer.*update meshwright"):
        migrate({"schema": 3}, kind="K", newest={"K": 2}, steps={})
    for odd in (0, True, "1", None):
        with pytest.raises(ConfigError, match="whole number"):
            migrate({"schema": odd}, kind="K", newest={"K": 2}, steps={})


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read(path)
    return str(caught.value)


def test_files_that_cannot_be_read_are_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("a = 1\n")
    assert "no such file; did you mean 'job.toml'?" in refused(tmp_path / "jb.toml")
    assert "does not exist either" in refused(tmp_path / "no" / "job.toml")
    assert "no such file; standard input is not read: name a TOML or JSON file" in refused(Path("-"))
    assert "is a folder, not a file; name one of its files: job.toml" in refused(tmp_path)
    (tmp_path / "b.toml").write_bytes(b"a = 1 \xff\xfe")
    assert "byte 6 is not UTF-8" in refused(tmp_path / "b.toml")
    (tmp_path / "z.json").write_bytes(b'{"a": "\0"}')
    assert "zero byte" in refused(tmp_path / "z.json")
    assert "cannot be read" in refused(tmp_path / ("x" * 4000))
    assert "is longer than 64 MiB" in refused(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.toml", "a = \n", "not TOML: Invalid value (at line 1"),
        ("a.toml", "a = 1\na = 2\n", "not TOML: Cannot overwrite a value (at line 2"),
        ("a.json", '{\n "a": 1,,\n}', "a.json:2: not JSON"),
        ("a.json", "", "the file is empty"),
        (
            "a.txt",
            "seed = 3\n",
            "a.txt:1: not JSON: Expecting value at column 1; it is TOML: give it a name",
        ),
        ("a.json", "seed = 3\n", "it is TOML: give it a name that ends in .toml"),
        ("a.txt", "seed : 3\n", "TOML is read from files that end in .toml alone"),
        ("a.toml", '{"seed": 3}', "it is JSON: give it a name that ends in .json"),
        ("a.json", '{"plan": {}, "plan": {"a": 1}}', "'plan' is there twice; leave one of them out"),
        ("a.json", "[1]", "expected a table of keys, got a list"),
        ("a.json", "[" * 100_000, "nested too deep"),
    ],
)
def test_syntax_errors_have_a_place(tmp_path: Path, name: str, text: str, expected: str) -> None:
    (tmp_path / name).write_text(text)
    assert expected in refused(tmp_path / name)


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbfa = 1\r\n")
    assert read(tmp_path / "a.toml").values == {"a": 1}
