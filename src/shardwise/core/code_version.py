"""A digest of this package's code, which tells versions apart in caches and between ranks."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

#: The folder of this package's code.
PACKAGE = Path(__file__).resolve().parents[1]


@functools.cache
def source_digest() -> str:
    """A digest of the names and contents of this package's files."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{file.relative_to(PACKAGE)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
