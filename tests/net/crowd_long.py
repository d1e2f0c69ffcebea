"""Two thousand connections that say nothing, or trickle, at the ports of a job of real programs; and what they cost it.

    python tests/net/crowd_long.py                # without TLS and with it, at the coordinator's port and at a server's
    python tests/net/crowd_long.py --seconds 20   # who is closed connects again for so long

It prints the attacked process's memory and threads before, during and after; how long connections were kept; how many
steps the job made meanwhile, and the longest time between two; and how long honest newcomers waited for their greeting.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import resource
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from rallypoint.core.protocol import Hello
from rallypoint.errors import RallypointError
from rallypoint.net.handshake import COORDINATOR, introduce, new_token
from rallypoint.net.keys import role_token
from rallypoint.net.tcp import TcpTransport, split_address
from rallypoint.net.tls.files import TlsFiles
from rallypoint.net.tls.making import make_certificates
from rallypoint.net.tls.transport import TlsTransport
from rallypoint.net.transport import Transport

sys.path.append(str(Path(__file__).resolve().parent.parent))

from support.programs import Program

SCRIPT = """
import pathlib, time, torch, rallypoint as rp
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
with rp.join() as job, open("steps", "a") as steps:
    for micro in job.train(model, data, replicas=2, batch=4, steps=10**9):
        with micro:
            micro.backward(model(micro.batch[0]).square().mean())
        time.sleep(0.02)
        print(time.monotonic(), file=steps, flush=True)
