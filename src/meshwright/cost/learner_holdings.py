"""What learners hold between two steps: each its own, and all alike what they go from when they meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.cost.holdings import PARAMETERS, Holding, holdings, trained
from meshwright.spec.plan import Design

OUTER = "outer."
ANCHOR, MOMENTUM, SENT, AWAY = "anchor", "momentum", "sent", "away"  # of a parameter that learners meet in
OF_ALL = (ANCHOR, MOMENTUM)

Origins = Sequence[int | None]


def learner_holdings(design: Design, *, origins: Origins | None = None) -> dict[str, Holding]:
    """Every tensor that learners of `design` keep between steps, by its name and that of the learner that it is of.

    Learner i goes on with what was learner `origins[i]`'s, by its names; one without an origin begins from what all
    meet in, with the optimizer and the buffers of the first that has one. None: each is what it was. There is one that
    has an origin.
    """
    plan, found = design.plan, dict[str, Holding]()
    own = replace(design, plan=plan.of_learner())
    origins = range(plan.learners) if origins is None else origins
    donor = donor_of(origins)
    for learner, origin in enumerate(origins):
        ranks = plan.ranks_of_learner(learner)
        parameters = trained(own, processes=ranks)
        for name, holding in holdings(own, processes=ranks).items():
            if origin is not None or name.removeprefix(PARAMETERS) not in parameters:
                _add(found, own_name(name, donor if origin is None else origin), holding)
        for name, holding in parameters.items():
            flat = replace(holding, dtype="float64" if holding.dtype == "float64" else "float32")
            for what in kept(design):
                if what in OF_ALL:
                    _add(found, f"{OUTER}{what}.{name}", flat)
                elif origin is not None:
                    _add(found, own_name(f"{OUTER}{what}.{name}", origin), flat)
    return found


def kept(design: Design) -> tuple[str, ...]:
    """What is kept of each parameter that learners meet in."""
    gradients = design.plan.gradients
    there = {MOMENTUM: gradients.keeps_momentum, SENT: gradients.keeps_sent, AWAY: gradients.rounds.delay > 0}
    return (ANCHOR, *(what for what, is_there in there.items() if is_there))


def donor_of(origins: Origins) -> int:
    """Whose optimizer a learner without an origin begins with."""
    return next(origin for origin in origins if origin is not None)


def own_name(name: str, learner: int) -> str:
    """What is called `name` in every plan, as it is `learner`'s own."""
    return f"learner.{learner}.{name}"


def _add(found: dict[str, Holding], name: str, holding: Holding) -> None:
    known = found.get(name, holding)
    found[name] = replace(known, parts={**known.parts, **holding.parts})
