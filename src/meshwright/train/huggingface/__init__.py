"""Weights of Hugging Face folders into runs and out of them, never a whole model in one process."""

from meshwright.train.huggingface.read import Weights, load_weights

__all__ = ["Weights", "load_weights"]
