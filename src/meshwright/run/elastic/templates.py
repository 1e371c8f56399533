"""Templates: designs of a run for fewer ranks, found beside its training, so that nobody waits for a search later."""

from __future__ import annotations

import threading
from pathlib import Path

from meshwright import cost, search
from meshwright.run.files import write_json
from meshwright.spec.plan import Design


class Templates:
    """The file of the design for each number of ranks from that of `design` down to the fewest that its job allows; of
    learners, for whole ones.

    Those for fewer ranks are in `RUN/elastic/ranks-N`, each with its prediction.
    """

    def __init__(self, design: Design, run_dir: Path) -> None:
        ranks = design.plan.world_size
        self._design, self._run_dir = design, run_dir
        self.each = ranks // design.plan.learners if design.plan.learners > 1 else 1
        self._found: dict[int, Path | None] = {ranks: run_dir / "design.json"}
        self._fewer = range(ranks - self.each, design.job.elastic.min_ranks - 1, -self.each)
        self._known = {count: threading.Event() for count in self._fewer}
        self._error: Exception | None = None

    def start(self) -> None:
        """They are looked for from now on, the most ranks first."""
        threading.Thread(target=self._find, name="templates", daemon=True).start()

    def of(self, ranks: int) -> Path | None:
        """The design for `ranks` ranks, or of learners as many of these as so many ranks are, once it is known; None
        where there is none."""
        ranks -= ranks % self.each
        if ranks in self._known:
            self._known[ranks].wait()
        if self._error is not None:
            raise self._error
        return self._found.get(ranks)

    def _find(self) -> None:
        for ranks in self._fewer:
            try:
                self._found[ranks] = self._write(ranks)
            except Exception as error:  # a thread's exception is lost; whoever waits for the design has to hear of it
                self._error = error
            self._known[ranks].set()

    def _write(self, ranks: int) -> Path | None:
        found = search.for_ranks(self._design, ranks)
        if found is None:
            return None
        folder = self._run_dir / "elastic" / f"ranks-{ranks}"
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "predicted.json", cost.predict(found))
        write_json(folder / "design.json", found)
        return folder / "design.json"
