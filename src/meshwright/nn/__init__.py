"""Modules of a decoder with no distributed import."""

from meshwright.nn.decoder import Decoder, unsupported
from meshwright.nn.generate import Sampling, generate
from meshwright.nn.initialize import fill, initial_value, initialize
from meshwright.nn.loss import token_losses

__all__ = [
    "Decoder",
    "Sampling",
    "fill",
    "generate",
    "initial_value",
    "initialize",
    "token_losses",
    "unsupported",
]
