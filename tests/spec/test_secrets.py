"""Secrets are hidden, and what only sounds like one is not."""

from __future__ import annotations

import pytest

from meshwright.spec.secrets import without_secrets, words_without_secrets


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("https://me:geheim@host/data", "https://***@host/data"),
        ("s3://key@bucket/x", "s3://***@bucket/x"),
        ("HF_TOKEN=geheim python", "HF_TOKEN=*** python"),
        ("--api-key=geheim", "--api-key=***"),
        ("url?access_key=geheim&x=1", "url?access_key=***&x=1"),
        ("password: geheim", "password: ***"),
        ("hf_abcdefghijklmnopqrstuvwx", "***"),
    ],
)
def test_what_is_secret_is_hidden(said: str, told: str) -> None:
    assert without_secrets(said) == told


@pytest.mark.parametrize(
    "said",
    [
        "batch_tokens=4Mi",
        "data.tokenizer=bytes",
        "total_tokens=300G",
        "evaluation.tokens=4096",
        "--set=job.seed=1",
        "git@host:folder",
        "https://host/a@b",
        "plan.json",
    ],
)
def test_what_is_not_is_not(said: str) -> None:
    assert without_secrets(said) == said
    assert words_without_secrets([said]) == [said]


def test_a_word_after_its_option_is_hidden() -> None:
    assert words_without_secrets(["train", "--token", "geheim", "--seed", "1"]) == [
        *("train", "--token", "***", "--seed", "1")
    ]
