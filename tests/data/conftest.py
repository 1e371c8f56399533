from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.stories import story


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    path = tmp_path / "stories.jsonl"
    path.write_text("".join(json.dumps({"text": story(number)}) + "\n" for number in range(20)))
    return path
