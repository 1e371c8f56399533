"""Models by name and by file."""
