"""Weights of a Hugging Face folder for any plan: every rank reads the part that it keeps, straight from the files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from meshwright.catalog.huggingface.folder import Folder
from meshwright.parallel import relocate
from meshwright.spec.errors import Problem
from meshwright.train.huggingface.files import DTYPES, MappedFiles
from meshwright.train.huggingface.pieces import read_box

MODEL = "model."


class Weights:
    """The parameters of a model, by the names of the whole model, as a folder stores them; `unfit` is what of them was
    refused."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.unfit: Problem | None = None
        self._files = MappedFiles(folder.tensors)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.folder.table.ours

    def read(self, into: Tensor, name: str, *, start: tuple[int, ...]) -> None:
        """`into` holds the box of parameter `name` from `start` on."""
        read_box(into, name, start=start, table=self.folder.table, stored=self._files.tensor)

    def refused(self, name: str, *, dtype: torch.dtype) -> Problem:
        """Which stored tensor of parameter `name` holds a number that is none in `dtype`."""
        pieces = self.folder.table.of_ours[name]
        odd = [piece.theirs for piece in pieces if not self._files.tensor(piece.theirs).to(dtype).isfinite().all()]
        stored = odd[0] if odd else pieces[0].theirs
        what = f"{stored} holds nan or inf as {str(dtype).removeprefix('torch.')}"
        where = str(self.folder.tensors[stored].file)
        self.unfit = Problem(what=what, where=where, fix="convert weights that are finite")
        return self.unfit

    def dtype(self, name: str) -> torch.dtype:
        """That of the stored tensor that parameter `name`, or the first part of it, is in."""
        first = self.folder.table.of_ours[name][0]
        return DTYPES[self.folder.tensors[first.theirs].entry.dtype]


class FolderReader(StorageReader):
    """A folder as torch's checkpoints read one: each parameter is a single chunk of which any box can be had."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        return None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found = {
            f"{MODEL}{name}": TensorStorageMetadata(
                properties=TensorProperties(dtype=self._weights.dtype(name)),
                size=torch.Size(shape),
                chunks=[ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=torch.Size(shape))],
            )
            for name, shape in self._weights.shapes.items()
        }
        return Metadata(state_dict_metadata=dict(found))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            name = item.storage_index.fqn.removeprefix(MODEL)
            self._weights.read(target, name, start=tuple(item.storage_offsets))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).is_dir()


def load_weights(target: relocate.State, folder: Folder, *, group: dist.ProcessGroup | None) -> None:
    """The model of `target` holds the weights of `folder`, each rank its part. Collective over `group`; None is a
    process alone."""
    relocate.load(FolderReader(Weights(folder)), target, group=group)
