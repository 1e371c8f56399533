"""Parts of unequal size that torch's planners are told of by the tensors themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from meshwright.parallel.clip import local_part
from meshwright.parallel.shards import held_start, is_uneven
from meshwright.parallel.torch_compat import plain, with_local


class _Placed(Tensor):
    """A rank's part that knows where it lies: planners ask a distributed tensor's part before they work it out."""

    starts: tuple[int, ...]
    shape_of_whole: torch.Size

    def __create_write_items__(self, fqn: str, _whole: Any) -> list[WriteItem]:
        chunk = self.__create_chunk_list__()[0]
        data = TensorWriteData(
            chunk=chunk, properties=TensorProperties.create_from_tensor(plain(self)), size=self.shape_of_whole
        )
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size(self.starts), sizes=self.shape)]

    def __get_tensor_shard__(self, _index: MetadataIndex) -> Tensor:
        return plain(self)


def told(x: Tensor) -> Tensor:
    """x as planners understand it: the same memory."""
    if not isinstance(x, DTensor) or not is_uneven(x):
        return x
    local = local_part(x).detach().as_subclass(_Placed)
    local.starts, local.shape_of_whole = held_start(x), x.shape
    return with_local(x, local)
