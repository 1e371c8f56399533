"""Hugging Face tensors as parameters of ours, family by family: descriptions alone, no weights."""

from meshwright.catalog.huggingface.tensors.families import tensors, unconvertible
from meshwright.catalog.huggingface.tensors.pieces import Cut, Piece, Planes, Table

__all__ = ["Cut", "Piece", "Planes", "Table", "tensors", "unconvertible"]
