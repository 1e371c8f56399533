"""Elastic runs under torchft: replicas that find each other at a lighthouse and vote in every step."""
