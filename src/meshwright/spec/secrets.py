"""Secrets in what a person typed: they are left out of whatever is kept or shown."""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "***"
_NAME = (
    r"(?:\w+[._-])*(?:token|secret|password|passwd|passphrase|credentials?|api[_-]?key|access[_-]?key|private[_-]?key)"
)
_SAID = re.compile(rf"(?P<name>(?:^|(?<=[\s,;&?'\"-])){_NAME}\s*[=:]\s*)(?P<value>[^\s,;&'\"]+)", re.IGNORECASE)
_OPTION = re.compile(rf"--?{_NAME}", re.IGNORECASE)
_ADDRESS = re.compile(r"(?P<begin>\b[a-z][a-z0-9+.-]*://)[^\s/@]+@", re.IGNORECASE)
_KEYS = re.compile(r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA)[A-Za-z0-9_-]{12,}")


def without_secrets(text: str) -> str:
    """The text with *** for passwords of addresses, for values of names such as `api_key` or `HF_TOKEN`, and for keys
    that are known by how they begin."""
    text = _ADDRESS.sub(rf"\g<begin>{HIDDEN}@", text)
    text = _SAID.sub(rf"\g<name>{HIDDEN}", text)
    return _KEYS.sub(HIDDEN, text)


def words_without_secrets(words: Iterable[str]) -> list[str]:
    """As `without_secrets`, of the words of a command, where a value may be the word after its option."""
    told: list[str] = []
    follows = False
    for word in words:
        told.append(HIDDEN if follows and not word.startswith("-") else without_secrets(word))
        follows = _OPTION.fullmatch(word) is not None
    return told
