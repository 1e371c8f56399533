"""Stages of a pipeline under torch's runtime."""
