"""What it costs to see that a tensor has changed on its way, per MiB: frames have AES-GMAC; the others could be had.

    python benchmarks/seals.py
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Callable

import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MIB = 1 << 20
MEMORY = 256  # MiB: more than a processor's caches hold
ROUNDS = 5
NONCE = bytes(12)  # one and the same is enough to take the time
KEY = os.urandom(32)
MACS = AESGCM(KEY)

CASES: tuple[tuple[str, Callable[[memoryview], bytes]], ...] = (
    ("AES-256-GMAC (what frames have)", lambda data: MACS.encrypt(NONCE, b"", data)),
    ("XXH3-128 (no key)", xxhash.xxh3_128_digest),
    ("HMAC-SHA256", lambda data: hmac.digest(KEY, data, "sha256")),
    ("keyed BLAKE2b", lambda data: hashlib.blake2b(data, key=KEY).digest()),
)


def microseconds(check: Callable[[memoryview], bytes], pieces: list[memoryview]) -> float:
    """The best round's time for a piece of 1 MiB."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for piece in pieces:
            check(piece)
        best = min(best, time.perf_counter() - start)
    return best / len(pieces) * 1e6


if __name__ == "__main__":
    data = memoryview(os.urandom(MEMORY * MIB))
    far = [data[at * MIB : (at + 1) * MIB] for at in range(MEMORY)]
    near = far[:1] * 32
    for name, check in CASES:
        print(f"{name:32s} {microseconds(check, far):5.0f} us from memory {microseconds(check, near):5.0f} from cache")
