"""Checkpoints that are whole or do not count: saved in the background, loaded on any plan and world size."""

from meshwright.train.checkpoint.find import Checkpoint, Found, newest
from meshwright.train.checkpoint.manifest import Manifest, model_digest
from meshwright.train.checkpoint.store import Store

__all__ = ["Checkpoint", "Found", "Manifest", "Store", "model_digest", "newest"]
