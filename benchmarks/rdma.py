"""How fast large payloads go over loopback between two processes: TCP, and NIXL over UCX's shared memory and TCP.

    python benchmarks/rdma.py --json rdma.json

Frames as the wire has them but without MACs: a head of 80 bytes and 1 MiB, from one thread to one thread. A ratio above
1 is faster than TCP. There is no RDMA card in it: what NIXL is for is not measured here.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from rallypoint.net.rdma import NixlConnection, NixlTransport
from rallypoint.net.tcp import TcpTransport
from rallypoint.net.transport import Connection, Transport

HEAD, PAYLOAD = bytes(80), 1 << 20
KEYS = bytes(32), bytes([1]) * 32
WAYS = {"tcp": "", "nixl, shared memory": "sm,self,tcp", "nixl, UCX over tcp": "tcp"}


def transport_of(ucx: str) -> Transport:
    if not ucx:
        return TcpTransport()
    os.environ["UCX_TLS"] = ucx
    return NixlTransport()


def upgraded(connection: Connection, keys: tuple[bytes, bytes]) -> Connection:
    if isinstance(connection, NixlConnection):
        connection.upgrade(*keys)
        assert connection.upgraded, "NIXL does not work here"
    return connection


def send(address: str, ucx: str, count: int) -> None:
    connection = upgraded(transport_of(ucx).connect(address, 10.0), KEYS)
    payload = memoryview(os.urandom(PAYLOAD))
    for _ in range(count):
        connection.send(HEAD, payload)
    connection.recv_into(memoryview(bytearray(1)))
    connection.close()


def receive(pipe: Pipe, ucx: str, count: int) -> None:
    listener = transport_of(ucx).listen("127.0.0.1:0")
    pipe.send(listener.address)
    connection = upgraded(listener.accept(), KEYS[::-1])
    head, room = memoryview(bytearray(len(HEAD))), memoryview(bytearray(PAYLOAD))
    began = 0.0
    for number in range(count):
        connection.recv_into(head)
        connection.recv_into(room)
        if number == 0:
            began = time.perf_counter()
    pipe.send((count - 1) * PAYLOAD / (time.perf_counter() - began))
    connection.send(b"!")
    connection.close()
    listener.close()


def measured(ucx: str, count: int) -> float:
    """Bytes a second, from the second payload on."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=receive, args=(theirs, ucx, count))
    receiver.start()
    sender = context.Process(target=send, args=(ours.recv(), ucx, count))
    sender.start()
    rate = float(ours.recv())
    for process in (sender, receiver):
        process.join()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="payloads of 1 MiB")
    parser.add_argument("--rounds", type=int, default=3, help="each way so often; the median counts")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    given = parser.parse_args()
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(given.rounds):
        for way, ucx in WAYS.items():
            rates[way].append(measured(ucx, given.count))
    medians = {way: sorted(found)[len(found) // 2] for way, found in rates.items()}
    for way, median in medians.items():
        print(f"{way:22} {median / 1e6:8.0f} MB/s   {median / medians['tcp']:5.2f} of TCP")
    if given.json:
        given.json.write_text(json.dumps({"bytes_a_second": rates}, indent=2))


if __name__ == "__main__":
    main()
