"""Where the measured form of this machine is kept, so that who measures and who plans agree on the file."""

from __future__ import annotations

from pathlib import Path


def calibration_path(root: Path, fingerprint: str) -> Path:
    """The file of the machine with this fingerprint under the cache folder `root`."""
    return root / "clusters" / f"local-{fingerprint}.json"
