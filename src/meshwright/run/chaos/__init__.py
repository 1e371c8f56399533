"""Faults done to a run from outside, what became of it, and whether anything was lost by them."""
