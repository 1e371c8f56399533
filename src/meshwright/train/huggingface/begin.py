"""A checkpoint of step 0 from a Hugging Face folder: written box by box, so that no process ever holds the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from meshwright.parallel import stored
from meshwright.spec.errors import ConfigError
from meshwright.train.huggingface.read import MODEL, Weights

Progress = Callable[[str, float, float], None]
BOX_BYTES = 2**22


class Streamed(DefaultSavePlanner):
    """Saves the parameters of `weights` in `dtype`, each made when its bytes are written.

    A large parameter is several boxes of whole rows, none larger than BOX_BYTES unless a row is. Raises ConfigError for
    a value that is not finite.
    """

    def __init__(self, weights: Weights, *, dtype: torch.dtype, progress: Progress | None = None) -> None:
        super().__init__()
        self._weights, self._dtype, self._progress = weights, dtype, progress
        self._done = 0.0
        self._total = float(sum(math.prod(shape) for shape in weights.shapes.values()) * dtype.itemsize)

    def create_local_plan(self) -> SavePlan:
        items = [item for name, shape in self._weights.shapes.items() for item in self._items(name, shape)]
        self.plan = SavePlan(items, planner_data={})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        data, offset = write_item.tensor_data, write_item.index.offset
        assert data is not None, "every item is a box of a tensor"
        assert offset is not None, "every box says where it begins"
        made = torch.empty(data.chunk.sizes, dtype=self._dtype)
        name = write_item.index.fqn.removeprefix(MODEL)
        self._weights.read(made, name, start=tuple(offset))
        if not made.isfinite().all():
            raise ConfigError(self._weights.refused(name, dtype=self._dtype))
        if self._progress is not None:
            self._done += made.nbytes
            self._progress("weights", self._done, self._total)
        return made

    def _items(self, name: str, shape: tuple[int, ...]) -> Iterator[WriteItem]:
        properties = TensorProperties(dtype=self._dtype)
        for first, rows in _rows(shape, itemsize=self._dtype.itemsize):
            offsets = torch.Size([first, *[0] * (len(shape) - 1)])
            chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([rows, *shape[1:]]))
            yield WriteItem(
                index=MetadataIndex(f"{MODEL}{name}", offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(shape)),
            )


def write_weights(
    weights: Weights, folder: Path, *, dtype: torch.dtype, progress: Progress | None = None
) -> stored.Written:
    """`folder` holds the parameters as a checkpoint does. By one process alone."""
    return stored.write({}, folder, group=None, planner=Streamed(weights, dtype=dtype, progress=progress))


def _rows(shape: tuple[int, ...], *, itemsize: int) -> Iterator[tuple[int, int]]:
    """(first, count) of the rows of each box."""
    row_bytes = math.prod(shape[1:]) * itemsize
    step = max(1, BOX_BYTES // max(row_bytes, 1))
    for first in range(0, shape[0], step):
        yield first, min(step, shape[0] - first)
