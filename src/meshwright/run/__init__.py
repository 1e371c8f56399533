"""Workers and machines: train a design, sample from a run, detect, measure and examine this machine.

Importing this room imports no torch; what a function needs is imported when it is called.
"""

from meshwright.run.detect import detect
from meshwright.run.generate import Sample, generate
from meshwright.run.outcome import Ended, Outcome
from meshwright.run.train import train

__all__ = ["Ended", "Outcome", "Sample", "detect", "generate", "train"]
