"""Pipelines told stage by stage, as closed forms and the event simulation read them."""

import numpy as np

from meshwright.cost.pipeline import RankSeconds, Shape, makespan
from meshwright.cost.simulate import StageRows, StageSeconds, play
from meshwright.cost.table import SCHEDULES
from meshwright.schedule import graph, placement, program
from meshwright.schedule.build import LOOPS, V_SHAPES


def chunks_of(kind):
    return 2 if kind in LOOPS | V_SHAPES else 1


def hops(transfer, pipeline):
    """Seconds between neighbours: one for all, or one for each."""
    return np.broadcast_to(transfer, (pipeline - 1,)).tolist()


def ranks_of(kind, sizes, *, pipeline, chunks, shown):
    """What a rank has of `sizes` by stage, for the ranks shown."""
    places = np.array(placement(kind, pipeline=pipeline, chunks=chunks))
    sizes = np.asarray(sizes, dtype=np.float64)
    first, last = sizes[:pipeline], sizes[-pipeline:][np.argsort(places[-pipeline:])]
    return RankSeconds(
        total=np.bincount(places, weights=sizes)[None, shown],
        first=first[None, shown],
        last=last[None, shown],
        first_upto=np.cumsum(first)[None, shown],
        last_upto=np.cumsum(last)[None, shown],
        everything=np.array([sizes.sum()]),
    )


def shape_of(kind, *, pipeline, chunks, microbatches, slices=1, shown):
    return Shape(
        schedule=np.array([SCHEDULES.index(kind)]),
        pipeline=np.array([float(pipeline)]),
        chunks=np.array([float(chunks)]),
        microbatches=np.array([float(microbatches)]),
        rank=shown[None],
        valid=np.ones((1, len(shown)), dtype=np.bool_),
        slices=np.array([float(slices)]),
    )


def closed(kind, *, forward, backward, transfer, shown=None, weight_share=None, **sizes):
    shown = np.arange(sizes["pipeline"]) if shown is None else np.asarray(shown)

    def ranks(seconds):
        return ranks_of(kind, seconds, pipeline=sizes["pipeline"], chunks=sizes["chunks"], shown=shown)

    weight = None if weight_share is None else ranks(np.multiply(backward, weight_share))
    reach = np.concatenate([[0.0], np.cumsum(hops(transfer, sizes["pipeline"]))])[None, shown]
    shape = shape_of(kind, shown=shown, **sizes)
    return float(makespan(shape, forward=ranks(forward), backward=ranks(backward), reach=reach, weight=weight)[0])


def stages_of(kind, *, pipeline, chunks, forward, backward, transfer, weight_share=None):
    places = placement(kind, pipeline=pipeline, chunks=chunks)
    between = hops(transfer, pipeline)
    around = max(between, default=0.0)
    ways = [
        0.0 if rank == after else between[min(rank, after)] if abs(rank - after) == 1 else around
        for rank, after in zip(places, [*places[1:], places[-1]], strict=True)
    ]
    share = 1.0 - (0.5 if weight_share is None else weight_share)
    return [
        StageSeconds(forward=f, backward=b, transfer=way, input_share=share)
        for f, b, way in zip(forward, backward, ways, strict=True)
    ]


def played(kind, *, pipeline, chunks, microbatches, slices=1, **seconds):
    made = program(kind, pipeline=pipeline, chunks=chunks, microbatches=microbatches, slices=slices)
    return play(graph(made), stages=stages_of(kind, pipeline=pipeline, chunks=chunks, **seconds)).makespan


def stage_rows(*plans):
    """The stages of plans of one schedule."""
    columns = {
        "forward": lambda stage: stage.forward,
        "backward": lambda stage: stage.backward,
        "weight": lambda stage: stage.backward * (1.0 - stage.input_share),
        "transfer": lambda stage: stage.transfer,
        "waits": lambda _: 0.0,
    }
    return StageRows(
        **{name: np.array([[of(stage) for stage in stages] for stages in plans]).T for name, of in columns.items()}
    )
