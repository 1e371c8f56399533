"""One device of the slow simulator: a clock, what runs behind its work, and what it does step by step."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.schedule.table import Work as Pass

BESIDE_WORK = 1.126  # a collective beside work takes so much longer, and work beside it (Galvatron, its overlap figure)
# Of a device's compute while one runs: processors that carry bytes (Calculon, 10.1145/3581784.3607102) or, where those
# are fewer, what work waits for memory.
TAKEN_NEAR, TAKEN_FAR = 0.15, max(0.02, 1.0 - 1.0 / BESIDE_WORK)


class Device:
    """A clock, and a queue of collectives that run one after the other behind the work."""

    def __init__(self, *, far: bool) -> None:
        self.clock = self.host = 0.0
        self.far, self.taken = far, TAKEN_FAR if far else TAKEN_NEAR
        self.jobs: list[float] = []
        self.done = 0
        self.out = self.back = 0.0

    def issue(self, seconds: float) -> int:
        self.jobs.append(seconds)
        return len(self.jobs)

    def work(self, seconds: float) -> None:
        """Both are slower while both run."""
        while seconds > 0.0 and self.done < len(self.jobs):
            left = self.jobs[self.done]
            lasts = min(seconds / (1.0 - self.taken), left * BESIDE_WORK)
            self.clock += lasts
            seconds -= lasts * (1.0 - self.taken)
            self._drain(lasts / BESIDE_WORK)
        self.clock += max(seconds, 0.0)

    def pause(self, until: float) -> None:
        while self.clock < until and self.done < len(self.jobs):
            lasts = min(until - self.clock, self.jobs[self.done])
            self.clock += lasts
            self._drain(lasts)
        self.clock = max(self.clock, until)

    def exchange(self, seconds: float, *, far: bool) -> None:
        """What is waited for; the queue goes on meanwhile where it takes other links."""
        if far is self.far:
            self.clock += seconds
        else:
            self.pause(self.clock + seconds)

    def wait(self, ticket: int) -> None:
        while self.done < ticket:
            lasts = self.jobs[self.done]
            self.clock += lasts
            self._drain(lasts)

    def _drain(self, seconds: float) -> None:
        self.jobs[self.done] -= seconds
        if self.jobs[self.done] <= 1e-12:
            self.done += 1


@dataclass(frozen=True)
class Step:
    """One block of one action: what a rank does between two looks at its queue."""

    action: Pass
    stage: int
    microbatch: int
    block: int
    opens: bool
    closes: bool
    first: bool
    last: bool
