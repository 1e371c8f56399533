"""MASKED: the target of a token that nothing is learned from."""

MASKED = -100  # what torch's cross entropy leaves out too, so that data made for it means the same here
