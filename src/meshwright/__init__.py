"""Designs, explains and runs distributed training."""

__version__ = "0.1.0"
