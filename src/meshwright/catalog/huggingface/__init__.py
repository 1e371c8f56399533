"""Hugging Face config.json to ModelSpec, without the transformers library."""

from meshwright.catalog.huggingface.families import model_from_config

__all__ = ["model_from_config"]
