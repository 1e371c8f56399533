"""A lab made on this machine: links have the rates and delays asked for, bytes are counted, nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.lab import Lab, Topology, Uplink
from meshwright.lab.fabric import unfit
from meshwright.lab.hosts import Host
from meshwright.lab.links import islands, measure_pairs

WHY_NOT = unfit() or ("" if Path("/dev/net/tun").exists() else "there is no /dev/net/tun for delays")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"no lab can be made here: {WHY_NOT}")

RATE = 12.5e6
TWO_SITES = Topology(
    hosts=("host0", "host1", "host2"),
    shares=(1 / 3, 1 / 3, 1 / 3),
    uplinks=(
        Uplink(below="site-a", above="core", bandwidth=RATE, latency_seconds=10e-3),
        Uplink(below="host0", above="site-a", bandwidth=10 * RATE),
        Uplink(below="host1", above="site-a", bandwidth=10 * RATE),
        Uplink(below="host2", above="core", bandwidth=10 * RATE, latency_seconds=5e-3),
    ),
)


def test_links_are_as_asked_and_islands_are_found() -> None:
    with Lab.of(TWO_SITES) as lab:
        near, *far = measure_pairs(lab, seconds=0.5)
    assert near.bandwidth > 3 * RATE
    for pair in far:
        assert pair.bandwidth < 1.1 * RATE
        assert pair.latency_seconds >= 15e-3
    assert islands([near, *far], hosts=3) == ((0, 1), (2,))


def test_ctrl_c_is_for_what_runs_in_the_lab_and_links_outlive_it() -> None:
    with Lab.of(TWO_SITES) as lab:
        assert lab._fabric is not None
        for relay in lab._fabric._relays:
            relay.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert all(relay.poll() is None for relay in lab._fabric._relays)
        _, far, _ = measure_pairs(lab, seconds=0.3)
    assert far.latency_seconds >= 15e-3


def test_links_are_slowed_while_the_lab_is_up() -> None:
    with Lab.of(TWO_SITES) as lab:
        lab.slow(1, RATE / 4)
        lab.slow(2, RATE / 2)
        slowed = measure_pairs(lab, seconds=0.5)
    assert [pair.bandwidth < 1.4 * RATE / part for pair, part in zip(slowed, (4, 2, 4), strict=True)] == [True] * 3


def test_commands_know_their_place_and_what_they_send_is_counted() -> None:
    send = (
        "import os, socket; place = int(os.environ['NODE_RANK'])\n"
        "if place: server = socket.create_server(('{address}', 29501)); peer = server.accept()[0]\n"
        "if place: print(len(peer.makefile('rb').read()))\n"
        "while not place:\n"
        "    try: socket.create_connection(('10.77.0.3', 29501)).sendall(bytes(2_000_000)); break\n"
        "    except ConnectionRefusedError: pass\n"
    )
    with Lab.of(TWO_SITES) as lab:
        sender, receiver = lab.run([sys.executable, "-c", send], hosts=[0, 2], timeout_seconds=60)
    assert (sender.exit_code, receiver.exit_code) == (0, 0), sender.output + receiver.output
    assert receiver.output.strip() == "2000000"
    assert 2_000_000 < sender.traffic.sent_bytes < 2_200_000
    assert 2_000_000 < receiver.traffic.received_bytes < 2_200_000


def test_a_command_that_never_ends_is_ended_and_nothing_is_left() -> None:
    with Lab.of(TWO_SITES) as lab:
        (found,) = lab.run(["sleep", "1000"], hosts=[1], timeout_seconds=0.2)
        holder = holder_of(lab.hosts[0])
    assert found.exit_code == -15
    assert not Path("/proc", holder).exists()


def holder_of(host: Host) -> str:
    """The process that holds its namespace."""
    return host.enter[host.enter.index("-t") + 1]


def test_nothing_is_left_of_a_lab_that_is_killed() -> None:
    script = (
        "from meshwright.lab import Lab; from tests.lab.test_lab import TWO_SITES, holder_of\n"
        "lab = Lab.of(TWO_SITES); print(*map(holder_of, lab.hosts), flush=True)\n"
        "lab.run(['sh', '-c', 'echo $$; exec sleep 1000'], say=lambda _, line: print(line, flush=True))"
    )
    lab = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=os.getcwd())
    assert lab.stdout is not None
    holders = lab.stdout.readline().split()
    left = [*holders, *(lab.stdout.readline().strip() for _ in holders)]
    assert all(Path("/proc", each).exists() for each in left)
    lab.kill()
    lab.wait()
    deadline = time.monotonic() + 30
    while any(Path("/proc", each).exists() for each in left):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_processor_is_shared_as_asked() -> None:
    uneven = Topology(
        hosts=("host0", "host1"),
        shares=(0.8, 0.2),
        uplinks=tuple(Uplink(below=f"host{index}", above="core", bandwidth=RATE) for index in range(2)),
    )
    with Lab.of(uneven, cores=0.5) as lab:
        assert lab.quotas is not None
        limits = [(folder / "cpu.max", folder / "cpu.cfs_quota_us") for folder in lab.quotas.folders]
        told = [int((first if first.exists() else second).read_text().split()[0]) for first, second in limits]
        groups = [each.output for each in lab.run(["cat", "/proc/self/cgroup"])]
        folders = tuple(lab.quotas.folders)
    assert told == [4000, 1000]
    assert all(folder.name in group for folder, group in zip(folders, groups, strict=True))
    assert not any(folder.exists() for folder in folders)
