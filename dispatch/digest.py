"""A number for what ranks compare, instead of all of it."""

from __future__ import annotations

import hashlib

__all__ = ["digest_of"]


def digest_of(raw: bytes) -> int:
    """The first 63 bits of SHA-256: an int64 that is not negative, the same in every process."""
    return int.from_bytes(hashlib.sha256(raw).digest()[:8], "little") >> 1