"""
TRICKLE_S = 0.25
FIRST_BYTES = {False: b"RLPT" + bytes(300), True: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300)}


class Programs:
    """A coordinator, a server and a worker, each a program, until the end of the body."""

    def __init__(self, folder: Path, *, tls: bool) -> None:
        self.folder, self.token, self.tls = folder, new_token(), tls
        self.started = dict[str, Program]()
        (folder / "train.py").write_text(SCRIPT)
        if tls:
            make_certificates(folder / "certificates")
        self._start("coordinator", "coordinator", "--workers", "1", "--servers", "1")
        address = self._until("coordinator", r"the coordinator listens at (\S+)\n")
        self._start("server", "server", "--coordinator", address)
        self._start("worker", "worker", "--coordinator", address, "train.py")
        self._until("coordinator", r"(step \d+/)")
        sockets = psutil.Process(self.started["server"].pid).net_connections()
        (server,) = (one.laddr for one in sockets if one.status == psutil.CONN_LISTEN)
        self.ports = {"coordinator": address, "server": f"{server.ip}:{server.port}"}

    def _start(self, name: str, *arguments: str) -> None:
        tls = ["--tls", str(self.folder / "certificates")] if self.tls else []
        env = {**os.environ, "RALLYPOINT_TOKEN": self.token, "RALLYPOINT_ID": name, "COLUMNS": "200"}
        role, *rest = arguments
        argv = ["-m", "rallypoint.cli", role, *tls, *rest]
        self.started[name] = Program(argv, self.folder / name, env, self.folder)

    def _until(self, name: str, pattern: str) -> str:
        deadline, file = time.monotonic() + 120.0, self.folder / name
        while (found := re.search(pattern, file.read_text() if file.exists() else "")) is None:
            assert time.monotonic() < deadline, file.read_text()
            time.sleep(0.05)
        return found[1]

    def transport(self) -> Transport:
        return TlsTransport(TlsFiles(self.folder / "certificates", "worker")) if self.tls else TcpTransport()

    def steps(self, begin: float, end: float) -> tuple[int, float]:
        """How many steps the job made between two moments, and the longest time without one (seconds)."""
        lines = (self.folder / "steps").read_text().splitlines()[:-1]
        moments = [begin, *(moment for moment in map(float, lines) if begin < moment < end), end]
        return len(moments) - 2, max(b - a for a, b in itertools.pairwise(moments))

    def close(self) -> None:
        for program in self.started.values():
            program.kill()
            program.wait()


class Crowd:
    """So many connections to an address at once. Who is closed connects again until the end."""

    def __init__(self, address: str, count: int, *, trickles: bytes = b"") -> None:
        self._place, self._trickles = split_address(address), trickles
        self._selector = selectors.DefaultSelector()
        self._open: dict[socket.socket, tuple[float, int]] = {}  # since when, and how many bytes it has sent
        self.kept: list[float] = []
        self.made, self._count = 0, count

    def play(self, seconds: float, beside: Callable[[], None]) -> None:
        """Hold as many as there are to be, for so long; call `beside` now and then."""
        end, next_beside, next_byte = time.monotonic() + seconds, 0.0, 0.0
        while (now := time.monotonic()) < end:
            for _ in range(min(200, self._count - len(self._open))):
                self._connect()
            for key, _ in self._selector.select(0.01):
                self._gone(key.fileobj)  # type: ignore[arg-type]
            if self._trickles and now >= next_byte:
                next_byte = now + TRICKLE_S
                self._trickle()
            if now >= next_beside:
                beside()
                next_beside = time.monotonic() + 0.2

    def _connect(self) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(self._place)
        self._open[sock] = time.monotonic(), 0
        self._selector.register(sock, selectors.EVENT_READ)
        self.made += 1

    def _gone(self, sock: socket.socket) -> None:
        """It has been sent something, or closed."""
        try:
            if sock.recv(1 << 16):
                return  # a Challenge, or the word that TLS is wanted
        except BlockingIOError:
            return
        except OSError:
            pass
        self.kept.append(time.monotonic() - self._open[sock][0])
        self._drop(sock)

    def _trickle(self) -> None:
        for sock, (since, sent) in list(self._open.items()):
            with contextlib.suppress(OSError):
                sock.send(self._trickles[sent : sent + 1])
                self._open[sock] = since, sent + 1

    def _drop(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._open[sock]
        sock.close()

    def close(self) -> None:
        for sock in list(self._open):
            self._drop(sock)
        self._selector.close()


@contextlib.contextmanager
def running(*, tls: bool) -> Iterator[Programs]:
    """The programs, in a folder of their own."""
    with TemporaryDirectory() as folder:
        programs = Programs(Path(folder), tls=tls)
        try:
            yield programs
        finally:
            programs.close()


def attack(programs: Programs, role: str, count: int, seconds: float, *, trickles: bool) -> None:
    """Attack one port, and print what came of it."""
    process = psutil.Process(programs.started[role].pid)
    memory, threads, waits, refused = [process.memory_info().rss], [process.num_threads()], list[float](), 0
    transport, token = programs.transport(), role_token(programs.token, "worker")

    def beside() -> None:
        nonlocal refused
        memory.append(process.memory_info().rss)
        threads.append(process.num_threads())
        began = time.monotonic()
        try:  # an honest newcomer at the coordinator, which leaves again
            connection = transport.connect(programs.ports["coordinator"], 5.0)
            try:
                hello = Hello("worker", f"newcomer{len(waits)}", "here", to=COORDINATOR)
                introduce(connection, hello, token)
            finally:
                connection.close()
        except RallypointError:
            refused += 1
        else:
            waits.append(time.monotonic() - began)

    begin = time.monotonic()
    calm = programs.steps(begin - 5.0, begin)
    crowd = Crowd(programs.ports[role], count, trickles=FIRST_BYTES[programs.tls] if trickles else b"")
    try:
        crowd.play(seconds, beside)
        end = time.monotonic()
    finally:
        crowd.close()
    time.sleep(3.0)
    after = process.memory_info().rss
    made, longest = programs.steps(begin, end)
    kept = sorted(crowd.kept) or [0.0]
    print(
        f"{'TLS' if programs.tls else 'no TLS':6} {role:11} {'trickle' if trickles else 'silent':7}: "
        f"{crowd.made} connections, {len(crowd.kept)} closed by the {role} after "
        f"{statistics.median(kept):.2f} s in the median, at most {kept[-1]:.2f} (with the time "
        f"before they were accepted); {memory[0] / 1e6:.0f} MB before, "
        f"at most {max(memory) / 1e6:.0f}, {after / 1e6:.0f} after; {threads[0]} threads, at most {max(threads)}; "
        f"{made / (end - begin):.1f} steps a second (before {calm[0] / 5:.1f}), at most {longest:.2f} s apart; "
        f"{len(waits)} newcomers greeted, in {statistics.median(waits or [0]):.3f} s in the median, "
        f"at most {max(waits or [0]):.2f}; {refused} had to come again", flush=True,
    )  # fmt: skip
    for name, program in programs.started.items():
        assert program.poll() is None, (programs.folder / name).read_text()


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for tls in (False, True):
        with running(tls=tls) as programs:
            time.sleep(6.0)
            for role in ("coordinator", "server"):
                for trickles in (False, True):
                    attack(programs, role, options.connections, options.seconds, trickles=trickles)
            said = (programs.folder / "coordinator").read_text()
            print(f"       the coordinator has written {said.count('closed the')} lines about them", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
