"""A proven bound: no order of a workload's operations is done sooner.

Microbatches are alike, so the k-th forward of a stage, whichever microbatch's it is, starts no sooner than k forwards
of the stage before allow, and where a rank may hold c microbatches the k-th waits for the round trip of the k - c
before. Each rank then has operations with a release and a tail; Jackson's preemptive schedule (Carlier, 1982) of them
is the bound.
"""

from __future__ import annotations

from heapq import heappop, heappush

from meshwright.schedule.workload import Workload

_Job = tuple[float, float, float]  # release, seconds, tail


def lower_bound(work: Workload) -> float:
    """Seconds that no schedule of `work` beats."""
    return max(_preemptive(_jobs(work, rank)) for rank in range(work.ranks))


def _jobs(work: Workload, rank: int) -> list[_Job]:
    jobs: list[_Job] = []
    for stage in work.own[rank]:
        forward, back, weight = (seconds[stage] for seconds in work.seconds())
        head = sum(work.forward[:stage]) + sum(work.transfer[:stage])
        trip = 2.0 * sum(work.transfer[stage:-1]) + sum(work.forward[stage + 1 :]) + sum(work.input[stage + 1 :])
        around = forward + trip + back + weight
        ways = [sum(work.input[s:stage]) + sum(work.transfer[s:stage]) + work.weight[s] for s in range(stage + 1)]
        down = max(work.forward[:stage], default=0.0)
        out = max(work.forward + work.input[stage + 1 :])
        home = max((*work.forward[stage + 1 :], *work.input))
        up = max(work.input[:stage], default=0.0)
        room = work.limit_bytes[rank] * (1.0 + 1e-9) / max(work.activation_bytes[stage], 1e-300)
        most = int(min(room, work.microbatches))
        for index in range(work.microbatches):
            behind = work.microbatches - 1 - index
            full = behind // most * around
            release = head + max(index * down, index // most * around)
            returned = max(release + forward + trip, head + forward + trip + index * out)
            after = max(*ways, ways[0] + behind * up, full + weight)
            jobs.append((release, forward, max(trip + back + after, trip + back + ways[0] + behind * home)))
            jobs.append((returned, back, after))
            jobs.append((returned + back, weight, full))
    return jobs


def _preemptive(jobs: list[_Job]) -> float:
    """When the last tail ends if the rank may turn to the operation of the longest tail at any time."""
    jobs = sorted(jobs)
    waiting: list[list[float]] = []
    clock, done, index = 0.0, 0.0, 0
    while index < len(jobs) or waiting:
        if not waiting:
            clock = max(clock, jobs[index][0])
        while index < len(jobs) and jobs[index][0] <= clock:
            heappush(waiting, [-jobs[index][2], jobs[index][1]])
            index += 1
        tail, left = heappop(waiting)
        until = jobs[index][0] if index < len(jobs) else float("inf")
        spent = min(left, until - clock)
        clock += spent
        if spent < left:
            heappush(waiting, [tail, left - spent])
        else:
            done = max(done, clock - tail)
    return done
