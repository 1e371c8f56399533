"""Where the measured form of this machine is kept, so that who measures and who plans agree on the file."""

from __future__ import annotations

from pathlib import Path

# Figures of another form are another file: what an older version measured is measured again, not misread.
FORM = 2


def calibration_path(root: Path, fingerprint: str) -> Path:
    """The file of the machine with this fingerprint under the cache folder `root`."""
    return root / "clusters" / f"local-{fingerprint}-{FORM}.json"
