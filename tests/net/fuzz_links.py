"""A worker's data plane, whose servers send it what real ones have sent, with mutated frames between them."""

from __future__ import annotations

import random
import threading

import msgspec
from fuzz_frames import Corpus, Frame, Mutator
from fuzz_jobs import TOKEN, join_links

from rallypoint.config import parse
from rallypoint.core.job import JobRecord
from rallypoint.core.protocol import Welcome
from rallypoint.core.view import Member, View
from rallypoint.core.worker import slots as machine
from rallypoint.errors import LinkError, RallypointError
from rallypoint.net.channel import Sealer
from rallypoint.net.frames import Kind
from rallypoint.net.handshake import Credentials, Identity, greet, ticket_for
from rallypoint.net.transport import InprocConnection, InprocListener, InprocTransport
from rallypoint.observe.trace import Tracer
from rallypoint.worker.exchange.exchange import Exchange
from rallypoint.worker.exchange.links import ExchangeContext
from rallypoint.worker.exchange.locked import Rewound

SECRET = b"the secret of every server here."
TO_WORKERS = (Kind.VERSION, Kind.STATE, Kind.ROWS, Kind.WORDS, Kind.CREDIT, Kind.CODEC_STATE, Kind.TAKEN, Kind.WAIT)
PATIENCE_S = 20.0


class FakeServers:
    """Plays `script` (what each server has sent to a worker, in order) to new exchanges, with mutants in between."""

    def __init__(self, record: JobRecord, view: View, me: str, script: list[Frame], corpus: Corpus, seed: int) -> None:
        self.record, self.config, self.me = record, parse(record.config), me
        fakes = tuple(msgspec.structs.replace(server, address=f"{server.id}:1") for server in view.servers)
        self.view = msgspec.structs.replace(view, servers=fakes)
        self.script: dict[str, list[Frame]] = {server.id: [] for server in fakes}
        for frame in script:
            self.script[view.primary[frame.header.shard]].append(frame)
        self.rng, self.corpus = random.Random(seed), corpus
        self.mutator = Mutator(self.rng, corpus)
        self.kinds = [kind for kind in corpus.kinds if kind in TO_WORKERS]
        self.thrown = 0
        self.faults: list[str] = []

    def attack(self) -> None:
        """One worker, from its first view until a frame has ended it or all of the script is played."""
        transport = InprocTransport()
        listeners = {server.id: transport.listen(server.address) for server in self.view.servers}
        exchange = Exchange(self.record.layout, self.config, self._context(transport))
        main = threading.Thread(target=self._main, args=(exchange,), name="the main thread")
        exchange.adopt(self.view)
        try:
            links = {id: self._accept(server, listeners[server.id]) for id, server in self._servers.items()}
            exchange._links.overdraw(True)  # credits are not played
            main.start()
            self._play(links)
        except LinkError:  # the worker has closed a link
            pass
        finally:
            exchange.finish()
            for listener in listeners.values():
                listener.close()
            exchange.close()
            if main.ident is not None:
                main.join(PATIENCE_S)
                if main.is_alive():
                    self.faults.append("the worker's main thread hangs")
            join_links()

    @property
    def _servers(self) -> dict[str, Member]:
        return {server.id: server for server in self.view.servers}

    def _context(self, transport: InprocTransport) -> ExchangeContext:
        incarnation = next(worker.incarnation for worker in self.view.workers if worker.id == self.me)
        known = Credentials(Identity("worker", self.me, TOKEN))
        known.admitted(incarnation, b"")
        known.given(self.view, {id: ticket_for(SECRET, "worker", self.me, incarnation) for id in self._servers})
        return ExchangeContext(known, transport, Tracer(self.me), lambda text: None)

    def _accept(self, server: Member, listener: InprocListener) -> tuple[InprocConnection, Sealer]:
        connection = listener.accept()
        greeting = greet(connection, Identity("server", server.id, TOKEN, server.incarnation, SECRET))
        return connection, Sealer(greeting.welcome(Welcome()))

    def _play(self, links: dict[str, tuple[InprocConnection, Sealer]]) -> None:
        rng, gentle = self.rng, self.rng.choice([0.3, 0.9, 0.97, 0.99])
        left = {id: list(reversed(frames)) for id, frames in self.script.items() if id in links}
        spared = rng.choice([0, 0, rng.randrange(100)])
        for number in range(rng.choice([60, 400])):
            id = rng.choice(sorted(links))
            for _ in range(rng.randrange(3)):
                if left[id]:
                    self._throw(links[id], left[id].pop())
            if number >= spared:
                model = self.corpus.choose(rng, self.kinds)
                if rng.random() > gentle:
                    model = self.corpus.choose(rng) if rng.random() < 0.2 else model
                    self._throw(links[id], self.mutator.mutate(model))
                elif model.header.kind is not Kind.CREDIT:
                    self._throw(links[id], self.mutator.mutate(model, gently=True))
                self.thrown += 1

    def _throw(self, link: tuple[InprocConnection, Sealer], frame: Frame) -> None:
        connection, sealer = link
        payload = memoryview(frame.payload)
        connection.send(sealer.seal(frame.header, payload), payload)

    # ---- the worker's main thread ----

    def _main(self, exchange: Exchange) -> None:
        try:
            while self._take(exchange):
                pass
        except (RallypointError, Rewound):
            pass
        except BaseException as error:
            self.faults.append(f"the worker's main thread: {error!r}")

    def _take(self, exchange: Exchange) -> bool:
        action = exchange.next_action()
        match action:
            case None | machine.Store() | machine.UploadFirst():
                return False
            case machine.Install(version=version):
                if exchange.begin_install(version) is not None:
                    exchange.take_states()
                    exchange.installed(version)
            case machine.Compute(step=step, replica=replica):
                self._compute(exchange, step, replica)
        return True

    def _compute(self, exchange: Exchange, step: int, replica: int) -> None:
        if exchange.replica.begin(step, replica) is None:
            return
        try:
            exchange.replica.weigh(1.0, finite=True)
            for shard in exchange.layout.shards:
                if shard.part is None and exchange.replica.claim(shard.index):
                    exchange.buffer[shard.start : shard.stop] = 0.5
                    exchange.replica.filled(shard.index)
            exchange.replica.computed()
        except Rewound:
            exchange.replica.abandoned()

