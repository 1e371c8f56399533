"""Checkpoints that are whole or do not count: saved in the background, loaded on any plan and world size."""

from meshwright.train.checkpoint.find import (
    Checkpoint,
    Found,
    corrupt,
    folders,
    is_corrupt,
    newest,
    of_checkpoint,
    open_checkpoint,
    places,
)
from meshwright.train.checkpoint.manifest import Manifest, model_digest
from meshwright.train.checkpoint.store import Store

__all__ = [
    "Checkpoint",
    "Found",
    "Manifest",
    "Store",
    "corrupt",
    "folders",
    "is_corrupt",
    "model_digest",
    "newest",
    "of_checkpoint",
    "open_checkpoint",
    "places",
]
