"""What runs beside a pass hides behind it once: queues of links, what they share, and what all of them take."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cost.overlap import Contention, Mutual, Pass, Slack, Traffic, exposed, late_beside, passed
from meshwright.spec.cluster import DeviceKind

CONTENTION = Contention(near=Mutual.of(0.15, kind=DeviceKind.CUDA), far=Mutual.of(0.02, kind=DeviceKind.CUDA))
SECONDS = st.floats(0.0, 1e3)
PARTS = ("work", "stall", "copies", "scores")
LINKS = ("waits", "ring", "tokens", "sync")


def array(value):
    return np.array([value])


def traffic(near=0.0, far=0.0):
    """Adapters that fill 0.7 of a device's lanes."""
    return Traffic(near=array(near), far=array(far), lanes=array(0.7 * far))


def window(*, near, far=None):
    other = array(near if far is None else far)
    return Slack(work=array(0.0), near=array(near), far=other, lanes=other)


def lasts(entry):
    """Seconds of a pass with all that runs beside it: `scores` is the share of its work that a ring runs beside."""
    beside = {name: traffic(*entry[name]) for name in LINKS}
    late = late_beside(beside["ring"], array(entry["work"] * entry["scores"]), CONTENTION)
    at = Pass(
        work=array(entry["work"]),
        stall=array(entry["stall"]),
        waits=beside["waits"],
        ring=beside["ring"],
        late=late,
        tokens=beside["tokens"],
        copies=array(entry["copies"]),
        lanes=array(0.9 * entry["copies"]),
        memory=array(0.01 * entry["copies"]),
    )
    found = passed(at, CONTENTION)
    lines = [found.ring, found.tokens, found.copies, exposed(beside["sync"], found.slack, CONTENTION)]
    wholes = [beside["ring"].whole, beside["tokens"].whole, at.copies, beside["sync"].whole]
    own = entry["work"] + entry["stall"] + sum(entry["waits"])
    return own + float(np.sum(lines)), [float(line[0]) for line in lines], [float(whole[0]) for whole in wholes]


PAIRS = st.one_of(st.tuples(SECONDS, st.just(0.0)), st.tuples(st.just(0.0), SECONDS))
PASSES = st.fixed_dictionaries(
    {"work": SECONDS, "stall": SECONDS, "copies": SECONDS, "scores": st.floats(0.0, 1.0)} | dict.fromkeys(LINKS, PAIRS)
)


@given(entry=PASSES)
def test_exposed_seconds_are_part_of_the_whole_and_no_link_does_two_things_at_once(entry):
    seconds, lines, wholes = lasts(entry)
    slack = 1e-9 * (1.0 + seconds)
    assert all(-slack <= line <= whole + slack for line, whole in zip(lines, wholes, strict=True))
    for link in (0, 1):
        assert sum(entry[name][link] for name in LINKS) <= seconds + slack
    assert max(entry["work"], entry["copies"]) <= seconds + slack


@given(entry=PASSES, which=st.sampled_from([*PARTS[:3], *LINKS]), factor=st.floats(1.0, 10.0))
def test_a_pass_is_no_longer_where_any_part_is_faster(entry, which, factor):
    value = entry[which]
    faster = tuple(part / factor for part in value) if which in LINKS else value / factor
    before, after = lasts(entry)[0], lasts({**entry, which: faster})[0]
    assert after <= before * (1 + 1e-9) + 1e-9


def test_a_ring_and_parameters_on_one_link_hide_behind_the_same_scores_once():
    entry = {"work": 10.0, "stall": 0.0, "copies": 0.0, "scores": 1.0, "waits": (0.0, 0.0), "tokens": (0.0, 0.0)}
    ring, sync = (0.0, 8.0), (0.0, 8.0)
    both, lines, _ = lasts({**entry, "ring": ring, "sync": sync})
    assert both >= 16.0
    apart = lasts({**entry, "ring": (8.0, 0.0), "sync": sync})[0]
    assert apart < 13.0
    assert lines[3] > 5.0


def test_copies_go_on_while_another_link_is_waited_for():
    entry = {"work": 4.0, "stall": 0.0, "copies": 9.0, "scores": 0.0, "waits": (4.0, 0.0)}
    entry |= dict.fromkeys(("ring", "tokens", "sync"), (0.0, 0.0))
    assert lasts(entry)[0] == pytest.approx(9.0)
    assert lasts({**entry, "copies": 5.0})[0] == pytest.approx(8.05)


def test_copies_and_adapters_share_the_lanes_of_a_device():
    entry = {"work": 6.0, "stall": 0.0, "copies": 5.0, "scores": 0.0, "waits": (0.0, 0.0)}
    entry |= dict.fromkeys(("ring", "tokens", "sync"), (0.0, 0.0))
    alone = lasts(entry)[0]
    assert alone == pytest.approx(6.05)
    assert lasts({**entry, "sync": (0.0, 4.0)})[0] == pytest.approx(0.9 * 5.0 + 0.7 * 4.0)
    assert lasts({**entry, "waits": (0.0, 5.0)})[0] == pytest.approx(11.05)


def test_work_is_later_by_what_carrying_takes_from_it():
    """A fifth of the compute for 1.126 s of a collective that work of ten outlasts; never less than memory costs."""
    fifth, hardly = (Mutual.of(taken, kind=DeviceKind.CUDA) for taken in (0.2, 0.02))
    found = exposed(traffic(1.0), window(near=10.0), Contention(near=fifth, far=hardly))
    assert found[0] == pytest.approx(0.2252)
    found = exposed(traffic(0.0, 1.0), window(near=10.0), Contention(near=fifth, far=hardly))
    assert found[0] == pytest.approx(0.126)
    assert Mutual.of(0.0, kind=DeviceKind.TPU).added == 0.0


def test_without_overlap_all_is_exposed():
    assert exposed(traffic(3.0, 4.0), window(near=10.0), None)[0] == 7.0


def test_two_links_are_exposed_by_the_longer_queue_alone():
    free = replace(CONTENTION, near=Mutual(added=0.0, idle=0.0), far=Mutual(added=0.0, idle=0.0))
    assert exposed(traffic(5.0, 7.0), window(near=2.0), free)[0] == 5.0
    assert exposed(traffic(5.0, 7.0), window(near=2.0, far=6.0), free)[0] == 3.0
