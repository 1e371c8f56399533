"""When the operations of a workload end in a given order, and the longest path to the last of them.

`cost.play` does the same with arrays for large schedules; a search times thousands of small ones that differ by a move.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.schedule.workload import Rows, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Of operations by number: seconds, the operation whose output each needs (-1: none) and the way it has come."""

    seconds: list[float]
    needs: list[int]
    delay: list[float]
    rank: list[int]

    @classmethod
    def of(cls, work: Workload) -> Timing:
        count = 3 * work.stages * work.microbatches
        needs, delay = [-1] * count, [0.0] * count
        for number in range(count):
            kind, stage, microbatch = work.parts(number)
            if kind == 0 and stage:
                needs[number] = work.operation(0, stage - 1, microbatch)
                delay[number] = work.transfer[stage - 1]
            if kind == 1:
                last = stage + 1 == work.stages
                needs[number] = work.operation(0 if last else 1, stage if last else stage + 1, microbatch)
                delay[number] = 0.0 if last else work.transfer[stage]
            if kind == 2:
                needs[number] = number - 1
        each, stages = work.seconds(), [number // 3 // work.microbatches for number in range(count)]
        seconds = [each[number % 3][stage] for number, stage in enumerate(stages)]
        return cls(seconds=seconds, needs=needs, delay=delay, rank=[work.placement[stage] for stage in stages])

    def ends(self, rows: Rows) -> list[float] | None:
        """When every operation ends; None where the ranks wait for each other for ever."""
        seconds, needs, delay, owner = self.seconds, self.needs, self.delay, self.rank
        ends = [-1.0] * len(seconds)
        clocks, places = [0.0] * len(rows), [0] * len(rows)
        waiting: dict[int, int] = {}
        ready, done = list(range(len(rows))), 0
        while ready:
            rank = ready.pop()
            row, place, clock = rows[rank], places[rank], clocks[rank]
            while place < len(row):
                operation = row[place]
                needed = needs[operation]
                if needed >= 0:
                    arrived = ends[needed]
                    if arrived < 0.0:
                        if owner[needed] == rank:
                            return None
                        waiting[needed] = rank
                        break
                    clock = max(clock, arrived + delay[operation])
                clock += seconds[operation]
                ends[operation] = clock
                place += 1
                if operation in waiting:
                    ready.append(waiting.pop(operation))
            done += place - places[rank]
            places[rank], clocks[rank] = place, clock
        return ends if done == len(seconds) else None

    def blocks(self, rows: Rows, ends: list[float]) -> list[tuple[int, int, int]]:
        """Runs of the longest path that stay on a rank: (rank, first place, last place), from the end of the step."""
        places = {operation: place for row in rows for place, operation in enumerate(row)}
        operation = max(range(len(ends)), key=ends.__getitem__)
        found = []
        while True:
            rank = self.rank[operation]
            last = first = places[operation]
            start = ends[operation] - self.seconds[operation]
            while first and ends[rows[rank][first - 1]] >= start - 1e-12:
                first -= 1
                operation = rows[rank][first]
                start = ends[operation] - self.seconds[operation]
            found.append((rank, first, last))
            operation = self.needs[operation]
            if operation < 0 or start <= 1e-12:
                return found
