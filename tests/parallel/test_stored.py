"""Files of tensors: every type and shape comes back, and what an index says is believed only when it can be."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from meshwright.parallel import stored
from meshwright.parallel.stored import blob, direct
from meshwright.parallel.stored.reading import Caches, FileReader
from meshwright.spec.errors import ConfigError

TENSORS = {
    "scalar": torch.tensor(3.0, dtype=torch.float64),
    "none": torch.zeros(0, 4),
    "half": torch.randn(5, 3).bfloat16(),
    "flags": torch.tensor([True, False, True]),
    "turned": torch.randn(4, 6).t(),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "long": torch.randn(300, 7),
}


def test_every_type_and_shape_comes_back(tmp_path: Path) -> None:
    written = stored.write(TENSORS, tmp_path, group=None, step=3)
    (name,) = written.files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", name]
    assert written.files[name].bytes == (tmp_path / name).stat().st_size == sum(x.nbytes for x in TENSORS.values())
    assert written.files[name].step == 3
    assert stored.spoilt_part(tmp_path) is None
    found = {key: torch.zeros_like(x) for key, x in TENSORS.items()}
    stored.read(found, stored.Reader(tmp_path), group=None)
    assert all(torch.equal(found[key], x) for key, x in TENSORS.items())
    wider = {"half": torch.zeros(5, 3), "long": torch.zeros(300, 14)[:, ::2]}
    stored.read(wider, stored.Reader(tmp_path), group=None)
    assert all(torch.equal(x, TENSORS[key].float()) for key, x in wider.items())


def test_long_tensors_are_written_and_checked_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "AT_ONCE", 4096)
    monkeypatch.setattr(blob, "BLOCK_BYTES", 100)
    stored.write(TENSORS, tmp_path, group=None)
    assert stored.spoilt_part(tmp_path) is None
    found = {key: torch.zeros_like(x) for key, x in TENSORS.items()}
    stored.read(found, stored.Reader(tmp_path), group=None)
    assert all(torch.equal(found[key], x) for key, x in TENSORS.items())


def test_a_file_that_does_not_read_back_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def rotten(file: int, into: list[memoryview], at: int) -> int:
        count = real(file, into, at)
        into[0][0] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", rotten)
    with pytest.raises(CheckpointException) as caught:
        stored.write(TENSORS, tmp_path, group=None)
    ((error, _),) = caught.value.failures.values()
    assert "does not read back as it was written" in str(error)


def test_a_spoilt_block_is_named_to_who_reads_it_and_to_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob, "BLOCK_BYTES", 100)
    (name,) = stored.write(TENSORS, tmp_path, group=None).files
    content = bytearray((tmp_path / name).read_bytes())
    at = content.index(blob.bytes_of(TENSORS["long"]).tobytes())
    content[at + 250] ^= 1
    (tmp_path / name).write_bytes(content)
    expected = stored.Spoilt(file=name, tensor="long", start=at + 200, stop=at + 300)
    assert stored.spoilt_part(tmp_path) == expected
    reader = stored.Reader(tmp_path)
    stored.read({key: torch.zeros_like(x) for key, x in TENSORS.items() if key != "long"}, reader, group=None)
    with pytest.raises(stored.SpoiltError) as caught:
        stored.read({"long": torch.zeros(300, 7)}, reader, group=None)
    assert caught.value.spoilt == expected
    sums = [zlib.crc32(content[first : first + 100]) for first in range(at, at + 8400, 100)]
    rows = [torch.zeros(rows, 7, dtype=torch.float32) for rows in (3, 40)]
    for start, into, caches in ((0, rows[0], Caches.KEEP), (15, rows[1], Caches.PASS)):
        with FileReader(tmp_path / name, caches=caches) as file:
            file.read(blob.bytes_of(into), at=at, size=8400, sums=sums, start=28 * start, spoilt=KeyError)
    with pytest.raises(KeyError, match="2"), FileReader(tmp_path / name, caches=caches) as file:
        file.check(at=at, size=8400, sums=[*sums[:2], 0, *sums[3:]], spoilt=KeyError)
    assert torch.equal(rows[0], TENSORS["long"][:3])
    assert torch.equal(rows[1], TENSORS["long"][15:55])


def test_a_disk_that_takes_no_direct_writes_is_written_through_the_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def refuse(file: int, data: memoryview) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & direct._DIRECT:
            raise OSError(errno.EINVAL, "not in such blocks")
        return real(file, data)

    monkeypatch.setattr(os, "write", refuse)
    monkeypatch.setattr(direct, "FLUSH_BYTES", 256)
    stored.write(TENSORS, tmp_path, group=None)
    assert stored.spoilt_part(tmp_path) is None


def spoil(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def changed(text: str) -> str:
        value = json.loads(text)
        change(value["tensors"]["long"])
        return json.dumps(value)

    return changed


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda text: text[:-9], "the index cannot be read"),
        (lambda _: "[1]", "expected a table, got"),
        (spoil(lambda entry: entry.update(dtype="load")), "torch has no type 'load'"),
        (spoil(lambda entry: entry["parts"][0].update(file="../rank-0.tensors")), "of '../rank-0.tensors'"),
        (spoil(lambda entry: entry["parts"][0].update(file="rank\0")), r"of 'rank\\x00'"),
        (spoil(lambda entry: entry["parts"][0].update(at=-4)), "a part at -4"),
        (spoil(lambda entry: entry["parts"][0].update(starts=[1, 0])), r"has a part \(300, 7\) at \(1, 0\)"),
        (spoil(lambda entry: entry["parts"][0].update(sizes=[300])), r"has a part \(300,\) at"),
        (spoil(lambda entry: entry.update(code="os.system")), "code"),
    ],
    ids=["cut", "other", "type", "path", "null", "negative", "outside", "dims", "unknown"],
)
def test_an_index_from_a_stranger_is_checked(tmp_path: Path, harm: Callable[[str], str], told: str) -> None:
    stored.write(TENSORS, tmp_path, group=None)
    path = tmp_path / stored.INDEX
    path.write_text(harm(path.read_text()))
    with pytest.raises(ConfigError, match=told):
        stored.Reader(tmp_path)


def test_a_part_beyond_the_end_of_its_file_is_told(tmp_path: Path) -> None:
    stored.write(TENSORS, tmp_path, group=None)
    path = tmp_path / stored.INDEX
    path.write_text(spoil(lambda entry: entry["parts"][0].update(at=2**70))(path.read_text()))
    with pytest.raises(OSError, match="the file ends at byte"):
        stored.spoilt_part(tmp_path)
