"""Faults as words: what is read back is what was written, and what is wrong is told with what to write instead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec.errors import ConfigError
from meshwright.spec.faults import (
    SETTINGS,
    At,
    CheckpointPart,
    Fault,
    FaultKind,
    Moment,
    check_faults,
    read_fault,
)


def test_what_a_person_writes() -> None:
    assert read_fault(FaultKind.KILL, "rank=2@step=40") == Fault(kind=FaultKind.KILL, rank=2, moment=Moment(step=40))
    assert read_fault(FaultKind.KILL, "rank=all@save, step=3").rank is None
    assert read_fault(FaultKind.KILL, "@save,step=3").moment == Moment(step=3, at=At.SAVE)
    assert read_fault(FaultKind.HANG, "rank=1,seconds=2min@seconds=30") == Fault(
        kind=FaultKind.HANG, rank=1, seconds=120.0, moment=Moment(seconds=30.0)
    )
    slow = read_fault(FaultKind.SLOW, "rank=1,factor=2,steps=7@start")
    assert (slow.factor, slow.steps, slow.moment.at) == (2.0, 7, At.START)
    assert read_fault(FaultKind.CORRUPT, "part=manifest@step=1").part is CheckpointPart.MANIFEST


@given(
    st.sampled_from(FaultKind),
    st.one_of(st.none(), st.integers(0, 9999)),
    st.one_of(st.none(), st.integers(1, 9999)),
    st.integers(12, 200),
    st.integers(1, 999),
    st.sampled_from(CheckpointPart),
    st.builds(Moment, step=st.integers(1, 99999), seconds=st.integers(0, 999).map(float), at=st.sampled_from(At)),
)
def test_words_are_read_back(kind, rank, seconds, tenths, steps, part, moment) -> None:
    if kind is FaultKind.PARTITION or (kind is FaultKind.HANG and rank is None):
        seconds = seconds or 1
    given = {"rank": rank, "seconds": seconds and float(seconds), "factor": tenths / 10, "steps": steps, "part": part}
    fault = Fault(kind=kind, moment=moment, **{name: given[name] for name in SETTINGS[kind]})
    name, _, words = str(fault).partition(" ")
    assert read_fault(FaultKind(name), words) == fault


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        (FaultKind.KILL, "rank=2", r"--kill rank=2: it does not say when; for example rank=2@step=40"),
        (FaultKind.KILL, "rank=x@step=4", r"'x' is not a rank, nor all"),
        (FaultKind.KILL, "rnak=1@step=4", r"'rnak=1' is not a setting of it; did you mean 'rank'\?"),
        (FaultKind.KILL, "rank=1,rank=2@step=4", r"rank is said twice"),
        (FaultKind.KILL, "rank=1@step=0", r"'0' is not a step"),
        (FaultKind.KILL, "@save,start", r"at a save or at a start, not at both"),
        (FaultKind.HANG, "rank=all@step=4", r"would hang for ever; seconds=5 says how long"),
        (FaultKind.HANG, "rank=1,seconds=5GB@step=4", r"is not a time"),
        (FaultKind.SLOW, "factor=1@step=4", r"'1' is not a factor from 1.1 to 20"),
        (FaultKind.CORRUPT, "part=tensor@step=4", r"no part of a checkpoint; did you mean 'tensors'\?"),
        (FaultKind.PARTITION, "@step=4", r"it does not say how long"),
        (FaultKind.PREEMPT, "rank=1@step=4", r"it takes none: write @ and when"),
    ],
)
def test_what_is_wrong_is_told(kind: FaultKind, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_fault(kind, text)


def test_all_that_is_wrong_with_one_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_fault(FaultKind.SLOW, "rank=x,factor=none@stp=4")
    assert len(caught.value.problems) == 3


def test_what_a_run_cannot_have_is_refused() -> None:
    words = [
        (FaultKind.KILL, "rank=2@step=4"),
        (FaultKind.KILL, "rank=1@step=40"),
        (FaultKind.CORRUPT, "@step=4"),
        (FaultKind.PARTITION, "seconds=5@step=4"),
    ]
    faults = [read_fault(kind, text) for kind, text in words]
    with pytest.raises(ConfigError) as caught:
        check_faults(faults, ranks=2, steps=30, kept=1, can_cut="run it as root")
    assert [problem.where for problem in caught.value.problems] == [f"--{fault}" for fault in faults]
    check_faults(faults, ranks=3, steps=40, kept=0, can_cut="")
