"""Runs that go on without ranks that they lose: the launcher's side, the workers' side, and the board between them."""
