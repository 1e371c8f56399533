"""The real step of any rank of any plan, on fake tensors under a fake process group; one process, no peers."""
