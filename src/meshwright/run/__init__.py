"""Workers and machines: train a design, sample from a run, detect, measure and examine this machine.

Names are imported from their files, so that a worker pays for nothing that only its launcher needs.
"""
