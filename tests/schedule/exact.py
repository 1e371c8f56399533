"""The shortest schedule of a small workload by branch and bound: what synthesis and its bound are held against."""

from __future__ import annotations

from meshwright.schedule.workload import Workload


class Exact:
    """Operations are tried in the order of their starts, each as early as it can; microbatches are alike and go in
    order. `nodes` counts what was looked at."""

    def __init__(self, work: Workload) -> None:
        self._work, self.nodes = work, 0
        self._seen: dict[tuple[int, ...], list[tuple[float, ...]]] = {}
        self._best = 0.0

    def shortest(self, *, below: float, most_nodes: int = 300_000) -> float | None:
        """Seconds of the shortest schedule, None where none takes less than `below`."""
        work = self._work
        self._best, self._most = below, most_nodes
        self._seen.clear()
        self._go([[[], [], []] for _ in range(work.stages)], [0.0] * work.ranks, [0.0] * work.ranks, (0.0, -1))
        return self._best if self._best < below else None

    def _go(
        self, ends: list[list[list[float]]], clocks: list[float], held: list[float], last: tuple[float, int]
    ) -> None:
        self.nodes += 1
        assert self.nodes < self._most, "too large a case to search"
        work = self._work
        if self._hopeless(ends, clocks, last[0]) or self._beaten(ends, clocks, last):
            return
        for start, rank, stage, kind in sorted(self._options(ends, clocks, held, last)):
            size = work.activation_bytes[stage] * (1 if kind == 0 else -1 if kind == 2 else 0)
            end = start + work.seconds()[kind][stage]
            before = clocks[rank]
            ends[stage][kind].append(end)
            clocks[rank] = end
            held[rank] += size
            if all(len(done[2]) == work.microbatches for done in ends):
                self._best = min(self._best, max(clocks))
            else:
                self._go(ends, clocks, held, (start, rank))
            ends[stage][kind].pop()
            clocks[rank] = before
            held[rank] -= size

    def _options(
        self, ends: list[list[list[float]]], clocks: list[float], held: list[float], last: tuple[float, int]
    ) -> list[tuple[float, int, int, int]]:
        work, found = self._work, []
        for stage, rank in enumerate(work.placement):
            for kind in range(3):
                index = len(ends[stage][kind])
                if index == work.microbatches:
                    continue
                if kind == 0 and held[rank] + work.activation_bytes[stage] > work.limit_bytes[rank] + 1e-9:
                    continue
                arrived = self._arrived(ends, kind, stage, index)
                start = max(clocks[rank], arrived)
                if (start, rank) > last and arrived < float("inf"):
                    found.append((start, rank, stage, kind))
        return found

    def _arrived(self, ends: list[list[list[float]]], kind: int, stage: int, index: int) -> float:
        work = self._work
        top = stage + 1 == work.stages
        if kind == 0:
            source, way = (ends[stage - 1][0], work.transfer[stage - 1]) if stage else (None, 0.0)
        elif kind == 1:
            source, way = (ends[stage][0], 0.0) if top else (ends[stage + 1][1], work.transfer[stage])
        else:
            source, way = ends[stage][1], 0.0
        if source is None:
            return 0.0
        return source[index] + way if index < len(source) else float("inf")

    def _hopeless(self, ends: list[list[list[float]]], clocks: list[float], now: float) -> bool:
        work = self._work
        for rank in range(work.ranks):
            clock = max(clocks[rank], now)
            urgent, rest, tails = 0.0, 0.0, []
            for stage in work.own[rank]:
                left = [work.microbatches - len(done) for done in ends[stage]]
                urgent += left[0] * work.forward[stage] + left[1] * work.input[stage]
                rest += left[2] * work.weight[stage]
                if left[1]:
                    tails.append(sum(work.input[:stage]) + sum(work.transfer[:stage]) + work.weight[0])
            tail = min(tails, default=0.0)
            if clock + max(urgent + rest, urgent + tail) >= self._best - 1e-9:
                return True
        return False

    def _beaten(self, ends: list[list[list[float]]], clocks: list[float], last: tuple[float, int]) -> bool:
        """Whether a state with the same operations done and nothing later was seen."""
        key = (*(len(done) for stage in ends for done in stage), last[1])
        work = self._work
        times = [max(clock, last[0]) for clock in clocks]
        for stage in range(work.stages):
            top = stage + 1 == work.stages
            taken = [len(ends[stage][1]) if top else len(ends[stage + 1][0])]
            taken.append(min(len(ends[stage][2]), len(ends[stage - 1][1])) if stage else len(ends[stage][2]))
            for kind, index in zip((0, 1), taken, strict=True):
                times += [max(end, last[0] - max(work.transfer)) for end in ends[stage][kind][index:]]
        now = tuple(times)
        seen = self._seen.setdefault(key, [])
        if any(all(a <= b + 1e-12 for a, b in zip(old, now, strict=True)) for old in seen):
            return True
        seen[:] = [old for old in seen if not all(a >= b for a, b in zip(old, now, strict=True))]
        seen.append(now)
        return False
