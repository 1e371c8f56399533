"""Way: how state comes from what processes hold to what they need, known before there is anything to move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.cost.holdings import Holding, digest
from meshwright.cost.moved import afresh, least_bytes, unfit
from meshwright.cost.routes import Hop, rounds, routes
from meshwright.spec.errors import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """From `source` to `target`, the same on every process, or the `problems` for which there is none.

    `new` of the target begins at zero, `least` are the bytes that each process has to be sent, and `hops` who sends
    what to whom, round by round. `digests` name the two sides.
    """

    source: Mapping[str, Holding]
    target: Mapping[str, Holding]
    problems: tuple[Problem, ...]
    digests: tuple[str, str]
    new: frozenset[str] = frozenset()
    least: Mapping[int, int] = field(default_factory=dict)
    hops: Sequence[Sequence[Hop]] = ()

    @classmethod
    def between(
        cls,
        source: Mapping[str, Holding],
        target: Mapping[str, Holding],
        *,
        staging_bytes: int,
        nodes: Sequence[int] | None = None,
    ) -> Way:
        """Messages of one round are at most `staging_bytes` each way; `nodes` as of `routes`."""
        problems, digests = unfit(source, target), (digest(source), digest(target))
        if problems:
            return cls(source=source, target=target, problems=problems, digests=digests)
        new = afresh(source, target)
        wanted = {name: holding for name, holding in target.items() if name not in new}
        return cls(
            source=source,
            target=target,
            problems=(),
            digests=digests,
            new=new,
            least=least_bytes(source, wanted),
            hops=rounds(routes(source, wanted, nodes=nodes), staging_bytes=staging_bytes),
        )

    def joins(self, source: Mapping[str, Holding], target: Mapping[str, Holding]) -> bool:
        return self.source == source and self.target == target
