"""Which version of this package's code runs: older compiled code, or other ranks, may differ."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

#: The folder of this package's code.
PACKAGE = Path(__file__).resolve().parents[1]


@functools.cache
def source_digest() -> str:
    """A digest of this package's files, names included."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{file.relative_to(PACKAGE)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
