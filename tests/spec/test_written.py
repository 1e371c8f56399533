"""Files that a person named: whole or as they were, their permissions and links, and disks that are full."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from meshwright.spec.errors import ConfigError, EnvironmentUnfit
from meshwright.spec.written import unwritten, write_whole
from tests.support.full_disk import ROOM_BYTES, a_full_disk


def test_a_disk_that_is_full_leaves_what_was_there_and_nothing_beside_it(tmp_path: Path) -> None:
    place = tmp_path / "plan.json"
    place.write_text("the plan of yesterday")
    with a_full_disk(), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        write_whole(place, "x" * (ROOM_BYTES + 1))
    assert place.read_text() == "the plan of yesterday"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_what_is_written_keeps_permissions_and_goes_where_a_link_leads(tmp_path: Path) -> None:
    place, link = tmp_path / "launch.sh", tmp_path / "link"
    place.write_text("old")
    place.chmod(0o750)
    link.symlink_to(place)
    write_whole(link, "ü\udcff")
    assert link.is_symlink()
    assert place.read_bytes() == "ü?".encode()
    assert stat.S_IMODE(place.stat().st_mode) == 0o750
    write_whole(Path(os.devnull), "gone")
    assert not Path(os.devnull).is_file()


def test_a_name_with_no_room_for_another_letter_is_written_in_place(tmp_path: Path) -> None:
    place = tmp_path / ("n" * 255)
    write_whole(place, "text")
    assert place.read_text() == "text"


def test_a_full_disk_is_the_machine_s_and_anything_else_the_person_s() -> None:
    full = unwritten(OSError(errno.ENOSPC, "No space left on device"), where="a")
    assert isinstance(full, EnvironmentUnfit)
    assert str(full.problems[0]) == "a: cannot be written: No space left on device; free space there"
    kept = unwritten(OSError(errno.EROFS, "Read-only file system"), where="a", fix="--out names another page")
    assert isinstance(kept, ConfigError)
    assert str(kept.problems[0]) == "a: cannot be written: Read-only file system; --out names another page"
