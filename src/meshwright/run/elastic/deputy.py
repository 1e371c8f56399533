"""Deputy: a host that does not lead. It starts the workers that it is told to, and says how they end."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

from meshwright.run.elastic.board import Board
from meshwright.run.elastic.crew import Crew
from meshwright.run.elastic.fleet import Orders, Told
from meshwright.run.elastic.homes import Home
from meshwright.run.failure import Failure
from meshwright.spec import codec

OVER = "over"


@dataclass(slots=True, kw_only=True)
class Deputy:
    """What host `home.host`, of that `name`, does for the host whose board is `board`."""

    board: Board
    crew: Crew
    home: Home
    name: str
    told: Told | None = None
    turns: int = 0
    killed: set[str] = field(default_factory=set)

    def look(self) -> bool:
        """What is to be done is done and said; whether the run goes on. Raises DistError where no host leads."""
        over = self.board.told(OVER)
        text = self.board.told(f"orders/{self.home.host}")
        orders = Orders() if text is None else codec.decode(Orders, json.loads(text), "orders")
        for name in orders.start:
            if name not in self.crew.names and over is None:
                self.crew.start(name)
        for name in orders.kill:
            if name not in self.killed and name in self.crew.names:
                self.killed.add(name)
                self.crew.kill(name)
        self._tell()
        return over is None

    def _tell(self) -> None:
        """The host that leads knows that this one is there, by which connection, and how its workers are."""
        if self.told is None or self.turns != self.board.turns:
            self.told, self.turns = Told(home=self.home, name=self.name, end=self.board.store.end), self.board.turns
            self._say(self.told)
        names = self.crew.names
        ended: dict[str, Failure | None] = {
            name: self.crew.failure(name, rank=0) for name in names if self.crew.has_ended(name)
        }
        now = replace(self.told, started=names, ended=ended)
        if now != self.told:
            self.told = now
            self._say(now)

    def _say(self, told: Told) -> None:
        self.board.tell(f"host/{self.home.host}", json.dumps(codec.encode(told)))
