"""Templates: designs of a run for what may be left of its ranks, found beside its training, so that nobody waits for a
search later."""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path

from meshwright import cost, search
from meshwright.run.files import write_json
from meshwright.search import Hosts, hosts_of, losses
from meshwright.spec.plan import Design

_AHEAD = 64  # designs that are looked for before any rank is lost
_PAUSE = 0.01


class Templates:
    """The file of the design for what is left of the hosts of `design`, down to the fewest ranks that its job allows;
    of learners, for whole ones.

    Those for fewer ranks are in `RUN/elastic/ranks-N`, or `ranks-N-M` for N on one host and M on another, each with its
    prediction. Any host that leads finds those that another one wrote.
    """

    def __init__(self, design: Design, run_dir: Path) -> None:
        self._design, self._run_dir = design, run_dir
        self.each = design.plan.world_size // design.plan.learners if design.plan.learners > 1 else 1
        self._found: dict[Hosts, Path | None] = {hosts_of(design): run_dir / "design.json"}
        self._one = threading.Lock()

    def start(self) -> None:
        """Those of another launch are gone, and what may be left is looked for from now on, the most ranks first."""
        for folder in (self._run_dir / "elastic").glob("ranks-*"):
            shutil.rmtree(folder, ignore_errors=True)
        self.look_ahead()

    def look_ahead(self) -> None:
        """What may be left is looked for from now on, where it was not found yet."""
        threading.Thread(target=self._find, name="templates", daemon=True).start()

    def of(self, hosts: Hosts) -> Path | None:
        """The design for `hosts`, once it is known; None where there is none."""
        with self._one:
            if hosts not in self._found:
                self._found[hosts] = self._known(hosts)
            return self._found[hosts]

    def _find(self) -> None:
        for hosts in islice(losses(hosts_of(self._design), fewest=self._design.job.elastic.min_ranks), _AHEAD):
            with suppress(Exception):  # whoever needs this one meets it again
                self.of(hosts)
            time.sleep(_PAUSE)

    def _known(self, hosts: Hosts) -> Path | None:
        several = len(self._design.cluster.groups) > 1
        words = (f"{group}x{ranks}" if several else str(ranks) for group, ranks in hosts)
        folder = self._run_dir / "elastic" / f"ranks-{'-'.join(words)}"
        path = folder / "design.json"
        if path.is_file():
            return path
        found = search.for_hosts(self._design, hosts)
        if found is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "predicted.json", cost.predict(found))
        write_json(path, found)
        return path
