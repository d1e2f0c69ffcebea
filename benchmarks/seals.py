"""What it costs to see that a tensor has changed on its way, per MiB: frames have AES-GMAC; the others could be had.
Then what a link over loopback costs both of its ends together, in processor time: with neither, with MACs, with TLS.

    python benchmarks/seals.py
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from rallypoint.net.certificates import TlsFiles, make_certificates
from rallypoint.net.channel import SEALED_BYTES, Opener, Sealer
from rallypoint.net.frames import Header, Kind
from rallypoint.net.handshake import LinkKeys
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.tls import TlsTransport
from rallypoint.net.transport import Transport
from support.transports import Beside, connected

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


def processor_us(transport: Transport, *, macs: bool) -> float:
    """The best round's processor time of both ends of a link, for a frame with a payload of 1 MiB."""
    listener = transport.listen("127.0.0.1:0")
    near, far = connected(transport, listener)
    for end in (near, far):
        end.set_timeout(None)
    keys, best = LinkKeys(KEY, bytes(32)), float("inf")
    sealer, opener = Sealer(keys, macs=macs), Opener(keys.other_side(), "a", macs=macs)
    payload, room, head = (memoryview(bytearray(size)) for size in (MIB, MIB, SEALED_BYTES))

    def send() -> None:
        for _ in range(MEMORY):
            near.send(sealer.seal(Header(Kind.VERSION, length=MIB), payload), payload)

    for _ in range(ROUNDS):
        start = time.process_time()
        with Beside(send) as sending:
            for _ in range(MEMORY):
                far.recv_into(head)
                opener.open(head)
                far.recv_into(room)
                opener.verify(room)
            sending.raise_if_failed()
        best = min(best, time.process_time() - start)
    for closed in (near, far, listener):
        closed.close()
    return best / MEMORY * 1e6


def links() -> None:
    """Print what links cost, in turn."""
    with TemporaryDirectory() as folder:
        make_certificates(Path(folder))
        tls = TlsTransport(TlsFiles(Path(folder), "server"))
        cases = (
            ("neither", TcpTransport(), False), ("MACs (without --tls)", TcpTransport(), True),
            ("TLS (what --tls has)", tls, False),
        )  # fmt: skip
        for name, transport, macs in cases:
            print(f"a link with {name:26s} {processor_us(transport, macs=macs):5.0f} us of both ends' processors")


if __name__ == "__main__":
    data = memoryview(os.urandom(MEMORY * MIB))
    far = [data[at * MIB : (at + 1) * MIB] for at in range(MEMORY)]
    near = far[:1] * 32
    for name, check in CASES:
        print(f"{name:32s} {microseconds(check, far):5.0f} us from memory {microseconds(check, near):5.0f} from cache")
    links()
