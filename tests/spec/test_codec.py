from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec import codec
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import Constraints, JobSpec
from meshwright.spec.model import Attention, FeedForward, Layer, Norm
from meshwright.spec.optimizer import OptimizerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    left: int
    right: float | None = None


NORM = {"width": 8, "kind": "rms"}
LAYER = Layer(
    mixer=Attention(width=8, heads=2, kv_heads=1, head_dim=4, norm=Norm(width=8)),
    transform=FeedForward(width=8, hidden=16, norm=None),
)


@pytest.mark.parametrize("value", [LAYER, JobSpec(), JobSpec(constraints=Constraints(fix={"tensor": 2}))])
def test_what_is_written_is_read_back_equal(value: object) -> None:
    text = json.dumps(codec.encode(value))
    assert codec.decode(type(value), json.loads(text)) == value


@given(st.integers(), st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)))
def test_round_trip_of_any_pair(left: int, right: float | None) -> None:
    pair = Pair(left=left, right=right)
    assert codec.decode(Pair, json.loads(codec.canonical(pair))) == pair


def test_a_lasting_text_says_what_is_not_at_its_default_and_of_which_kind() -> None:
    assert codec.lasting(Pair(left=1)) == '{"left":1}'
    assert codec.lasting(Pair(left=1, right=2.0)) == '{"left":1,"right":2.0}'
    assert json.loads(codec.lasting(LAYER)) == {
        "mixer": {"width": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "norm": NORM, "kind": "attention"},
        "transform": {"width": 8, "hidden": 16, "norm": None, "kind": "feed_forward"},
        "kind": "layer",
    }


def test_every_error_is_found_at_once_with_its_place_and_the_nearest_name() -> None:
    bad = {"sequence_lenth": 8, "optimizer": {"learning_rate": "fast", "betaa1": 1}, "precision": "bf15"}
    with pytest.raises(ConfigError) as caught:
        codec.decode(JobSpec, bad, "job")
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    assert "job.sequence_lenth: unknown key; did you mean 'sequence_length'?" in text
    assert "job.optimizer.learning_rate: 'fast' is not a number" in text
    assert "job.optimizer.betaa1: unknown key; did you mean 'beta1'?" in text
    assert "job.precision: 'bf15' is not a choice; did you mean 'bf16'?" in text


def test_missing_fields_and_wrong_types() -> None:
    with pytest.raises(ConfigError, match="'left' is missing"):
        codec.decode(Pair, {})
    with pytest.raises(ConfigError, match=r"expected a whole number, got 1\.5"):
        codec.decode(Pair, {"left": 1.5})
    with pytest.raises(ConfigError, match="expected a whole number, got true"):
        codec.decode(Pair, {"left": True})
    with pytest.raises(ConfigError, match="expected a whole number, got null"):
        codec.decode(Pair, {"left": None})
    with pytest.raises(ConfigError, match="expected a table, got"):
        codec.decode(Pair, [1])


def test_numbers_may_carry_units() -> None:
    assert codec.decode(JobSpec, {"batch_tokens": "4Mi"}).batch_tokens == 4 * 2**20


@pytest.mark.parametrize(
    ("path", "text", "says"),
    [
        ("nic.bandwidth", "5ms", "'5ms' is not bytes a second; write for example 450GB/s or 400Gbit/s"),
        ("nic.bandwidth", "5GB", "'5GB' is not bytes a second; write 5GB/s"),
        ("nic.bandwidth", "5TFLOP/s", "'5TFLOP/s' is not bytes a second"),
        ("nic.latency_seconds", "5GB", "'5GB' is not a time; write for example 15us"),
        ("device.memory_bytes", "80GB/s", "'80GB/s' is not a number of bytes; write 80GB"),
        ("device.peak_flops.bf16", "80GB", "'80GB' is not FLOP/s; write for example 989TFLOP/s"),
        ("device.hours_between_failures", "50000h", "'50000h' is not a plain number; write it without a unit"),
        ("nics", "4ms", "'4ms' is in seconds and a count is expected"),
    ],
)
def test_the_unit_of_another_measure_is_refused(path: str, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        codec.read_number(text, whole=path == "nics", where=path)


def test_bytes_that_are_whole_are_bytes() -> None:
    assert codec.read_number("40GiB", whole=True, where="device.memory_bytes") == 40 * 2**30


def test_what_stands_for_a_table_is_told_with_the_keys_of_one() -> None:
    for value, says in (
        ("adamw", "job.optimizer: expected a table, got 'adamw'; write job.optimizer.kind = \"adamw\""),
        (True, "expected a table, got true; give its keys, first job.optimizer.kind: adafactor, adamw, muon, sgd"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            codec.decode(JobSpec, {"optimizer": value}, "job")
    with pytest.raises(ConfigError, match=r"such as job\.checkpoint\.every_steps, "):
        codec.decode(JobSpec, {"checkpoint": 5}, "job")


def test_a_tagged_union_is_chosen_by_its_kind_alone() -> None:
    encoded = codec.encode(LAYER)
    encoded["mixer"]["kind"] = "atention"
    with pytest.raises(ConfigError, match=r"mixer.kind: kind 'atention' is unknown; did you mean 'attention'\?"):
        codec.decode(Layer, encoded)


def test_equal_values_have_one_text_and_different_ones_do_not() -> None:
    job = JobSpec()
    assert codec.canonical(job) == codec.canonical(JobSpec())
    assert codec.canonical(job) != codec.canonical(replace(job, optimizer=OptimizerSpec(beta1=0.8)))
    assert codec.decode(JobSpec, {"precision": "fp64"}).precision is Precision.FP64


def test_a_name_inside_another_is_nearer_than_one_that_is_spelt_alike() -> None:
    with pytest.raises(ConfigError, match="did you mean 'nvfp4'"):
        codec.decode(Precision, "fp4", "precision")
    assert codec.nearest("optim", ("optimizer", "option")) == "did you mean 'optimizer'?"
    assert codec.nearest("tensr", ("tensor", "shard")) == "did you mean 'tensor'?"
    assert codec.nearest("", ("b", "a")) == "one of a, b"
